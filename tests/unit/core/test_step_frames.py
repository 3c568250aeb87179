"""Step frames survive the wire exactly, and what is not a frame is refused as such."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_shared.errors import ProtocolError
from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.step import (
    NewSlot,
    NewSlots,
    Slot,
    StepPlan,
    StepResult,
    decode_plan,
    decode_result,
    encode_plan,
    encode_result,
    offsets_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

INT32 = st.integers(-(2**31), 2**31 - 1)
IDS = st.integers(0, 2**31 - 1)
QUICK = settings(max_examples=60, derandomize=True, database=None, deadline=None)


def _int32(values: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def _ragged(draw: st.DrawFn, rows: int) -> tuple[Any, Any]:
    lists = [draw(st.lists(IDS, max_size=4)) for _ in range(rows)]
    return offsets_of([len(ids) for ids in lists]), _int32([token for ids in lists for token in ids])


@st.composite
def new_slot(draw: st.DrawFn) -> NewSlot:
    tokens = draw(st.lists(IDS, min_size=1, max_size=6))
    params = SamplingParams(
        temperature=draw(st.floats(0, 100, width=32)),
        top_k=draw(IDS),
        top_p=draw(st.floats(0.125, 1, width=32)),
        min_p=draw(st.floats(0, 1, width=32)),
        seed=draw(st.integers(0, 2**64 - 1)),
        max_tokens=9,
        min_tokens=draw(st.integers(0, 9)),
        stop_token_ids=tuple(draw(st.lists(IDS, max_size=3))),
        eos_token_ids=tuple(draw(st.lists(IDS, max_size=2))),
    )
    return NewSlot(Slot(draw(IDS)), draw(IDS), draw(st.integers(1, len(tokens))), _int32(tokens), params)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    rows = draw(st.integers(0, 5))
    column = st.lists(INT32, min_size=rows, max_size=rows).map(_int32)
    offsets, ids = _ragged(draw, rows)
    plan = StepPlan(
        step_id=draw(st.integers(0, 2**63)),
        freed=_int32(draw(st.lists(IDS, max_size=4))),
        new=NewSlots.build(draw(st.lists(new_slot(), max_size=3))),
        slots=draw(column),
        num_tokens=draw(column),
        computed=draw(column),
        samples=np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), np.bool_),
        block_offsets=offsets,
        block_ids=ids,
    )
    if draw(st.booleans()):
        plan.draft_offsets, plan.draft_ids = _ragged(draw, rows)
    if draw(st.booleans()):
        plan.appended_offsets, plan.appended_ids = _ragged(draw, rows)
    plan.gated = _int32(draw(st.lists(st.integers(0, 4), max_size=rows)))
    return plan


def _same(left: object, right: object) -> None:
    assert type(left) is type(right)
    for item in fields(left):  # type: ignore[arg-type]  # dataclasses
        a, b = getattr(left, item.name), getattr(right, item.name)
        if isinstance(a, NewSlots):
            _same(a, b)
        elif isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, item.name
            assert a.tolist() == b.tolist(), item.name
        else:
            assert a == b, item.name


@QUICK
@given(plans())
def test_a_plan_comes_back_as_it_was(plan: StepPlan) -> None:
    _same(decode_plan(encode_plan(plan)), plan)


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    offsets, ids = _ragged(draw, draw(st.integers(0, 5)))
    return StepResult(
        step_id=draw(st.integers(0, 2**63)),
        token_offsets=offsets,
        token_ids=ids,
        not_finite=_int32(draw(st.lists(st.integers(0, 4), max_size=3))),
        wait_us=draw(IDS),
        run_us=draw(IDS),
        error=draw(st.text(max_size=20)),
    )


@QUICK
@given(results())
def test_a_result_comes_back_as_it_was(result: StepResult) -> None:
    _same(decode_result(encode_result(result)), result)


def test_a_plan_with_new_slots_carries_every_parameter() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=2**64 - 1, max_tokens=9, min_tokens=4,
        stop_token_ids=(8,), eos_token_ids=(2, 3),
    )  # fmt: skip
    new = NewSlots.build([NewSlot(Slot(5), 6, 2, _int32([1, 2, 3]), params)])
    assert (new.slots.tolist(), new.epochs.tolist(), new.prompt_lens.tolist()) == ([5], [6], [2])
    assert (new.token_offsets.tolist(), new.token_ids.tolist()) == ([0, 3], [1, 2, 3])
    assert (new.temperature.tolist(), new.top_k.tolist(), new.top_p.tolist()) == ([0.5], [3], [0.25])
    assert (new.min_p.tolist(), new.seed.tolist(), new.min_len.tolist()) == ([0.125], [2**64 - 1], [6])
    assert (new.stop_offsets.tolist(), new.stop_ids.tolist()) == ([0, 3], [2, 3, 8])


def _two_rows() -> StepPlan:
    return StepPlan(
        step_id=4,
        freed=_int32([]),
        new=NewSlots.build([NewSlot(Slot(0), 0, 1, _int32([1]), SamplingParams())]),
        slots=_int32([0, 1]),
        num_tokens=_int32([1, 1]),
        computed=_int32([0, 3]),
        samples=np.array([True, True]),
        block_offsets=_int32([0, 1, 1]),
        block_ids=_int32([7]),
    )


def _break_new(plan: StepPlan, name: str, value: object) -> None:
    setattr(plan.new, name, value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda plan: setattr(plan, "num_tokens", _int32([1])),
        lambda plan: setattr(plan, "computed", _int32([1, 2, 3])),
        lambda plan: setattr(plan, "samples", np.array([True])),
        lambda plan: setattr(plan, "block_offsets", _int32([0, 1])),
        lambda plan: setattr(plan, "block_offsets", _int32([1, 1, 1])),
        lambda plan: setattr(plan, "block_offsets", _int32([0, 2, 1])),
        lambda plan: setattr(plan, "block_offsets", _int32([0, 0, 0])),
        lambda plan: setattr(plan, "block_offsets", _int32([])),
        lambda plan: setattr(plan, "draft_ids", _int32([1])),
        lambda plan: setattr(plan, "draft_offsets", _int32([0, 1, 2])),
        lambda plan: setattr(plan, "appended_offsets", _int32([0])),
        lambda plan: setattr(plan, "slots", np.array([0, 1], np.int8)),
        lambda plan: _break_new(plan, "epochs", _int32([])),
        lambda plan: _break_new(plan, "seed", np.zeros(2, np.uint64)),
        lambda plan: _break_new(plan, "token_offsets", _int32([0, 2])),
        lambda plan: _break_new(plan, "stop_ids", _int32([1])),
    ],
)
def test_a_plan_whose_columns_disagree_is_refused(damage: Callable[[StepPlan], None]) -> None:
    plan = _two_rows()
    decode_plan(encode_plan(plan))
    damage(plan)
    with pytest.raises(ProtocolError):
        decode_plan(encode_plan(plan))


@pytest.mark.parametrize("offsets", [[], [1], [0, 2], [0, -1, 1], [0, 1, 0], [0, 0]], ids=str)
def test_a_result_whose_offsets_are_wrong_is_refused(offsets: list[int]) -> None:
    with pytest.raises(ProtocolError):
        decode_result(encode_result(StepResult(1, _int32(offsets), _int32([5]))))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        msgpack.packb(None),
        msgpack.packb([]),
        msgpack.packb([1]),
        msgpack.packb([9, 1, b"", b"", b"", 0, 0, ""]),
        msgpack.packb([2, "1", b"\0\0\0\0", b"", b"", 0, 0, ""]),
        msgpack.packb([2, 1, [0], b"", b"", 0, 0, ""]),
        msgpack.packb([2, 1, b"\0\0\0", b"", b"", 0, 0, ""]),
        msgpack.packb([2, 1, b"\0\0\0\0", b"", None, 0, 0, ""]),
        msgpack.packb([2, 1, b"\0\0\0\0", b"", b"", 0.5, 0, ""]),
        msgpack.packb([2, *range(100)]),
        msgpack.packb({1: 2}),
    ],
)
def test_what_is_not_a_frame_is_refused(frame: bytes) -> None:
    for decode in (decode_result, decode_plan):
        with pytest.raises(ProtocolError):
            decode(frame)


@QUICK
@given(st.binary(max_size=80), st.integers(0, 400), st.binary(min_size=1, max_size=3))
def test_damaged_frames_raise_protocol_errors_and_nothing_else(noise: bytes, at: int, patch: bytes) -> None:
    plan = encode_plan(_two_rows())
    result = encode_result(StepResult(1, _int32([0, 1]), _int32([5])))
    for good, decode in ((plan, decode_plan), (result, decode_result)):
        cut = at % len(good)
        for frame in (noise, good[:cut], good[:cut] + patch + good[cut + len(patch) :], good + noise):
            try:
                decode(frame)
            except ProtocolError:
                continue
