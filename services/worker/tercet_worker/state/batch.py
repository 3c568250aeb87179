"""One step as tensors: all its tokens flat, one request after another, decodes first.

Lengths are known on the host, so the layout is computed there with vector operations; what depends on token ids or
block tables is gathered on the device, where the step before has just written the tokens that it sampled.

Legend: S scheduled requests, R of them that sample, T tokens of the step, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tercet_worker.attention.interface import PADDING, AttentionBatch
from tercet_worker.state.mirror import to_device

if TYPE_CHECKING:
    from tercet_shared.wire.step import StepPlan
    from tercet_worker.state.slots import SlotState


@dataclass(frozen=True, slots=True)
class InputBatch:
    """Inputs of one step. Rows are the requests in batch order: those with one token first, else as in the plan."""

    plan_rows: npt.NDArray[np.int64]  # [S] row of the plan
    num_tokens: int  # without padding
    input_ids: torch.Tensor  # int32 [T] 0 in padding
    positions: torch.Tensor  # int64 [T] of each token in its request; 0 in padding
    query_start_loc: torch.Tensor  # int32 [S + 1] first token of each row
    seq_lens: torch.Tensor  # int32 [S] tokens of each request once this step is done
    slots: torch.Tensor  # int32 [S]
    slot_mapping: torch.Tensor  # int64 [T] block id · block size + offset where the token's KV goes; PADDING in padding
    max_query_len: int  # tokens of the longest row
    # Rows that sample, in batch order.
    sample_rows: npt.NDArray[np.int64]  # [R] row of the plan
    sample_slots: npt.NDArray[np.int64]  # [R]
    sample_positions: npt.NDArray[np.int32]  # [R] where in prompt + output the sampled token will stand
    logits_rows: torch.Tensor  # int64 [R] row of the hidden states

    @classmethod
    def build(cls, plan: StepPlan, state: SlotState, *, block_size: int, pad_to: int = 1) -> InputBatch:
        """Returns the batch of an applied plan with at least one row.

        Args:
            plan: checked and applied to ``state``.
            state: token buffer and block tables.
            block_size: tokens per KV block.
            pad_to: the number of tokens is rounded up to a multiple of this.
        """
        device = state.device
        order = np.argsort(plan.num_tokens != 1, kind="stable")
        slots, counts, computed = plan.slots[order], plan.num_tokens[order], plan.computed[order]
        starts = np.zeros(len(order) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        total = int(starts[-1])
        padded = -(-total // pad_to) * pad_to
        ends = computed + counts
        # A token's position is its place in the flat batch, shifted by where its request begins there and in itself.
        positions = np.zeros(padded, np.int64)
        positions[:total] = np.arange(total) + np.repeat(computed.astype(np.int64) - starts[:-1], counts)
        token_slots = np.zeros(padded, np.int64)
        token_slots[:total] = np.repeat(slots, counts)
        samples = np.flatnonzero(plan.samples[order])

        place = to_device(positions, device)
        owner = to_device(token_slots, device)
        input_ids = state.tokens.view(-1).index_select(0, owner * state.max_model_len + place)
        blocks = state.block_tables.view(-1).index_select(0, owner * state.max_blocks + place // block_size)
        slot_mapping = blocks.to(torch.int64) * block_size + place % block_size
        if padded > total:
            input_ids[total:] = 0
            slot_mapping[total:] = PADDING
        return cls(
            plan_rows=order,
            num_tokens=total,
            input_ids=input_ids,
            positions=place,
            query_start_loc=to_device(starts, device),
            seq_lens=to_device(ends.astype(np.int32), device),
            slots=to_device(slots.astype(np.int32), device),
            slot_mapping=slot_mapping,
            max_query_len=int(counts.max()),
            sample_rows=order[samples],
            sample_slots=slots[samples].astype(np.int64),
            sample_positions=ends[samples].astype(np.int32),
            logits_rows=to_device(starts[1:][samples].astype(np.int64) - 1, device),
        )

    def attention(self, state: SlotState) -> AttentionBatch:
        """Returns what attention needs of the batch."""
        return AttentionBatch(
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            slots=self.slots,
            block_table=state.block_tables,
            slot_mapping=self.slot_mapping,
            max_query_len=self.max_query_len,
            num_tokens=self.input_ids.shape[0],
        )

    def write_sampled(self, state: SlotState, token_ids: torch.Tensor) -> None:
        """Puts the sampled tokens ``[R]`` behind their requests' others, where the next step finds them."""
        flat = self.sample_slots * state.max_model_len + self.sample_positions
        state.tokens.view(-1).index_copy_(0, to_device(flat, state.device), token_ids.to(torch.int32))
