"""Whether a plan can be executed: asked before anything of it is applied, so that a bad plan changes nothing.

The core is trusted to mean well, not to be free of faults: an id out of range would read or write memory of other
requests. All checks look at whole columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tercet_shared.errors import ProtocolError
from tercet_shared.pooling import Pooling
from tercet_shared.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    OFF,
)
from tercet_worker.state.slots import UNKNOWN, SlotState

if TYPE_CHECKING:
    from tercet_shared.wire.step import NewSlots, StepPlan

_Ints = npt.NDArray[np.integer]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What plans must keep to, beside the shape of the state.

    Attributes:
        vocab_size: token ids are below it.
        num_blocks: block ids are below it.
        block_size: tokens per block.
        max_batched_tokens: tokens that a step may have.
    """

    vocab_size: int
    num_blocks: int
    block_size: int
    max_batched_tokens: int


def check_plan(plan: StepPlan, state: SlotState, limits: PlanLimits) -> None:
    """Raises `ProtocolError`, naming the first slot that is at fault, unless ``plan`` fits ``state`` and ``limits``."""
    if len(plan.draft_ids):
        raise ProtocolError("The plan has drafts, which this worker does not execute.")
    _in_range(plan.freed, state.slots, "freed slot")
    _in_range(plan.gated, len(plan.slots), "gated row")
    _check_new(plan.new, state, limits)
    _distinct(plan.slots, state.slots, "scheduled slot")
    _check_rows(plan, state, limits)


def _check_new(new: NewSlots, state: SlotState, limits: PlanLimits) -> None:
    if not len(new):
        return
    slots = new.slots
    _distinct(slots, state.slots, "new slot")
    known = np.diff(new.token_offsets)
    _refuse(slots, (known < 1) | (known > state.max_model_len), f"has not 1 to {state.max_model_len} tokens")
    _refuse(slots, (new.prompt_lens < 1) | (new.prompt_lens > known), "has a prompt longer than its tokens, or none")
    _refuse(slots, (new.cached < 0) | (new.cached > known), "has more cached tokens than tokens, or fewer than none")
    _in_range(new.token_ids, limits.vocab_size, "token id")
    for offsets, ids, limit, what in (
        (new.stop_offsets, new.stop_ids, MAX_STOP_TOKEN_IDS, "stop id"),
        (new.bias_offsets, new.bias_ids, MAX_LOGIT_BIAS, "biased id"),
        (new.allowed_offsets, new.allowed_ids, MAX_ALLOWED_TOKEN_IDS, "allowed id"),
    ):
        _refuse(slots, np.diff(offsets) > limit, f"has more than {limit} {what}s")
        _in_range(ids, limits.vocab_size, what)
    _refuse(slots, np.diff(new.bad_offsets) > MAX_BAD_WORDS, f"has more than {MAX_BAD_WORDS} bad words")
    owners = slots.repeat(np.diff(new.bad_offsets))
    _refuse(owners, new.bad_lens > MAX_BAD_WORD_LENGTH, f"has a bad word of more than {MAX_BAD_WORD_LENGTH} tokens")
    _in_range(new.bad_ids, limits.vocab_size, "bad word's id")
    owners = slots.repeat(np.diff(new.bias_offsets))
    _refuse(owners, ~(np.abs(new.bias_values) <= 100), "has a logit bias out of range")
    _check_parameters(new)
    pools = new.pooling != Pooling.NONE
    _refuse(slots, (new.pooling < 0) | (new.pooling > max(Pooling)), "is to be pooled in an unknown way")
    _refuse(slots, pools & (new.prompt_lens != known), "is to be pooled and has output")


def _check_parameters(new: NewSlots) -> None:
    sound = (
        np.isfinite(new.temperature)
        & (new.temperature >= 0)
        & (new.top_k >= 0)
        & (new.top_p > 0)
        & (new.top_p <= 1)
        & (new.min_p >= 0)
        & (new.min_p <= 1)
        & (np.abs(new.presence) <= 2)
        & (np.abs(new.frequency) <= 2)
        & (new.repetition > 0)
        & (new.repetition <= 100)
        & (new.logprobs >= OFF)
        & (new.logprobs <= MAX_LOGPROBS)
        & (new.prompt_logprobs >= OFF)
        & (new.prompt_logprobs <= MAX_LOGPROBS)
    )
    _refuse(new.slots, ~sound, "has a sampling parameter out of range")


def _check_rows(plan: StepPlan, state: SlotState, limits: PlanLimits) -> None:
    slots = plan.slots
    if not len(slots):
        return
    occupied, known, computed, cached, blocks, pooling = (
        column.copy()
        for column in (state.occupied, state.known, state.computed, state.cached, state.blocks, state.pooling)
    )
    occupied[plan.freed] = False
    occupied[plan.new.slots] = True
    known[plan.new.slots] = np.diff(plan.new.token_offsets)
    computed[plan.new.slots] = UNKNOWN
    cached[plan.new.slots] = plan.new.cached
    blocks[plan.new.slots] = 0
    pooling[plan.new.slots] = plan.new.pooling
    _refuse(slots, np.logical_not(occupied[slots]), "is scheduled and holds no request")
    _refuse(slots, (plan.num_tokens < 1) | (plan.num_tokens > limits.max_batched_tokens), "has a bad number of tokens")
    total = int(plan.num_tokens.sum(dtype=np.int64))
    if total > limits.max_batched_tokens:
        raise ProtocolError(f"The plan has {total} tokens, more than the {limits.max_batched_tokens} of a step.")
    own = computed[slots]
    _refuse(slots, plan.computed < 0, "has a negative number of computed tokens")
    _refuse(
        slots, (own != UNKNOWN) & (own != plan.computed), "has another number of computed tokens than the plan says"
    )
    _refuse(slots, (own == UNKNOWN) & (plan.computed > cached[slots]), "begins behind its cached tokens")
    pools = pooling[slots] != Pooling.NONE
    _refuse(
        slots,
        (pooling[slots] == Pooling.MEAN) & (own == UNKNOWN) & (plan.computed != 0),
        "is to be pooled over all its tokens and does not begin with the first",
    )
    texts = known[slots].astype(np.int64)
    if len(plan.appended_ids):
        _in_range(plan.appended_ids, limits.vocab_size, "appended token id")
        more = np.diff(plan.appended_offsets)
        _refuse(slots, pools & (more > 0), "is to be pooled and has tokens appended")
        texts += more
        _refuse(slots, texts > state.max_model_len, f"has no room for its tokens ({state.max_model_len} at most)")
    ends = plan.computed.astype(np.int64) + plan.num_tokens
    _refuse(slots, ends > texts, "is scheduled beyond its known tokens")
    _refuse(slots, np.not_equal(plan.samples, ends == texts), "must sample at its last known token, and only there")
    _refuse(
        slots,
        plan.samples & ~pools & (ends >= state.max_model_len),
        f"has no room for a token ({state.max_model_len} at most)",
    )
    if len(plan.gated):
        _check_gated(plan, pools)
    _in_range(plan.block_ids, limits.num_blocks, "block id")
    held = blocks[slots] + np.diff(plan.block_offsets)
    _refuse(slots, held > state.max_blocks, "holds more blocks than a request can fill")
    least = np.maximum(ends, cached[slots])
    _refuse(slots, held.astype(np.int64) * limits.block_size < least, "holds fewer blocks than its tokens need")


def _check_gated(plan: StepPlan, pools: _Bools) -> None:
    if (np.diff(plan.gated) <= 0).any():
        raise ProtocolError("The gated rows of the plan are not in ascending order.")
    free = ~(plan.samples & ~pools)
    _refuse(plan.slots[plan.gated], free[plan.gated], "is gated and draws no token")


def _in_range(ids: _Ints, limit: int, what: str) -> None:
    wrong = (ids < 0) | (ids >= limit)
    if wrong.any():
        raise ProtocolError(f"The plan names a {what} {ids[wrong.argmax()]}, not one of 0 to {limit - 1}.")


def _distinct(slots: _Ints, limit: int, what: str) -> None:
    _in_range(slots, limit, what)
    counts = np.bincount(slots, minlength=1)
    if (counts > 1).any():
        raise ProtocolError(f"The plan names the {what} {counts.argmax()} twice.")


def _refuse(slots: _Ints, wrong: _Bools, reason: str) -> None:
    if wrong.any():
        raise ProtocolError(f"Slot {slots[wrong.argmax()]} of the plan {reason}.")
