"""Checks of a step that are the same for every backend on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tercet_worker.attention.interface import AttentionBatch, AttentionPlanError, AttentionSpec


def check_layout(batch: AttentionBatch) -> None:
    """Checks dtypes, shapes and contiguity of a step's tensors, not their values. Raises AttentionPlanError."""
    requests = batch.seq_lens.numel()
    _check("query_start_loc", batch.query_start_loc, torch.int32, (requests + 1,))
    _check("seq_lens", batch.seq_lens, torch.int32, (requests,))
    _check("slots", batch.slots, torch.int32, (requests,))
    _check("slot_mapping", batch.slot_mapping, torch.int64, (batch.num_tokens,))
    if batch.block_table.dim() != 2:
        raise AttentionPlanError(f"block_table has {batch.block_table.dim()} dimensions, not 2", row=None)
    _check("block_table", batch.block_table, torch.int32, tuple(batch.block_table.shape))


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous() or tensor.is_cuda:
        raise AttentionPlanError(
            f"{name} is {tensor.dtype}{list(tensor.shape)} on {tensor.device}, "
            f"expected contiguous {dtype}{list(shape)} on the CPU",
            row=None,
        )


def check_values(spec: AttentionSpec, batch: AttentionBatch, num_blocks: int) -> None:
    """Checks what the kernels check in C++: nothing refers to what does not exist. Raises AttentionPlanError."""
    starts = batch.query_start_loc.tolist()
    max_slots, max_blocks = batch.block_table.shape
    if starts[0] != 0:
        raise query_start_error(0, starts[0], 0)
    for row, (context, slot) in enumerate(zip(batch.seq_lens.tolist(), batch.slots.tolist(), strict=True)):
        begin, end = starts[row], starts[row + 1]
        if end <= begin:
            raise query_start_error(row + 1, end, begin)
        if end > batch.num_tokens:
            raise token_count_error(row + 1, end, batch.num_tokens)
        if not 0 <= slot < max_slots:
            raise slot_error(row, slot, max_slots)
        if context < end - begin:
            raise context_error(row, context, end - begin)
        if context > max_blocks * spec.block_size:
            raise context_blocks_error(row, context, max_blocks * spec.block_size)
        for block in batch.block_table[slot, : -(-context // spec.block_size)].tolist():
            if not 0 <= block < num_blocks:
                raise block_error(row, block, num_blocks)
    places = num_blocks * spec.block_size
    for token, place in enumerate(batch.slot_mapping.tolist()):
        if not -1 <= place < places:
            raise slot_mapping_error(token, place, places)


def query_start_error(row: int, value: int, before: int) -> AttentionPlanError:
    """The start of a request's tokens does not follow from the one before."""
    expected = "0" if row == 0 else f"more than {before}"
    return AttentionPlanError(f"query_start_loc[{row}] is {value}, expected {expected}", row=max(row - 1, 0))


def token_count_error(row: int, value: int, tokens: int) -> AttentionPlanError:
    """A request's tokens end beyond the batch."""
    return AttentionPlanError(f"query_start_loc[{row}] is {value}, but the step has {tokens} tokens", row=row - 1)


def slot_error(row: int, value: int, slots: int) -> AttentionPlanError:
    """A slot is not a row of the block table."""
    return AttentionPlanError(f"request {row} is in slot {value}, but the block table has {slots} rows", row=row)


def context_error(row: int, value: int, queries: int) -> AttentionPlanError:
    """A context is shorter than what is computed of it in this step."""
    return AttentionPlanError(f"request {row} has a context of {value} tokens, but {queries} in this step", row=row)


def context_blocks_error(row: int, value: int, capacity: int) -> AttentionPlanError:
    """A context is longer than a row of the block table."""
    return AttentionPlanError(
        f"request {row} has a context of {value} tokens, the block table holds {capacity}", row=row
    )


def block_error(row: int, value: int, blocks: int) -> AttentionPlanError:
    """A block id is not one of the cache's."""
    return AttentionPlanError(f"request {row} refers to block {value}, but the cache has {blocks}", row=row)


def slot_mapping_error(row: int, value: int, places: int) -> AttentionPlanError:
    """A token's key and value would be written outside the cache."""
    return AttentionPlanError(f"token {row} is to be written at {value}, but the cache has {places} places", row=row)


def no_plan_error() -> AttentionPlanError:
    """A layer is computed without a plan in force."""
    return AttentionPlanError("no plan is in force: plan() comes before forward(), and after allocate_kv()", row=None)


def check_tensors(spec: AttentionSpec, tokens: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Checks the tensors of one layer. Raises AttentionPlanError."""
    q_shape = (tokens, spec.num_query_heads, spec.head_size)
    kv_shape = (tokens, spec.num_kv_heads, spec.head_size)
    for name, tensor, shape in (("q", q, q_shape), ("k", k, kv_shape), ("v", v, kv_shape), ("out", out, q_shape)):
        if tensor.shape != shape or tensor.dtype != spec.dtype or tensor.is_cuda:
            raise AttentionPlanError(
                f"{name} is {tensor.dtype}{list(tensor.shape)} on {tensor.device}, "
                f"expected {spec.dtype}{list(shape)} on the CPU",
                row=None,
            )
        if tensor.stride()[1:] != (spec.head_size, 1):
            raise AttentionPlanError(
                f"{name} has strides {tensor.stride()}; a token's heads must be contiguous", row=None
            )
