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
from tercet_shared.pooling import Pooling
from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.frames import (
    decode_from_core,
    decode_plan,
    decode_result,
    encode_mask,
    encode_plan,
    encode_result,
)
from tercet_shared.wire.step import (
    GrammarMask,
    LogProbColumns,
    NewSlot,
    NewSlots,
    Slot,
    StepPlan,
    StepResult,
    offsets_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

FLOAT32 = st.floats(-100, 100, width=32)
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
        presence_penalty=draw(FLOAT32),
        frequency_penalty=draw(FLOAT32),
        repetition_penalty=draw(FLOAT32),
        logit_bias=tuple(draw(st.lists(st.tuples(IDS, FLOAT32), max_size=3))),
        allowed_token_ids=tuple(draw(st.lists(IDS, max_size=3))),
        bad_words=tuple(draw(st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=3))),
        logprobs=draw(st.integers(-1, 20)),
        prompt_logprobs=draw(st.integers(-1, 20)),
    )
    pooling = draw(st.sampled_from(Pooling))
    prompt_len = draw(st.integers(1, len(tokens)))
    return NewSlot(Slot(draw(IDS)), draw(IDS), prompt_len, _int32(tokens), params, pooling, draw(IDS))


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
        if isinstance(a, (NewSlots, LogProbColumns)):
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
    _same(decode_from_core(encode_plan(plan)), plan)


@QUICK
@given(st.integers(0, 2**63), st.lists(st.integers(0, 2**32 - 1), max_size=9))
def test_a_mask_comes_back_as_it_was(step: int, words: list[int]) -> None:
    mask = GrammarMask(step, np.array(words, np.uint32))
    _same(decode_from_core(encode_mask(mask)), mask)


@st.composite
def logprobs(draw: st.DrawFn) -> LogProbColumns:
    lengths = draw(st.lists(st.integers(0, 3), max_size=3))
    tops = draw(st.lists(st.integers(0, 3), min_size=sum(lengths), max_size=sum(lengths)))
    numbers = np.array(draw(st.lists(FLOAT32, min_size=sum(tops), max_size=sum(tops))), np.float32)
    return LogProbColumns(
        rows=np.arange(len(lengths), dtype=np.int32),
        first=_int32(draw(st.lists(IDS, min_size=len(lengths), max_size=len(lengths)))),
        token_offsets=offsets_of(lengths),
        logprobs=np.array(draw(st.lists(FLOAT32, min_size=sum(lengths), max_size=sum(lengths))), np.float32),
        ranks=_int32(draw(st.lists(IDS, min_size=sum(lengths), max_size=sum(lengths)))),
        top_offsets=offsets_of(tops),
        top_ids=np.arange(sum(tops), dtype=np.int32),
        top_logprobs=numbers,
    )


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    offsets, ids = _ragged(draw, draw(st.integers(0, 5)))
    pooled = draw(st.integers(0, 3))
    return StepResult(
        step_id=draw(st.integers(0, 2**63)),
        token_offsets=offsets,
        token_ids=ids,
        not_finite=_int32(draw(st.lists(st.integers(0, 4), max_size=3))),
        wait_us=draw(IDS),
        run_us=draw(IDS),
        error=draw(st.text(max_size=20)),
        logprobs=draw(st.none() | logprobs()),
        prompt_logprobs=draw(st.none() | logprobs()),
        pooled_rows=np.arange(pooled, dtype=np.int32),
        pooled=np.array(draw(st.lists(FLOAT32, min_size=4 * pooled, max_size=4 * pooled)), np.float32),
    )


@QUICK
@given(results())
def test_a_result_comes_back_as_it_was(result: StepResult) -> None:
    _same(decode_result(encode_result(result)), result)


def test_a_plan_with_new_slots_carries_every_parameter() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=2**64 - 1, max_tokens=9, min_tokens=4,
        stop_token_ids=(8,), eos_token_ids=(2, 3), presence_penalty=0.75, frequency_penalty=-1.5,
        repetition_penalty=1.25, logit_bias=((4, 1.5), (9, -2.0)), allowed_token_ids=(4, 5, 6), logprobs=5,
        bad_words=((7,), (8, 9)), prompt_logprobs=0,
    )  # fmt: skip
    new = NewSlots.build([NewSlot(Slot(5), 6, 2, _int32([1, 2, 3]), params, Pooling.MEAN)])
    assert (new.presence.tolist(), new.frequency.tolist(), new.repetition.tolist()) == ([0.75], [-1.5], [1.25])
    assert (new.logprobs.tolist(), new.prompt_logprobs.tolist(), new.pooling.tolist()) == ([5], [0], [2])
    assert (new.bias_offsets.tolist(), new.bias_ids.tolist(), new.bias_values.tolist()) == ([0, 2], [4, 9], [1.5, -2])
    assert (new.allowed_offsets.tolist(), new.allowed_ids.tolist()) == ([0, 3], [4, 5, 6])
    assert (new.bad_offsets.tolist(), new.bad_lens.tolist(), new.bad_ids.tolist()) == ([0, 2], [1, 2], [7, 8, 9])
    assert (new.slots.tolist(), new.epochs.tolist(), new.prompt_lens.tolist()) == ([5], [6], [2])
    assert (new.token_offsets.tolist(), new.token_ids.tolist()) == ([0, 3], [1, 2, 3])
    assert (new.temperature.tolist(), new.top_k.tolist(), new.top_p.tolist()) == ([0.5], [3], [0.25])
    assert (new.min_p.tolist(), new.seed.tolist(), new.min_len.tolist()) == ([0.125], [2**64 - 1], [6])
    assert (new.stop_offsets.tolist(), new.stop_ids.tolist()) == ([0, 3], [2, 3, 8])


def _two_rows() -> StepPlan:
    return StepPlan(
        step_id=4,
        freed=_int32([]),
        new=NewSlots.build(
            [NewSlot(Slot(0), 0, 1, _int32([1]), SamplingParams(bad_words=((1, 2),), logit_bias=((3, 1.0),)))]
        ),
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
        lambda plan: _break_new(plan, "presence", np.zeros(0, np.float32)),
        lambda plan: _break_new(plan, "repetition", np.zeros(2, np.float32)),
        lambda plan: _break_new(plan, "logprobs", _int32([1, 1])),
        lambda plan: _break_new(plan, "pooling", _int32([])),
        lambda plan: _break_new(plan, "bias_ids", _int32([1, 2])),
        lambda plan: _break_new(plan, "bias_values", np.zeros(2, np.float32)),
        lambda plan: _break_new(plan, "allowed_offsets", _int32([0])),
        lambda plan: _break_new(plan, "bad_offsets", _int32([0, 2])),
        lambda plan: _break_new(plan, "bad_lens", _int32([1])),
        lambda plan: _break_new(plan, "bad_lens", _int32([0])),
        lambda plan: _break_new(plan, "bad_ids", _int32([1, 2, 3])),
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


def _columns() -> LogProbColumns:
    """Two rows with three tokens, which have two, none and one alternative."""
    return LogProbColumns(
        _int32([0, 2]), _int32([5, 6]), _int32([0, 2, 3]), np.zeros(3, np.float32), _int32([1, 2, 3]),
        _int32([0, 2, 2, 3]), _int32([7, 8, 9]), np.zeros(3, np.float32),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", _int32([0])),
        ("first", _int32([5, 6, 7])),
        ("token_offsets", _int32([0, 2])),
        ("token_offsets", _int32([0, 2, 4])),
        ("token_offsets", _int32([])),
        ("logprobs", np.zeros(2, np.float32)),
        ("ranks", _int32([1, 2])),
        ("top_offsets", _int32([0, 2, 1, 3])),
        ("top_offsets", _int32([0, 2, 3])),
        ("top_ids", _int32([7, 8])),
        ("top_logprobs", np.zeros(4, np.float32)),
    ],
)
@pytest.mark.parametrize("which", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_whose_columns_disagree_are_refused(which: str, name: str, value: Any) -> None:
    result = StepResult(1, _int32([0, 1]), _int32([5]))
    columns = _columns()
    setattr(result, which, columns)
    decode_result(encode_result(result))
    setattr(columns, name, value)
    with pytest.raises(ProtocolError):
        decode_result(encode_result(result))


@pytest.mark.parametrize(("rows", "numbers"), [(0, 3), (2, 3), (3, 7)])
def test_pooled_vectors_of_different_lengths_are_refused(rows: int, numbers: int) -> None:
    result = StepResult(1, _int32([0]), _int32([]), pooled_rows=np.arange(rows, dtype=np.int32))
    result.pooled = np.zeros(numbers, np.float32)
    with pytest.raises(ProtocolError, match="pooled vectors"):
        decode_result(encode_result(result))


def test_without_log_probabilities_there_are_none() -> None:
    assert decode_result(encode_result(StepResult(1, _int32([0]), _int32([])))).logprobs is None
    result = StepResult(1, _int32([0]), _int32([]), logprobs=LogProbColumns.empty())
    found = decode_result(encode_result(result)).logprobs
    assert found is not None
    _same(found, LogProbColumns.empty())


@pytest.mark.parametrize(
    "frame",
    [
        msgpack.packb([5, 1]),
        msgpack.packb([5, 1, b"", b""]),
        msgpack.packb([5, "1", b""]),
        msgpack.packb([5, 1, b"\0\0\0"]),
        msgpack.packb([5, 1, [1]]),
        msgpack.packb([4, 1, b""]),
        msgpack.packb([2, 1, b""]),
        msgpack.packb([]),
        b"",
    ],
)
def test_what_is_neither_plan_nor_mask_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_from_core(frame)


def _raw_result(index: int, value: object) -> bytes:
    """The frame of an empty result, with one field replaced."""
    values: list[object] = [2, 1, b"\0\0\0\0", b"", b"", 0, 0, "", None, None, b"", b""]
    decode_result(msgpack.packb(values))
    values[index] = value
    return bytes(msgpack.packb(values))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        msgpack.packb(None),
        msgpack.packb([]),
        msgpack.packb([1]),
        _raw_result(0, 9),
        _raw_result(1, "1"),
        _raw_result(2, [0]),
        _raw_result(2, b"\0\0\0"),
        _raw_result(4, None),
        _raw_result(5, 0.5),
        _raw_result(8, 1),
        _raw_result(8, [b""]),
        _raw_result(9, [None] * 8),
        _raw_result(10, b"\0"),
        _raw_result(11, None),
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
    vectors = np.zeros(4, np.float32)
    result = encode_result(
        StepResult(
            1, _int32([0, 1]), _int32([5]), logprobs=_columns(), prompt_logprobs=_columns(), pooled_rows=_int32([3, 4]),
            pooled=vectors,
        )
    )  # fmt: skip
    mask = encode_mask(GrammarMask(3, np.zeros(4, np.uint32)))
    for good, decode in (
        (plan, decode_plan),
        (plan, decode_from_core),
        (mask, decode_from_core),
        (result, decode_result),
    ):
        cut = at % len(good)
        for frame in (noise, good[:cut], good[:cut] + patch + good[cut + len(patch) :], good + noise):
            try:
                decode(frame)
            except ProtocolError:
                continue
