"""Rotation of queries and keys, and keys and values on their way into the paged cache.

The cache of a layer is ``[N, 2, B, Hkv, D]``: for each block its keys, then its values (FlashInfer's "NHD").
The rotation is that of ``layers/rope.py``: halves of the rotated dimensions are paired, products are float32.

Legend: T tokens, Hq query heads, Hkv key/value heads, D head size, R rotated dimensions, N blocks, B tokens per block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


@triton.jit
def _place_of(place, block: tl.constexpr, kv_heads: tl.constexpr, head: tl.constexpr):
    """Where the keys of a token begin in the cache; its values lie one run of a block's keys behind."""
    page = place // block
    return page * (2 * block * kv_heads * head) + (place % block) * (kv_heads * head)


@triton.jit
def _rotate_and_write(
    qkv, cosines, sines, places, queries, cache, qkv_stride, query_stride, scale_k, scale_v,
    query_heads: tl.constexpr, kv_heads: tl.constexpr, head: tl.constexpr, half: tl.constexpr,
    block: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    token, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, size)
    inside = lane < head
    source = qkv + token * qkv_stride + number * head
    value = tl.load(source + lane, mask=inside, other=0.0).to(tl.float32)
    if number < query_heads + kv_heads:
        rotated = lane < 2 * half
        pair = token * half + tl.where(lane < half, lane, lane - half)
        cosine = tl.load(cosines + pair, mask=rotated, other=1.0)
        sine = tl.load(sines + pair, mask=rotated, other=0.0)
        partner = tl.load(source + tl.where(lane < half, lane + half, lane - half), mask=rotated, other=0.0)
        sign = tl.where(lane < half, -1.0, 1.0)
        turned = value * cosine + sign * (partner.to(tl.float32) * sine)
        value = tl.where(rotated, turned, value)
    if number < query_heads:
        tl.store(queries + token * query_stride + number * head + lane, value.to(queries.dtype.element_ty), mask=inside)
    else:
        place = tl.load(places + token)
        if place >= 0:
            start = _place_of(place, block, kv_heads, head)
            if number < query_heads + kv_heads:
                target = cache + start + (number - query_heads) * head
                tl.store(target + lane, (value * scale_k).to(cache.dtype.element_ty), mask=inside)
            else:
                target = cache + start + block * kv_heads * head + (number - query_heads - kv_heads) * head
                tl.store(target + lane, (value * scale_v).to(cache.dtype.element_ty), mask=inside)


def rotate_and_write(
    qkv: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    slot_mapping: torch.Tensor,
    queries: torch.Tensor,
    cache: torch.Tensor,
    *,
    scale_k: float = 1.0,
    scale_v: float = 1.0,
) -> None:
    """Rotates queries into ``queries``, and keys, with the values, into the cache.

    Args:
        qkv: ``[T, (Hq + 2 Hkv) · D]``.
        cosines: float32 ``[T, R / 2]`` or ``[T, 1, R / 2]``, of the angles of each token; contiguous.
        sines: likewise.
        slot_mapping: int64 ``[T]``, block · B + offset; below 0 nothing is written.
        queries: ``[T, Hq, D]``; written.
        cache: ``[N, 2, B, Hkv, D]`` in the dtype of the model, or of 8 bits; written.
        scale_k: factor of keys on their way, for a cache of 8 bits.
        scale_v: likewise of values.
    """
    tokens, query_heads, head = queries.shape
    _, _, block, kv_heads, _ = cache.shape
    if tokens:
        _rotate_and_write[(tokens, query_heads + 2 * kv_heads)](
            qkv, cosines, sines, slot_mapping, queries, cache, qkv.stride(0), queries.stride(0),
            scale_k, scale_v, query_heads=query_heads, kv_heads=kv_heads, head=head, half=cosines.shape[-1],
            block=block, size=triton.next_power_of_2(head), num_warps=2 if head > 64 else 1,
        )  # fmt: skip


@triton.jit
def _write(
    keys, values, places, cache, key_stride, value_stride, scale_k, scale_v,
    kv_heads: tl.constexpr, head: tl.constexpr, block: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token)
    if place >= 0:
        lane = tl.arange(0, size)
        inside = lane < kv_heads * head
        target = cache + _place_of(place, block, kv_heads, head)
        key = tl.load(keys + token * key_stride + lane, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(values + token * value_stride + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + lane, (key * scale_k).to(cache.dtype.element_ty), mask=inside)
        tl.store(target + block * kv_heads * head + lane, (value * scale_v).to(cache.dtype.element_ty), mask=inside)


def write(
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    *,
    scale_k: float = 1.0,
    scale_v: float = 1.0,
) -> None:
    """Writes keys and values ``[T, Hkv, D]``, rotated already, to the cache; tokens may be apart."""
    tokens, kv_heads, head = keys.shape
    if tokens:
        _write[(tokens,)](
            keys, values, slot_mapping, cache, keys.stride(0), values.stride(0), scale_k, scale_v,
            kv_heads=kv_heads, head=head, block=cache.shape[2], size=triton.next_power_of_2(kv_heads * head),
        )  # fmt: skip
