"""Plans that cannot be executed are refused in a sentence, before anything of them is applied."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tercet_shared.errors import ProtocolError
from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.step import NewSlot, NewSlots, Slot, StepPlan, empty_i32, offsets_of
from tercet_worker.state.checks import PlanLimits, check_plan
from tercet_worker.state.slots import SlotState

LIMITS = PlanLimits(vocab_size=100, num_blocks=10, block_size=16, max_batched_tokens=64)


def tokens(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32) % 100


def build_state() -> SlotState:
    """Slot 0: 20 tokens, all computed but the last. Slot 1: 40 tokens, 16 computed. Slot 2: free."""
    state = SlotState(slots=4, max_model_len=64, block_size=16, device=torch.device("cpu"))
    plan = StepPlan(
        1,
        empty_i32(),
        NewSlots.build(
            [
                NewSlot(Slot(0), 1, 20, tokens(20), SamplingParams()),
                NewSlot(Slot(1), 1, 40, tokens(40), SamplingParams()),
            ]
        ),
        slots=np.array([0, 1], np.int32),
        num_tokens=np.array([19, 16], np.int32),
        computed=np.zeros(2, np.int32),
        samples=np.zeros(2, np.bool_),
        block_offsets=offsets_of([2, 1]),
        block_ids=np.array([0, 1, 2], np.int32),
    )
    check_plan(plan, state, LIMITS)
    state.apply(plan)
    state.advance(plan)
    return state


def good_plan() -> StepPlan:
    """Decodes slot 0, goes on with slot 1, begins slot 2 behind a cached block."""
    return StepPlan(
        2,
        np.array([3], np.int32),
        NewSlots.build(
            [NewSlot(Slot(2), 7, 18, tokens(18), SamplingParams(top_k=5, stop_token_ids=(3, 4), eos_token_ids=(5,)))]
        ),
        slots=np.array([0, 1, 2], np.int32),
        num_tokens=np.array([1, 10, 2], np.int32),
        computed=np.array([19, 16, 16], np.int32),
        samples=np.array([True, False, True]),
        block_offsets=offsets_of([0, 1, 2]),
        block_ids=np.array([3, 0, 4], np.int32),
    )


def edit(name: str, index: int, value: object) -> Callable[[StepPlan], None]:
    def apply(plan: StepPlan) -> None:
        owner = plan.new if name.startswith("new.") else plan
        getattr(owner, name.removeprefix("new."))[index] = value

    return apply


def add(name: str) -> Callable[[StepPlan], None]:
    return lambda plan: setattr(plan, name, np.zeros(1, np.int32))


BAD = [
    (edit("slots", 0, 4), "scheduled slot 4"),
    (edit("slots", 0, -1), "scheduled slot -1"),
    (edit("slots", 0, 1), "slot 1 twice"),
    (edit("slots", 0, 3), "Slot 3 of the plan is scheduled and holds no request"),
    (edit("freed", 0, 9), "freed slot 9"),
    (edit("freed", 0, 1), "Slot 1 of the plan is scheduled and holds no request"),
    (edit("num_tokens", 1, 0), "bad number of tokens"),
    (edit("num_tokens", 1, 65), "bad number of tokens"),
    (edit("num_tokens", 1, 62), "65 tokens, more than the 64"),
    (edit("computed", 0, 18), "Slot 0 of the plan has another number of computed tokens"),
    (edit("computed", 2, -1), "Slot 2 of the plan has a negative number of computed tokens"),
    (edit("num_tokens", 0, 2), "Slot 0 of the plan is scheduled beyond its known tokens"),
    (edit("samples", 1, True), "Slot 1 of the plan must sample"),
    (edit("samples", 0, False), "Slot 0 of the plan must sample"),
    (edit("block_ids", 1, 10), "block id 10"),
    (edit("block_ids", 1, -3), "block id -3"),
    (edit("new.slots", 0, 4), "new slot 4"),
    (edit("new.token_ids", 5, 100), "token id 100"),
    (edit("new.token_ids", 5, -1), "token id -1"),
    (edit("new.stop_ids", 0, 100), "stop id 100"),
    (edit("new.prompt_lens", 0, 19), "Slot 2 of the plan has a prompt longer than its tokens"),
    (edit("new.temperature", 0, np.nan), "Slot 2 of the plan has a sampling parameter out of range"),
    (edit("new.temperature", 0, -1), "sampling parameter out of range"),
    (edit("new.top_k", 0, -1), "sampling parameter out of range"),
    (edit("new.top_p", 0, 0), "sampling parameter out of range"),
    (edit("new.min_p", 0, 1.5), "sampling parameter out of range"),
    (add("draft_ids"), "does not execute"),
    (add("appended_ids"), "does not execute"),
    (add("gated"), "does not execute"),
]


def test_the_plan_that_the_others_are_made_from_is_good() -> None:
    state = build_state()
    check_plan(good_plan(), state, LIMITS)
    state.apply(good_plan())
    state.advance(good_plan())
    assert state.known[:3].tolist() == [21, 40, 19]
    assert state.computed[:3].tolist() == [20, 26, 18]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_bad_plans_are_refused_and_change_nothing(change: Callable[[StepPlan], None], words: str) -> None:
    state, plan = build_state(), good_plan()
    change(plan)
    before = copy.deepcopy((state.occupied, state.known, state.computed, state.blocks, state.block_tables))
    with pytest.raises(ProtocolError, match=words):
        check_plan(plan, state, LIMITS)
    after = (state.occupied, state.known, state.computed, state.blocks, state.block_tables)
    assert all((np.asarray(old) == np.asarray(new)).all() for old, new in zip(before, after, strict=True))


def test_too_few_blocks() -> None:
    plan = good_plan()
    plan.block_offsets, plan.block_ids = offsets_of([0, 0, 2]), np.array([0, 4], np.int32)
    with pytest.raises(ProtocolError, match="Slot 1 of the plan holds fewer blocks"):
        check_plan(plan, build_state(), LIMITS)


def test_too_many_blocks() -> None:
    plan = good_plan()
    plan.block_offsets, plan.block_ids = offsets_of([3, 1, 2]), np.array([5, 6, 7, 3, 0, 4], np.int32)
    with pytest.raises(ProtocolError, match="Slot 0 of the plan holds more blocks than a request can fill"):
        check_plan(plan, build_state(), LIMITS)


@pytest.mark.parametrize("count", [0, 65])
def test_prompts_of_impossible_length(count: int) -> None:
    plan = good_plan()
    plan.new = NewSlots.build([NewSlot(Slot(2), 7, 1, tokens(count), SamplingParams())])
    with pytest.raises(ProtocolError, match="Slot 2 of the plan has not 1 to 64 tokens"):
        check_plan(plan, build_state(), LIMITS)


def test_no_room_for_the_sampled_token() -> None:
    state, plan = build_state(), good_plan()
    plan.new = NewSlots.build([NewSlot(Slot(2), 7, 64, tokens(64), SamplingParams())])
    plan.num_tokens[2], plan.computed[2] = 16, 48
    plan.block_offsets, plan.block_ids = offsets_of([0, 1, 4]), np.array([3, 0, 4, 5, 6], np.int32)
    with pytest.raises(ProtocolError, match="Slot 2 of the plan has no room for a token"):
        check_plan(plan, state, LIMITS)


def test_a_plan_that_only_frees_is_good() -> None:
    plan = StepPlan(
        3, np.array([0, 1, 1], np.int32), NewSlots.empty(), empty_i32(), empty_i32(), empty_i32(),
        np.zeros(0, np.bool_), offsets_of([]), empty_i32(),
    )  # fmt: skip
    state = build_state()
    check_plan(plan, state, LIMITS)
    state.apply(plan)
    assert not state.occupied.any()
