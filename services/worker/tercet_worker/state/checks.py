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
from tercet_shared.sampling_params import MAX_STOP_TOKEN_IDS
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
    if len(plan.draft_ids) or len(plan.appended_ids) or len(plan.gated):
        raise ProtocolError("The plan has drafts, appended tokens or gated rows, which this worker does not execute.")
    _in_range(plan.freed, state.slots, "freed slot")
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
    _in_range(new.token_ids, limits.vocab_size, "token id")
    _refuse(slots, np.diff(new.stop_offsets) > MAX_STOP_TOKEN_IDS, f"has more than {MAX_STOP_TOKEN_IDS} stop ids")
    _in_range(new.stop_ids, limits.vocab_size, "stop id")
    sound = (
        np.isfinite(new.temperature)
        & (new.temperature >= 0)
        & (new.top_k >= 0)
        & (new.top_p > 0)
        & (new.top_p <= 1)
        & (new.min_p >= 0)
        & (new.min_p <= 1)
    )
    _refuse(slots, ~sound, "has a sampling parameter out of range")


def _check_rows(plan: StepPlan, state: SlotState, limits: PlanLimits) -> None:
    slots = plan.slots
    if not len(slots):
        return
    occupied, known, computed, blocks = (
        column.copy() for column in (state.occupied, state.known, state.computed, state.blocks)
    )
    occupied[plan.freed] = False
    occupied[plan.new.slots] = True
    known[plan.new.slots] = np.diff(plan.new.token_offsets)
    computed[plan.new.slots] = UNKNOWN
    blocks[plan.new.slots] = 0
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
    ends = plan.computed.astype(np.int64) + plan.num_tokens
    _refuse(slots, ends > known[slots], "is scheduled beyond its known tokens")
    _refuse(
        slots, np.not_equal(plan.samples, ends == known[slots]), "must sample at its last known token, and only there"
    )
    _refuse(
        slots,
        np.logical_and(plan.samples, ends >= state.max_model_len),
        f"has no room for a token ({state.max_model_len} at most)",
    )
    _in_range(plan.block_ids, limits.num_blocks, "block id")
    held = blocks[slots] + np.diff(plan.block_offsets)
    _refuse(slots, held > state.max_blocks, "holds more blocks than a request can fill")
    _refuse(slots, held.astype(np.int64) * limits.block_size < ends, "holds fewer blocks than its tokens need")


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
