"""Runs attention on random steps in a kernel library built with sanitizers. A program of its own, without torch.

Every array is exactly as large as the kernels may use it, so that the address sanitizer sees one element too many.
Usage: ``attention_sanitized.py LIBRARY``, with the sanitizer's runtime preloaded.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import byref

import numpy as np

from tercet_worker.kernels import attention_abi
from tercet_worker.kernels.attention_abi import AttentionConfig, AttentionProblem, AttentionStep

BLOCK = 16


def exact(array: np.ndarray) -> np.ndarray:
    """Returns a copy that owns its memory."""
    return np.array(array, order="C", copy=True)


def run(cdll: ctypes.CDLL, rng: np.random.Generator, isa: int, dtype: int) -> None:
    """One cache, three steps: prefill and chunk, decode and chunk, decode."""
    element = np.uint16 if dtype else np.float32
    kv_heads, group, head_size = int(rng.integers(1, 3)), int(rng.integers(1, 9)), int(rng.choice([16, 64, 80, 96]))
    heads = kv_heads * group
    contexts = [int(n) for n in rng.choice([1, 2, 15, 16, 17, 63, 64, 65, 130, 257, 1100], size=4)]
    blocks_of = [-(-n // BLOCK) for n in contexts]
    num_blocks = sum(blocks_of)
    ids = iter(rng.permutation(num_blocks).astype(np.int32))
    table = np.full((len(contexts), max(blocks_of)), 2**31 - 1, np.int32)
    for row, count in enumerate(blocks_of):
        table[row, :count] = [next(ids) for _ in range(count)]
    run_blocks = int(rng.choice([1, 3, 16]))
    held = -(-num_blocks // run_blocks) * run_blocks
    cache = exact(np.full(held * BLOCK * 2 * kv_heads * head_size, 0x7FC0, element))
    windows = exact(np.array([int(rng.choice([0, 0, 33]))], np.int32))
    config = AttentionConfig(
        kv=cache.ctypes.data,
        windows=windows.ctypes.data,
        num_layers=1,
        num_blocks=num_blocks,
        block_size=BLOCK,
        run_blocks=run_blocks,
        query_heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        dtype=dtype,
        isa=isa,
        threads=2,
        scale=head_size**-0.5,
        soft_cap=float(rng.choice([0.0, 20.0])),
    )
    problem = AttentionProblem()
    attention = cdll.tercet_attention_create(byref(config), byref(problem))
    if attention is None:
        raise SystemExit(f"refused: {problem.code}")
    halves = [n // 2 for n in contexts]
    spans = [
        [(i, 0, half) for i, half in enumerate(halves)],
        [(i, half, n - 1) for i, (half, n) in enumerate(zip(halves, contexts, strict=True))],
        [(i, n - 1, n) for i, n in enumerate(contexts)],
    ]
    for parts in spans:
        step(
            cdll,
            rng,
            attention,
            table,
            [part for part in parts if part[2] > part[1]],
            (heads, kv_heads, head_size),
            element,
        )
    cdll.tercet_attention_destroy(attention)


def step(
    cdll: ctypes.CDLL,
    rng: np.random.Generator,
    attention: int,
    table: np.ndarray,
    parts: list[tuple[int, int, int]],
    shape: tuple[int, int, int],
    element: type,
) -> None:
    """Plans and computes tokens [begin, end) of each (request, begin, end)."""
    if not parts:
        return
    heads, kv_heads, head_size = shape
    starts = exact(np.cumsum([0, *(end - begin for _, begin, end in parts)]).astype(np.int32))
    tokens = int(starts[-1])
    places = [table[i, p // BLOCK] * BLOCK + p % BLOCK for i, begin, end in parts for p in range(begin, end)]
    mapping = exact(np.array(places, np.int64))
    lengths = exact(np.array([end for _, _, end in parts], np.int32))
    slots = exact(np.array([i for i, _, _ in parts], np.int32))
    arguments = AttentionStep(
        query_start_loc=starts.ctypes.data,
        seq_lens=lengths.ctypes.data,
        slots=slots.ctypes.data,
        block_table=table.ctypes.data,
        slot_mapping=mapping.ctypes.data,
        block_table_stride=table.shape[1],
        requests=len(parts),
        tokens=tokens,
        max_slots=table.shape[0],
        max_blocks=table.shape[1],
    )
    problem = AttentionProblem()
    if cdll.tercet_attention_plan(attention, byref(arguments), byref(problem)):
        raise SystemExit(f"plan refused: {problem.code} row {problem.row} value {problem.value}")
    q, k, v = (draw(rng, (tokens, n, head_size), element) for n in (heads, kv_heads, kv_heads))
    out = exact(np.zeros_like(q))
    row, kv_row = heads * head_size * q.itemsize, kv_heads * head_size * q.itemsize
    pointers = [array.ctypes.data for array in (q, k, v, out)]
    if cdll.tercet_attention_forward(attention, 0, *pointers, row, kv_row, kv_row, row):
        raise SystemExit("forward refused")
    values = out.astype(np.uint32) << 16 if element is np.uint16 else out
    if not np.isfinite(values.view(np.float32)).all():
        raise SystemExit("a result is not finite")


def draw(rng: np.random.Generator, shape: tuple[int, int, int], element: type) -> np.ndarray:
    """Returns normal values, as float32 or as bfloat16 bits."""
    values = rng.standard_normal(shape).astype(np.float32)
    return exact((values.view(np.uint32) >> 16).astype(np.uint16) if element is np.uint16 else values)


def main() -> None:
    """Every instruction set, both dtypes."""
    cdll = ctypes.CDLL(sys.argv[1])
    attention_abi.declare(cdll)
    rng = np.random.default_rng(0)
    runs = 0
    for isa in range(5):
        if not cdll.tercet_isa_available(isa):
            continue
        for dtype in (0, 1):
            for _ in range(12):
                run(cdll, rng, isa, dtype)
                runs += 1
    print(f"{runs} runs")


if __name__ == "__main__":
    main()
