"""Hidden states of prompts as one vector each.

Legend: S scheduled rows, T tokens of the step, H hidden size, p rows whose prompt is computed with this step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from tercet_shared.pooling import Pooling
from tercet_worker.state.mirror import ragged_index, to_device

if TYPE_CHECKING:
    from tercet_shared.wire.step import StepPlan
    from tercet_worker.state.batch import InputBatch
    from tercet_worker.state.slots import SlotState


@dataclass(frozen=True, slots=True)
class Pooled:
    """What the pooling rows of a step yield."""

    plan_rows: npt.NDArray[np.int64]  # [p] in batch order
    vectors: torch.Tensor  # float32 [p, H]


class Pooler:
    """Makes the vectors, and keeps the sums of prompts that are computed in several steps.

    Args:
        slots: of the worker.
        device: of the hidden states.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._slots = slots
        self._device = device
        self._sums: torch.Tensor | None = None  # float32 [slots, H], once a slot asked for a mean

    def __call__(self, plan: StepPlan, batch: InputBatch, state: SlotState, hidden: torch.Tensor) -> Pooled:
        """Takes in the step's ``hidden [T, H]``, after the final norm, and returns what is complete.

        Called once for a step, when nothing of it can fail any more: a sum must not count a token twice.
        """
        slots = plan.slots[batch.plan_rows].astype(np.int64)  # [S], in batch order
        kinds = state.pooling[slots]
        done = np.flatnonzero(plan.samples[batch.plan_rows] & (kinds != Pooling.NONE))
        vectors = hidden[self._there(batch.starts[1:][done].astype(np.int64) - 1)].to(torch.float32)
        means = np.flatnonzero(kinds == Pooling.MEAN)
        if len(means):
            sums = self._add(slots[means], plan.computed[batch.plan_rows][means], batch.starts, means, hidden)
            complete = np.flatnonzero(kinds[done] == Pooling.MEAN)
            owners = slots[done[complete]]
            lengths = self._there(state.prompt_lens[owners].astype(np.float32))
            vectors[self._there(complete)] = sums[self._there(owners)] / lengths.unsqueeze(1)
        return Pooled(batch.plan_rows[done], vectors)

    def _add(
        self,
        slots: npt.NDArray[np.int64],
        computed: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int32],
        rows: npt.NDArray[np.int64],
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """Adds the tokens of some rows to the sums of their slots, one after another, and returns the sums."""
        if self._sums is None:
            self._sums = torch.zeros((self._slots, hidden.shape[1]), device=self._device)
        self._sums.index_fill_(0, self._there(slots[computed == 0]), 0.0)
        owner, place = ragged_index(starts[1:][rows] - starts[:-1][rows])
        tokens = self._there(starts[:-1][rows][owner] + place)
        return self._sums.index_add_(0, self._there(slots[owner]), hidden[tokens].to(torch.float32))

    def _there(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return to_device(array, self._device)
