"""Decode steps without the interpreter between their parts: one call from a plan to its tokens."""

from __future__ import annotations

import weakref
from ctypes import byref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tercet_shared.errors import ConfigurationError, InternalError
from tercet_shared.wire.step import StepResult, empty_i32
from tercet_worker.kernels.decode_abi import DecodeOutcome, DecodePlan, DecodeTables
from tercet_worker.state.slots import NOT_POOLED

if TYPE_CHECKING:
    from tercet_shared.wire.step import StepPlan
    from tercet_worker.attention.cpu import CpuAttention
    from tercet_worker.program.compiled import CompiledModel
    from tercet_worker.state.checks import PlanLimits
    from tercet_worker.state.slots import SlotState


class DecodeSteps:
    """Executes the plans whose rows each compute one token and ask for nothing beside the next one.

    Args:
        model: whose program is run.
        attention: with its KV cache allocated.
        state: tables of the slots, on the CPU.
        limits: that plans must keep to.

    Raises:
        ConfigurationError: there is no memory for it.
    """

    def __init__(self, model: CompiledModel, attention: CpuAttention, state: SlotState, limits: PlanLimits) -> None:
        rows = min(state.slots, model.max_tokens)
        self.logits = torch.empty((rows, limits.vocab_size), dtype=torch.float32)
        """Of the rows of the last step, where `run` left drawing to the caller."""
        self._drawn = np.zeros(rows, np.int32)
        self._highest = np.zeros(rows, np.float32)
        self._places = np.zeros(rows, np.int64)
        self._finite = np.zeros(rows, np.bool_)
        if attention.handle is None:
            raise InternalError("decode steps need a KV cache")
        self._kept = (model, attention, state)  # the tables hold their addresses
        sampling = state.sampling.columns()
        tables = DecodeTables(
            occupied=state.occupied.ctypes.data,
            known=state.known.ctypes.data,
            computed=state.computed.ctypes.data,
            cached=state.cached.ctypes.data,
            blocks=state.blocks.ctypes.data,
            asks=state.asks.ctypes.data,
            tokens=state.tokens.data_ptr(),
            block_tables=state.block_tables.data_ptr(),
            sampling=sampling.table.ctypes.data,
            program=model.handle,
            attention=attention.handle,
            hidden=model.hidden.data_ptr(),
            logits=self.logits.data_ptr(),
            hidden_stride=model.hidden.stride(0) * model.hidden.element_size(),
            slots=state.slots,
            max_rows=rows,
            max_model_len=state.max_model_len,
            max_blocks=state.max_blocks,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            vocab_size=limits.vocab_size,
            sampling_stride=sampling.table.shape[1],
            column_temperature=sampling.temperature,
            column_top_p=sampling.top_p,
            column_log_min_p=sampling.log_min_p,
            column_top_k=sampling.top_k,
            column_seed_low=sampling.seed_low,
            column_seed_high=sampling.seed_high,
            column_min_len=sampling.min_len,
            column_asks=sampling.asks,
            draws=sampling.draws,
        )
        cdll = model.cdll
        self._run: Any = cdll.tercet_decoder_run
        handle = cdll.tercet_decoder_create(byref(tables))
        if handle is None:
            raise ConfigurationError("there is no memory for the tables of decode steps")
        self._handle: int = handle
        self._release = weakref.finalize(self, _destroy, model, attention, handle)
        self._plan = DecodePlan(
            drawn=self._drawn.ctypes.data,
            highest=self._highest.ctypes.data,
            places=self._places.ctypes.data,
            finite=self._finite.ctypes.data,
        )

    @staticmethod
    def may_be_plain(plan: StepPlan) -> bool:
        """Says what can be said without the state about whether ``plan`` is such a step."""
        if len(plan.gated) or len(plan.appended_ids) or len(plan.draft_ids) or (plan.num_tokens != 1).any():
            return False
        new = plan.new
        if not len(new):
            return True
        asks = (new.logprobs >= 0) | (new.prompt_logprobs >= 0) | (new.pooling != NOT_POOLED)
        return not bool(asks.any())

    def run(self, plan: StepPlan) -> DecodeOutcome:
        """Executes ``plan`` if it is such a step. The slots that it frees and fills have been applied.

        Returns:
            DRAWN: `result` has the tokens. COMPUTED: the caller draws from ``logits``, a row per row of the plan, and
            advances the state. NOT_PLAIN: nothing was done.

        Raises:
            InternalError: attention or the program refused it. The rows count as not computed.
        """
        call = self._plan
        call.slots = plan.slots.ctypes.data
        call.num_tokens = plan.num_tokens.ctypes.data
        call.computed = plan.computed.ctypes.data
        call.samples = plan.samples.ctypes.data
        call.block_offsets = plan.block_offsets.ctypes.data
        call.block_ids = plan.block_ids.ctypes.data
        call.rows = len(plan.slots)
        outcome = DecodeOutcome(self._run(self._handle, byref(call)))
        if outcome is DecodeOutcome.REFUSED:
            raise InternalError("the compiled decode step was refused")
        return outcome

    def result(self, plan: StepPlan) -> StepResult:
        """Returns what ``plan``, the last one, yielded."""
        rows = len(plan.slots)
        finite = self._finite[:rows]
        if finite.all():
            return StepResult(plan.step_id, np.arange(rows + 1, dtype=np.int32), self._drawn[:rows].copy(), empty_i32())
        offsets = np.zeros(rows + 1, np.int32)
        np.cumsum(finite, out=offsets[1:])
        return StepResult(plan.step_id, offsets, self._drawn[:rows][finite], np.flatnonzero(~finite).astype(np.int32))


def _destroy(model: CompiledModel, _attention: CpuAttention, decoder: int) -> None:
    """Waits for late threads of the model's program. What they may still read is there until then."""
    model.cdll.tercet_decoder_destroy(decoder)
