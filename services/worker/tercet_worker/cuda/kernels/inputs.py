"""The flat batch on the device: token ids, positions and places in the KV cache of every token of a step.

The same as ``InputBatch.build`` lays out on the CPU.

Legend: S rows (requests of the step, those that only pad it behind them), T tokens with padding, M blocks of a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tercet_worker.attention.interface import PADDING

if TYPE_CHECKING:
    import torch

_TOKENS = 256
"""Tokens that one program lays out. (What changes from step to step is not specialized for: that would compile.)"""
_PAGES = 256


@triton.jit(do_not_specialize=["rows", "padded"])
def _lay_out(
    slots, starts, computed, unwritten, buffer, tables, ids, positions, places, buffer_stride, table_stride, rows,
    padded, block: tl.constexpr, padding: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    real = row < rows  # behind them all is the padding
    mine = tl.minimum(row, rows - 1)
    begin = tl.load(starts + row)
    end = tl.where(real, tl.load(starts + mine + 1), padded)
    token = begin + tl.program_id(1) * size + tl.arange(0, size)
    here = token < end
    slot = tl.load(slots + mine).to(tl.int64)
    position = tl.load(computed + mine) + token - begin
    wanted = token < tl.where(real, end, begin)
    token_id = tl.load(buffer + slot * buffer_stride + position, mask=wanted, other=0)
    page = tl.load(tables + slot * table_stride + position // block, mask=wanted, other=0).to(tl.int64)
    tl.store(ids + token, token_id, mask=here)
    tl.store(positions + token, tl.where(real, position, 0).to(tl.int64), mask=here)
    written = real & (token - begin >= tl.load(unwritten + mine))
    tl.store(places + token, tl.where(written, page * block + position % block, padding), mask=here)


def lay_out(
    *,
    slots: torch.Tensor,
    starts: torch.Tensor,
    computed: torch.Tensor,
    unwritten: torch.Tensor,
    tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    longest: int,
    padded: int,
    total: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Writes the inputs of a step.

    Args:
        slots: int32 ``[S]``.
        starts: int32 ``[S + 1]``, first token of each row.
        computed: int32 ``[S]``, tokens of the request before this step.
        unwritten: int32 ``[S]``, tokens of this step, the row's first, whose KV the cache has already.
        tokens: int32 ``[slots, L]``, what every slot knows; the step before has written what it drew.
        block_tables: int32 ``[slots, M]``.
        block_size: tokens per block.
        longest: most tokens of a row.
        padded: T.
        total: tokens without padding.
        token_ids: int32, at least ``[T]``; written, 0 in padding.
        positions: int64, likewise.
        slot_mapping: int64, likewise; PADDING in padding and where nothing is to be written.
    """
    rows = slots.shape[0]
    longest = max(longest, padded - total, 1)
    _lay_out[(rows + 1, triton.cdiv(longest, _TOKENS))](
        slots, starts, computed, unwritten, tokens, block_tables, token_ids, positions, slot_mapping,
        tokens.stride(0), block_tables.stride(0), rows, padded,
        block=block_size, padding=PADDING, size=_TOKENS,
    )  # fmt: skip


@triton.jit
def _list_pages(slots, firsts, offsets, tables, pages, table_stride, size: tl.constexpr):
    row = tl.program_id(0)
    begin, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    place = tl.program_id(1) * size + tl.arange(0, size)
    here = place < end - begin
    slot = tl.load(slots + row).to(tl.int64)
    first = tl.load(firsts + row)
    tl.store(
        pages + begin + place, tl.load(tables + slot * table_stride + first + place, mask=here, other=0), mask=here
    )


def list_pages(
    *,
    slots: torch.Tensor,
    firsts: torch.Tensor,
    offsets: torch.Tensor,
    block_tables: torch.Tensor,
    most: int,
    pages: torch.Tensor,
) -> None:
    """Writes the blocks of all rows end to end.

    Args:
        slots: int32 ``[S]``.
        firsts: int32 ``[S]``, block of the table with which each row's list begins.
        offsets: int32 ``[S + 1]``, where each row's list begins in ``pages``.
        block_tables: int32 ``[slots, M]``.
        most: blocks of the longest list.
        pages: int32, at least as long as all lists; written.
    """
    if most:
        _list_pages[(slots.shape[0], triton.cdiv(most, _PAGES))](
            slots, firsts, offsets, block_tables, pages, block_tables.stride(0), size=_PAGES
        )


@triton.jit(do_not_specialize=["rows"])
def _hand_over(tokens, slots, positions, drawn, stride, rows, size: tl.constexpr):
    row = tl.program_id(0) * size + tl.arange(0, size)
    here = row < rows
    slot = tl.load(slots + row, mask=here, other=0).to(tl.int64)
    position = tl.load(positions + row, mask=here, other=0)
    token_id = tl.load(drawn + row, mask=here, other=0).to(tl.int32)
    tl.store(tokens + slot * stride + position, token_id, mask=here)


def hand_over(tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, drawn: torch.Tensor) -> None:
    """Writes drawn tokens where the next step reads them.

    Args:
        tokens: int32 ``[slots, L]``; written.
        slots: int32 or int64 ``[R]``, distinct.
        positions: int32 ``[R]``, where in prompt and output each token stands.
        drawn: int64 or int32 ``[R]``.
    """
    rows = drawn.shape[0]
    if rows:
        _hand_over[(triton.cdiv(rows, _TOKENS),)](tokens, slots, positions, drawn, tokens.stride(0), rows, size=_TOKENS)
