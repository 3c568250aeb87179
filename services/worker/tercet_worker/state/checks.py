"""Whether a plan can be executed: asked before anything of it is applied, so that a bad plan changes nothing.

The core is trusted to mean well, not to be free of faults: an id out of range would read or write memory of other
requests. All checks look at whole columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

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
from tercet_shared.wire.step import lengths_of
from tercet_worker.state.slots import NOT_POOLED, UNKNOWN, SlotState

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


_MEAN, _LAST_POOLING = int(Pooling.MEAN), int(max(Pooling))
_LEAST_TOP_P = float(np.nextafter(np.float32(0), np.float32(1)))
_LARGEST = float(np.finfo(np.float32).max)
_PARAMETERS: Final = (
    ("temperature", 0, _LARGEST),
    ("top_k", 0, np.inf),
    ("top_p", _LEAST_TOP_P, 1),
    ("min_p", 0, 1),
    ("presence", -2, 2),
    ("frequency", -2, 2),
    ("repetition", _LEAST_TOP_P, 100),
    ("logprobs", OFF, MAX_LOGPROBS),
    ("prompt_logprobs", OFF, MAX_LOGPROBS),
)
"""Columns of new slots with the least and the largest value that each may have."""
_LEAST, _MOST = (np.array([bounds[i] for bounds in _PARAMETERS], np.float64)[:, None] for i in (1, 2))


def _check_new(new: NewSlots, state: SlotState, limits: PlanLimits) -> None:
    if not len(new):
        return
    slots = new.slots
    _distinct(slots, state.slots, "new slot")
    known = lengths_of(new.token_offsets)
    _refuse_first(
        slots,
        ((known < 1) | (known > state.max_model_len), f"has not 1 to {state.max_model_len} tokens"),
        ((new.prompt_lens < 1) | (new.prompt_lens > known), "has a prompt longer than its tokens, or none"),
        ((new.cached < 0) | (new.cached > known), "has more cached tokens than tokens, or fewer than none"),
    )
    _in_range(new.token_ids, limits.vocab_size, "token id")
    for offsets, ids, limit, what in (
        (new.stop_offsets, new.stop_ids, MAX_STOP_TOKEN_IDS, "stop id"),
        (new.bias_offsets, new.bias_ids, MAX_LOGIT_BIAS, "biased id"),
        (new.allowed_offsets, new.allowed_ids, MAX_ALLOWED_TOKEN_IDS, "allowed id"),
    ):
        if len(ids):
            _refuse(slots, np.diff(offsets) > limit, f"has more than {limit} {what}s")
            _in_range(ids, limits.vocab_size, what)
    if len(new.bad_lens):
        _refuse(slots, np.diff(new.bad_offsets) > MAX_BAD_WORDS, f"has more than {MAX_BAD_WORDS} bad words")
        owners = slots.repeat(np.diff(new.bad_offsets))
        reason = f"has a bad word of more than {MAX_BAD_WORD_LENGTH} tokens"
        _refuse(owners, new.bad_lens > MAX_BAD_WORD_LENGTH, reason)
        _in_range(new.bad_ids, limits.vocab_size, "bad word's id")
    if len(new.bias_ids):
        owners = slots.repeat(np.diff(new.bias_offsets))
        _refuse(owners, ~(np.abs(new.bias_values) <= 100), "has a logit bias out of range")
    values = np.array([getattr(new, name) for name, _, _ in _PARAMETERS], np.float64)
    sound = ((values >= _LEAST) & (values <= _MOST)).all(axis=0)  # what is not a number is neither
    _refuse(slots, np.logical_not(sound), "has a sampling parameter out of range")
    if new.pooling.any():
        pools = new.pooling != NOT_POOLED
        _refuse(slots, (new.pooling < 0) | (new.pooling > _LAST_POOLING), "is to be pooled in an unknown way")
        _refuse(slots, pools & (new.prompt_lens != known), "is to be pooled and has output")


def _check_rows(plan: StepPlan, state: SlotState, limits: PlanLimits) -> None:
    slots, new = plan.slots, plan.new
    if not len(slots):
        return
    occupied, counts, pooling = state.occupied, state.counts, state.pooling
    if len(plan.freed) or len(new):  # as they will be
        occupied, counts, pooling = occupied.copy(), counts.copy(), pooling.copy()
        occupied[plan.freed] = False
        occupied[new.slots] = True
        counts[:, new.slots] = state.counts_of(new)
        pooling[new.slots] = new.pooling
    known, own, cached, blocks = counts[:, slots]
    total = int(plan.num_tokens.sum(dtype=np.int64))
    free = np.logical_not(occupied[slots])
    few = (plan.num_tokens < 1) | (plan.num_tokens > limits.max_batched_tokens)
    _refuse_first(slots, (free, "is scheduled and holds no request"), (few, "has a bad number of tokens"))
    if total > limits.max_batched_tokens:
        raise ProtocolError(f"The plan has {total} tokens, more than the {limits.max_batched_tokens} of a step.")
    begins = own == UNKNOWN
    pools = pooling[slots]
    _refuse_first(
        slots,
        (plan.computed < 0, "has a negative number of computed tokens"),
        (~begins & (own != plan.computed), "has another number of computed tokens than the plan says"),
        (begins & (plan.computed > cached), "begins behind its cached tokens"),
        (
            (pools == _MEAN) & begins & (plan.computed != 0),
            "is to be pooled over all its tokens and does not begin with the first",
        ),
    )
    pools = pools != NOT_POOLED
    texts = known.astype(np.int64)
    if len(plan.appended_ids):
        _in_range(plan.appended_ids, limits.vocab_size, "appended token id")
        more = np.diff(plan.appended_offsets)
        _refuse(slots, pools & (more > 0), "is to be pooled and has tokens appended")
        texts += more
        _refuse(slots, texts > state.max_model_len, f"has no room for its tokens ({state.max_model_len} at most)")
    ends = plan.computed.astype(np.int64) + plan.num_tokens
    full = plan.samples & ~pools & (ends >= state.max_model_len)
    _refuse_first(
        slots,
        (ends > texts, "is scheduled beyond its known tokens"),
        (np.not_equal(plan.samples, ends == texts), "must sample at its last known token, and only there"),
        (full, f"has no room for a token ({state.max_model_len} at most)"),
    )
    if len(plan.gated):
        _check_gated(plan, pools)
    _in_range(plan.block_ids, limits.num_blocks, "block id")
    held = blocks + lengths_of(plan.block_offsets)
    short = held.astype(np.int64) * limits.block_size < np.maximum(ends, cached)
    _refuse_first(
        slots,
        (held > state.max_blocks, "holds more blocks than a request can fill"),
        (short, "holds fewer blocks than its tokens need"),
    )


def _check_gated(plan: StepPlan, pools: _Bools) -> None:
    if (np.diff(plan.gated) <= 0).any():
        raise ProtocolError("The gated rows of the plan are not in ascending order.")
    free = ~(plan.samples & ~pools)
    _refuse(plan.slots[plan.gated], free[plan.gated], "is gated and draws no token")


def _in_range(ids: _Ints, limit: int, what: str) -> None:
    if not len(ids):
        return
    wrong = (ids < 0) | (ids >= limit)
    if wrong.any():
        raise ProtocolError(f"The plan names a {what} {ids[wrong.argmax()]}, not one of 0 to {limit - 1}.")


def _distinct(slots: _Ints, limit: int, what: str) -> None:
    _in_range(slots, limit, what)
    if len(slots) < 2:
        return
    counts = np.bincount(slots, minlength=1)
    if (counts > 1).any():
        raise ProtocolError(f"The plan names the {what} {counts.argmax()} twice.")


def _refuse(slots: _Ints, wrong: _Bools, reason: str) -> None:
    if wrong.any():
        raise ProtocolError(f"Slot {slots[wrong.argmax()]} of the plan {reason}.")


def _refuse_first(slots: _Ints, *problems: tuple[_Bools, str]) -> None:
    """Refuses the plan for the first of ``problems`` that a slot has: a question less for each of the others."""
    if np.concatenate([wrong for wrong, _ in problems]).any():
        for wrong, reason in problems:
            _refuse(slots, wrong, reason)
