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
from tercet_worker.state.mirror import ragged_index, to_device

if TYPE_CHECKING:
    from tercet_shared.wire.step import StepPlan
    from tercet_worker.attention.interface import HostAttention
    from tercet_worker.state.slots import SlotState


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Rows that draw a token, in batch order; on the host."""

    plan_rows: npt.NDArray[np.int64]  # [R] row of the plan
    slots: npt.NDArray[np.int64]  # [R]
    positions: npt.NDArray[np.int32]  # [R] where in prompt + output the token will stand

    def __len__(self) -> int:
        return len(self.plan_rows)

    def take(self, index: npt.NDArray[np.int64]) -> SampleRows:
        """Returns some of the rows."""
        return SampleRows(self.plan_rows[index], self.slots[index], self.positions[index])

    def split(self, gated: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the places of those rows that are not, and of those that are among ``gated``, rows of the plan."""
        if not len(gated):
            return np.arange(len(self)), np.zeros(0, np.int64)
        found = np.isin(self.plan_rows, gated)
        return np.flatnonzero(~found), np.flatnonzero(found)


@dataclass(frozen=True, slots=True)
class HostBatch:
    """What the host knows of a step, in batch order: those with one token first, else as in the plan."""

    plan_rows: npt.NDArray[np.int64]  # [S] row of the plan
    slots: npt.NDArray[np.int32]  # [S]
    counts: npt.NDArray[np.int32]  # [S] tokens in this step
    computed: npt.NDArray[np.int32]  # [S] tokens before it
    starts: npt.NDArray[np.int32]  # [S + 1] first token of each row
    ends: npt.NDArray[np.int32]  # [S] tokens of each request once this step is done
    unwritten: npt.NDArray[np.int32]  # [S] tokens of this step, the first, whose KV is in the cache already
    samples: SampleRows
    sampling: npt.NDArray[np.int64]  # [R] which rows sample

    @classmethod
    def of(cls, plan: StepPlan, state: SlotState) -> HostBatch:
        """Returns that of an applied plan with at least one row."""
        order = np.argsort(plan.num_tokens != 1, kind="stable")
        slots, counts, computed = plan.slots[order], plan.num_tokens[order], plan.computed[order]
        starts = np.zeros(len(order) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        ends = (computed + counts).astype(np.int32)
        unwritten = np.clip(state.cached[slots] - computed, 0, counts)
        sampling = np.flatnonzero(state.draws(plan)[order])
        samples = SampleRows(order[sampling], slots[sampling].astype(np.int64), ends[sampling])
        return cls(order, slots.astype(np.int32), counts, computed, starts, ends, unwritten, samples, sampling)

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return int(self.starts[-1])

    @property
    def max_query_len(self) -> int:
        """Tokens of the longest row."""
        return int(self.counts.max())

    @property
    def logits_rows(self) -> npt.NDArray[np.int64]:
        """[R] row of the hidden states from which each row that samples draws."""
        rows: npt.NDArray[np.int64] = self.starts[1:][self.sampling].astype(np.int64) - 1
        return rows


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
    slot_mapping: (
        torch.Tensor
    )  # int64 [T] block id · block size + offset where the token's KV goes, or PADDING: nowhere
    max_query_len: int  # tokens of the longest row
    starts: npt.NDArray[np.int32]  # [S + 1] query_start_loc on the host
    samples: SampleRows
    logits_rows: torch.Tensor  # int64 [R] row of the hidden states from which each of them draws
    host: HostAttention | None = None  # for backends that plan on the host

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
        host = HostBatch.of(plan, state)
        total = host.num_tokens
        padded = -(-total // pad_to) * pad_to
        # A token's position is its place in the flat batch, shifted by where its request begins there and in itself.
        positions = np.zeros(padded, np.int64)
        shifts = host.computed.astype(np.int64) - host.starts[:-1]
        positions[:total] = np.arange(total) + np.repeat(shifts, host.counts)
        token_slots = np.zeros(padded, np.int64)
        token_slots[:total] = np.repeat(host.slots, host.counts)

        place = to_device(positions, device)
        owner = to_device(token_slots, device)
        input_ids = state.tokens.view(-1).index_select(0, owner * state.max_model_len + place)
        blocks = state.block_tables.view(-1).index_select(0, owner * state.max_blocks + place // block_size)
        slot_mapping = blocks.to(torch.int64) * block_size + place % block_size
        if host.unwritten.any():  # these blocks may be other requests' as well
            row, place_in_row = ragged_index(host.unwritten)
            slot_mapping[to_device(host.starts[row] + place_in_row, device)] = PADDING
        if padded > total:
            input_ids[total:] = 0
            slot_mapping[total:] = PADDING
        return cls(
            plan_rows=host.plan_rows,
            num_tokens=total,
            input_ids=input_ids,
            positions=place,
            query_start_loc=to_device(host.starts, device),
            seq_lens=to_device(host.ends, device),
            slots=to_device(host.slots, device),
            slot_mapping=slot_mapping,
            max_query_len=host.max_query_len,
            starts=host.starts,
            samples=host.samples,
            logits_rows=to_device(host.logits_rows, device),
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
            host=self.host,
        )


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows that compute prompt tokens whose successors are to be scored: l rows, t such tokens, in batch order."""

    plan_rows: npt.NDArray[np.int64]  # [l]
    first: npt.NDArray[np.int32]  # [l] place of the first successor in the prompt
    lengths: npt.NDArray[np.int32]  # [l] successors in this step
    asked: npt.NDArray[np.int32]  # [l] alternatives to find
    hidden_rows: torch.Tensor  # int64 [t] row of the hidden states that a successor follows
    tokens: torch.Tensor  # int64 [t] the successors

    @classmethod
    def build(cls, plan: StepPlan, batch: InputBatch, state: SlotState) -> PromptRows:
        """Returns the rows of an applied plan whose slots ask for it."""
        slots = plan.slots[batch.plan_rows].astype(np.int64)
        asked = state.prompt_logprobs[slots]
        first = plan.computed[batch.plan_rows] + 1
        ends = first + plan.num_tokens[batch.plan_rows]
        lengths = np.minimum(ends, state.prompt_lens[slots]) - first
        rows = np.flatnonzero((asked >= 0) & (lengths > 0))
        owner, place = ragged_index(lengths[rows])
        flat = slots[rows][owner] * state.max_model_len + first[rows][owner] + place
        tokens = state.tokens.view(-1).index_select(0, to_device(flat, state.device))
        return cls(
            plan_rows=batch.plan_rows[rows],
            first=first[rows],
            lengths=lengths[rows],
            asked=asked[rows],
            hidden_rows=to_device(batch.starts[:-1][rows][owner] + place, state.device),
            tokens=tokens.to(torch.int64),
        )
