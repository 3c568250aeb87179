"""What the worker remembers of every request between steps, one row per slot.

Host columns are NumPy arrays: they decide, and never wait for the device. Device tensors are what the model and the
sampler read and write: the token that a step samples is written into the token buffer there, and the next step reads
it there.

Legend: N new slots of a plan, L tokens that one request may have, M blocks that one request may have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tercet_shared.pooling import Pooling
from tercet_shared.wire.step import lengths_of
from tercet_worker.sampling.params import SamplingTable
from tercet_worker.state.mirror import ragged_index, to_device

if TYPE_CHECKING:
    from tercet_shared.wire.step import NewSlots, StepPlan
    from tercet_worker.state.batch import SampleRows

HandOver = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes to a token buffer ``[slots, L]``, for slots and positions ``[R]``, the token ids ``[R]``."""

UNKNOWN = -1
"""Computed tokens of a slot that was filled but not scheduled yet: its first plan says where it begins (prefix
cache)."""

NOT_POOLED = int(Pooling.NONE)
"""An integer, which columns are compared with at a tenth of the time."""

LOGPROBS, PROMPT_LOGPROBS, POOLING = 1, 2, 4
"""What a slot asks for beside tokens: bits of `SlotState.asks`."""


class SlotState:
    """Persistent state of all slots.

    Memory of the token buffer and the block tables is taken when it is first written to, so that long limits cost
    nothing.

    Args:
        slots: requests that hold state at once.
        max_model_len: L.
        block_size: tokens per KV block.
        device: where the model runs.
        hand_over: writes drawn tokens to the buffer; by torch where it is None.
    """

    def __init__(
        self,
        *,
        slots: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        hand_over: HandOver | None = None,
    ) -> None:
        self._hand_over = hand_over
        self.slots = slots
        self.max_model_len = max_model_len
        self.max_blocks = -(-max_model_len // block_size)  # M
        self.device = device
        self.occupied: npt.NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self.epochs: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.counts: npt.NDArray[np.int32] = np.zeros((4, slots), np.int32)
        """The next four, which change and are looked at together."""
        self.known: npt.NDArray[np.int32] = self.counts[0]  # tokens in the buffer, sampled ones included
        self.computed: npt.NDArray[np.int32] = self.counts[1]  # tokens whose KV is written, or UNKNOWN
        self.cached: npt.NDArray[np.int32] = self.counts[2]  # leading tokens whose KV came with the blocks
        self.blocks: npt.NDArray[np.int32] = self.counts[3]  # entries of the block table
        self.prompt_lens: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.asks: npt.NDArray[np.int8] = np.zeros(slots, np.int8)  # LOGPROBS | PROMPT_LOGPROBS | POOLING
        self.logprobs: npt.NDArray[np.int32] = np.zeros(slots, np.int32)  # alternatives per output token; -1: none
        self.prompt_logprobs: npt.NDArray[np.int32] = np.zeros(slots, np.int32)  # the same for prompt tokens
        self.pooling: npt.NDArray[np.int8] = np.zeros(slots, np.int8)  # `Pooling`
        self.tokens: torch.Tensor = torch.empty((slots, max_model_len), dtype=torch.int32, device=device)
        self.block_tables: torch.Tensor = torch.empty((slots, self.max_blocks), dtype=torch.int32, device=device)
        on_host = device.type == "cpu"
        self.host_tables: npt.NDArray[np.int32] = (
            self.block_tables.numpy() if on_host else np.empty((slots, self.max_blocks), np.int32)
        )
        """The block tables for decisions on the host; one memory with the device's where that is the CPU."""
        self._host_tokens: npt.NDArray[np.int32] | None = self.tokens.numpy() if on_host else None
        self.sampling = SamplingTable(self.tokens)

    def reset(self) -> None:
        """Forgets every request."""
        self.occupied[:] = False

    def apply(self, plan: StepPlan) -> None:
        """Applies what a checked plan changes: freed slots, new slots, appended tokens, new block ids."""
        self.begin(plan)
        if len(plan.appended_ids):
            self._append_tokens(plan)
        if len(plan.block_ids):
            self._append_blocks(plan)

    def begin(self, plan: StepPlan) -> None:
        """Applies of a checked plan only which slots are freed and filled, and where rows begin; `apply` may follow."""
        self.occupied[plan.freed] = False
        if len(plan.new):
            self._fill(plan.new)
        # Slots that begin: where depends on what the core found in its prefix cache.
        self.computed[plan.slots] = plan.computed

    def advance(self, plan: StepPlan) -> None:
        """Takes note that the step's tokens are computed and that the rows that drew have one token more."""
        self.computed[plan.slots] = plan.computed + plan.num_tokens
        self.known[plan.slots] += self.draws(plan)

    def draws(self, plan: StepPlan) -> npt.NDArray[np.bool_]:
        """Returns which rows of an applied plan draw a token: those that sample and are not to be pooled."""
        drawing: npt.NDArray[np.bool_] = plan.samples & (self.pooling[plan.slots] == NOT_POOLED)
        return drawing

    def write_drawn(self, rows: SampleRows, token_ids: torch.Tensor) -> None:
        """Puts the drawn tokens ``[R]`` behind their requests' others, where the next step finds them."""
        if self._hand_over is not None:
            self._hand_over(self.tokens, self.there(rows.slots), to_device(rows.positions, self.device), token_ids)
            return
        flat = rows.slots * self.max_model_len + rows.positions
        self.tokens.view(-1).index_copy_(0, to_device(flat, self.device), token_ids.to(torch.int32))

    def read_drawn(self, rows: SampleRows) -> torch.Tensor:
        """Returns what `write_drawn` wrote for these rows, int32 ``[R]``."""
        return self.tokens.view(-1).index_select(0, self.there(rows.slots * self.max_model_len + rows.positions))

    def there(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        """Returns ``array`` on the device."""
        return to_device(array, self.device)

    @staticmethod
    def counts_of(new: NewSlots) -> npt.NDArray[np.int32]:
        """Returns `counts` of slots that are filled, int32 ``[4, N]``."""
        counts = np.zeros((4, len(new)), np.int32)
        counts[0] = lengths_of(new.token_offsets)
        counts[1] = UNKNOWN
        counts[2] = new.cached
        return counts

    def _fill(self, new: NewSlots) -> None:
        self.occupied[new.slots] = True
        self.epochs[new.slots] = new.epochs
        self.counts[:, new.slots] = self.counts_of(new)
        self.prompt_lens[new.slots] = new.prompt_lens
        self.logprobs[new.slots] = new.logprobs
        self.prompt_logprobs[new.slots] = new.prompt_logprobs
        self.pooling[new.slots] = new.pooling
        self.asks[new.slots] = (
            (new.logprobs >= 0) * LOGPROBS
            | (new.prompt_logprobs >= 0) * PROMPT_LOGPROBS
            | (new.pooling != NOT_POOLED) * POOLING
        )
        self.sampling.put(new)
        if self._host_tokens is not None:
            begins = new.token_offsets.tolist()
            for i, slot in enumerate(new.slots.tolist()):
                self._host_tokens[slot, : begins[i + 1] - begins[i]] = new.token_ids[begins[i] : begins[i + 1]]
            return
        row, column = ragged_index(np.diff(new.token_offsets))
        self._write(self.tokens, new.slots[row].astype(np.int64), column, new.token_ids)

    def _append_tokens(self, plan: StepPlan) -> None:
        counts = np.diff(plan.appended_offsets)
        row, column = ragged_index(counts)
        slots = plan.slots[row].astype(np.int64)
        self._write(self.tokens, slots, column + self.known[slots], plan.appended_ids)
        self.known[plan.slots] += counts

    def _append_blocks(self, plan: StepPlan) -> None:
        counts = np.diff(plan.block_offsets)
        row, column = ragged_index(counts)
        slots = plan.slots[row].astype(np.int64)
        if self.device.type != "cpu":
            self.host_tables[slots, column + self.blocks[slots]] = plan.block_ids
        self._write(self.block_tables, slots, column + self.blocks[slots], plan.block_ids)
        self.blocks[plan.slots] += counts

    def _write(
        self,
        table: torch.Tensor,
        rows: npt.NDArray[np.int64],
        columns: npt.NDArray[np.int64],
        values: npt.NDArray[np.int32],
    ) -> None:
        flat = to_device(rows * table.shape[1] + columns, self.device)
        table.view(-1).index_copy_(0, flat, to_device(values, self.device))
