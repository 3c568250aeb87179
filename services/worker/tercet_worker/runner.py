"""Executes step plans: state, batch, forward pass, sampling, result. One thread calls it, in the order of the plans.

This file only puts the parts in order. How a plan is checked, how a batch is laid out, how attention works and how a
token is drawn stand in ``state``, ``attention`` and ``sampling``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tercet_shared.wire.step import StepPlan, StepResult, empty_i32
from tercet_worker.state.batch import InputBatch
from tercet_worker.state.checks import PlanLimits, check_plan

if TYPE_CHECKING:
    from tercet_worker.attention.interface import AttentionBackend
    from tercet_worker.models.interface import StepModel
    from tercet_worker.sampling import Sampled, Sampler
    from tercet_worker.state.slots import SlotState


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose work was given to the device. `result` waits for it."""

    plan: StepPlan
    batch: InputBatch | None  # None: nothing was scheduled
    sampled: Sampled | None  # None: no row samples

    def result(self) -> StepResult:
        """Waits until the tokens are on the host, and returns them in the order of the plan's rows."""
        rows = len(self.plan.slots)
        if self.batch is None or self.sampled is None:
            return StepResult(self.plan.step_id, np.zeros(rows + 1, np.int32), empty_i32())
        drawn = self.sampled.token_ids.cpu().numpy()
        finite = self.sampled.finite.cpu().numpy()
        tokens = np.zeros(rows, np.int32)
        counts = np.zeros(rows, np.bool_)
        tokens[self.batch.sample_rows] = drawn
        counts[self.batch.sample_rows] = finite
        offsets = np.zeros(rows + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        not_finite = np.sort(self.batch.sample_rows[~finite]).astype(np.int32)
        return StepResult(self.plan.step_id, offsets, tokens[counts], not_finite)


class ModelRunner:
    """A model, its KV cache and its slots.

    Args:
        model: with its weights.
        attention: with its KV cache allocated.
        state: of the slots.
        sampler: for the model's vocabulary.
        limits: that plans must keep to.
        pad_to: step sizes are rounded up to a multiple of this many tokens.
    """

    def __init__(
        self,
        model: StepModel,
        attention: AttentionBackend,
        state: SlotState,
        sampler: Sampler,
        limits: PlanLimits,
        *,
        pad_to: int = 1,
    ) -> None:
        self.limits = limits
        self._model = model
        self._attention = attention
        self._state = state
        self._sampler = sampler
        self._pad_to = pad_to

    def reset(self) -> None:
        """Forgets all requests; weights and memory stay."""
        self._state.reset()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingStep:
        """Applies ``plan``, gives its forward pass and sampling to the device, and returns without waiting for it.

        Raises:
            ProtocolError: the plan cannot be executed; nothing of it was applied.
            InternalError: attention refused the batch. The rows count as not computed.
        """
        check_plan(plan, self._state, self.limits)
        self._state.apply(plan)
        if not len(plan.slots):
            return PendingStep(plan, None, None)
        batch = InputBatch.build(plan, self._state, block_size=self.limits.block_size, pad_to=self._pad_to)
        self._attention.plan(batch.attention(self._state))
        hidden = self._model.forward(batch.input_ids, batch.positions, self._attention)  # [T, H]
        sampled = self._sample(batch, hidden) if len(batch.sample_rows) else None
        self._state.advance(plan)
        return PendingStep(plan, batch, sampled)

    def _sample(self, batch: InputBatch, hidden: torch.Tensor) -> Sampled:
        logits = self._model.logits(hidden[batch.logits_rows])  # [R, V]
        sampled = self._sampler(logits, self._state.sampling.batch(batch.sample_slots, batch.sample_positions))
        batch.write_sampled(self._state, sampled.token_ids)
        return sampled
