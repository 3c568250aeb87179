"""Plans that cannot be executed are refused in a sentence, before anything of them is applied."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tercet_shared.errors import ProtocolError
from tercet_shared.pooling import Pooling
from tercet_shared.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    SamplingParams,
)
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
            [
                NewSlot(
                    Slot(2),
                    7,
                    18,
                    tokens(18),
                    SamplingParams(
                        top_k=5,
                        stop_token_ids=(3, 4),
                        eos_token_ids=(5,),
                        logit_bias=((6, 1.0),),
                        allowed_token_ids=(7, 8),
                        bad_words=((9,), (10, 11)),
                    ),
                    cached=16,
                )
            ]
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


def gate(*rows: int) -> Callable[[StepPlan], None]:
    return lambda plan: setattr(plan, "gated", np.array(rows, np.int32))


def append(offsets: list[int], *ids: int) -> Callable[[StepPlan], None]:
    def apply(plan: StepPlan) -> None:
        plan.appended_offsets, plan.appended_ids = np.array(offsets, np.int32), np.array(ids, np.int32)

    return apply


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
    (edit("new.cached", 0, -1), "Slot 2 of the plan has more cached tokens than tokens, or fewer than none"),
    (edit("new.cached", 0, 19), "Slot 2 of the plan has more cached tokens than tokens"),
    (edit("new.cached", 0, 15), "Slot 2 of the plan begins behind its cached tokens"),
    (edit("new.prompt_lens", 0, 19), "Slot 2 of the plan has a prompt longer than its tokens"),
    (edit("new.temperature", 0, np.nan), "Slot 2 of the plan has a sampling parameter out of range"),
    (edit("new.temperature", 0, -1), "sampling parameter out of range"),
    (edit("new.top_k", 0, -1), "sampling parameter out of range"),
    (edit("new.top_p", 0, 0), "sampling parameter out of range"),
    (edit("new.min_p", 0, 1.5), "sampling parameter out of range"),
    (edit("new.min_p", 0, np.nan), "sampling parameter out of range"),
    (edit("new.presence", 0, 2.5), "sampling parameter out of range"),
    (edit("new.presence", 0, np.nan), "sampling parameter out of range"),
    (edit("new.frequency", 0, -2.5), "sampling parameter out of range"),
    (edit("new.frequency", 0, np.inf), "sampling parameter out of range"),
    (edit("new.repetition", 0, 0), "sampling parameter out of range"),
    (edit("new.repetition", 0, 101), "sampling parameter out of range"),
    (edit("new.logprobs", 0, 21), "sampling parameter out of range"),
    (edit("new.logprobs", 0, -2), "sampling parameter out of range"),
    (edit("new.prompt_logprobs", 0, 21), "sampling parameter out of range"),
    (edit("new.pooling", 0, 3), "Slot 2 of the plan is to be pooled in an unknown way"),
    (edit("new.pooling", 0, -1), "is to be pooled in an unknown way"),
    (edit("new.pooling", 0, Pooling.MEAN), "Slot 2 of the plan is to be pooled over all its tokens"),
    (edit("new.bias_ids", 0, 100), "biased id 100"),
    (edit("new.bias_values", 0, 100.5), "Slot 2 of the plan has a logit bias out of range"),
    (edit("new.bias_values", 0, np.nan), "has a logit bias out of range"),
    (edit("new.allowed_ids", 1, -1), "allowed id -1"),
    (edit("new.bad_ids", 2, 100), "bad word's id 100"),
    (add("draft_ids"), "does not execute"),
    (gate(3), "gated row 3"),
    (gate(-1), "gated row -1"),
    (gate(2, 0), "not in ascending order"),
    (gate(0, 0), "not in ascending order"),
    (gate(0, 1), "Slot 1 of the plan is gated and draws no token"),
    (append([0, 0, 0, 1], 100), "appended token id 100"),
    (append([0, 0, 0, 1], -1), "appended token id -1"),
    (append([0, 1, 1, 1], 5), "Slot 0 of the plan must sample"),
    (append([0, 0, 25, 25], *[5] * 25), "Slot 1 of the plan has no room for its tokens"),
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
    plan.new = NewSlots.build([NewSlot(Slot(2), 7, 64, tokens(64), SamplingParams(), cached=48)])
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


def test_a_plan_that_schedules_nothing_gates_nothing() -> None:
    plan = StepPlan(
        3, empty_i32(), NewSlots.empty(), empty_i32(), empty_i32(), empty_i32(), np.zeros(0, np.bool_),
        offsets_of([]), empty_i32(), gated=np.zeros(1, np.int32),
    )  # fmt: skip
    with pytest.raises(ProtocolError, match="gated row 0"):
        check_plan(plan, build_state(), LIMITS)


def test_gated_rows_and_appended_tokens_that_are_good() -> None:
    state, plan = build_state(), good_plan()
    gate(0, 2)(plan)
    append([0, 2, 3, 3], 90, 91, 92)(plan)
    plan.num_tokens[0] = 3
    check_plan(plan, state, LIMITS)
    state.apply(plan)
    state.advance(plan)
    assert state.known[:3].tolist() == [23, 41, 19]
    assert state.tokens[0, 19:22].tolist() == [19, 90, 91]
    assert state.tokens[1, 39:41].tolist() == [39, 92]
    # All of slot 1 that is known now, the appended token included, makes it sample.
    plan = StepPlan(
        3, empty_i32(), NewSlots.empty(), np.array([1], np.int32), np.array([15], np.int32), np.array([26], np.int32),
        np.ones(1, np.bool_), offsets_of([1]), np.array([6], np.int32),
    )  # fmt: skip
    check_plan(plan, state, LIMITS)


@pytest.mark.parametrize("kind", [Pooling.LAST, Pooling.MEAN])
def test_pooling_slots(kind: Pooling) -> None:
    state, plan = build_state(), good_plan()
    # All the tokens that a request may have: no room is needed for another one.
    plan.new = NewSlots.build([NewSlot(Slot(2), 7, 64, tokens(64), SamplingParams(), kind)])
    plan.num_tokens[:], plan.computed[2], plan.samples[2] = (1, 10, 53), 0, False
    plan.block_offsets, plan.block_ids = offsets_of([0, 1, 4]), np.array([3, 0, 4, 5, 6], np.int32)
    check_plan(plan, state, LIMITS)
    state.apply(plan)
    state.advance(plan)
    last = StepPlan(
        3, empty_i32(), NewSlots.empty(), np.array([2], np.int32), np.array([11], np.int32), np.array([53], np.int32),
        np.ones(1, np.bool_), offsets_of([0]), empty_i32(),
    )  # fmt: skip
    gated, appended = copy.deepcopy(last), copy.deepcopy(last)
    gate(0)(gated)
    append([0, 1], 4)(appended)
    for bad, words in ((gated, "gated and draws no token"), (appended, "is to be pooled and has tokens appended")):
        with pytest.raises(ProtocolError, match=words):
            check_plan(bad, state, LIMITS)
    check_plan(last, state, LIMITS)
    state.apply(last)
    assert not state.draws(last).any()
    state.advance(last)
    assert state.known[2] == 64
    with pytest.raises(ProtocolError, match="beyond its known tokens"):
        check_plan(dataclasses.replace(last, computed=np.array([64], np.int32)), state, LIMITS)


def test_output_is_not_pooled() -> None:
    plan = good_plan()
    plan.new = NewSlots.build([NewSlot(Slot(2), 7, 17, tokens(18), SamplingParams(), Pooling.LAST)])
    with pytest.raises(ProtocolError, match="Slot 2 of the plan is to be pooled and has output"):
        check_plan(plan, build_state(), LIMITS)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(logit_bias=((5, 1.0),) * (MAX_LOGIT_BIAS + 1)), "more than 1024 biased ids"),
        (SamplingParams(allowed_token_ids=(5,) * (MAX_ALLOWED_TOKEN_IDS + 1)), "more than 16384 allowed ids"),
        (SamplingParams(bad_words=((5,),) * (MAX_BAD_WORDS + 1)), "more than 256 bad words"),
        (SamplingParams(bad_words=((1,), (5,) * (MAX_BAD_WORD_LENGTH + 1))), "a bad word of more than 64 tokens"),
        (SamplingParams(stop_token_ids=(5,) * 65), "more than 64 stop ids"),
    ],
)
def test_more_than_a_request_may_ask_for(params: SamplingParams, words: str) -> None:
    plan = good_plan()
    plan.new = NewSlots.build([NewSlot(Slot(2), 7, 18, tokens(18), params)])
    with pytest.raises(ProtocolError, match=f"Slot 2 of the plan has {words}"):
        check_plan(plan, build_state(), LIMITS)
