"""Compiles every kernel of the CUDA worker to machine code, with no GPU. Run by ``test_gpu_code.py``, in a process of
its own: in that of the tests Triton's interpreter is on.

Kernels are launched as the worker launches them, on tensors of the CPU. Where Triton would compile for the GPU of the
process and launch, a hook of its own is asked first; that compiles for each processor, and says that there is nothing
to launch. So types, alignments and constants are those of a real call.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from tercet_worker.cuda.kernels.cache import rotate_and_write, write
from tercet_worker.cuda.kernels.inputs import hand_over, lay_out, list_pages
from tercet_worker.cuda.kernels.layers import add_norm, silu_and_multiply
from tercet_worker.cuda.kernels.matmul import multiply
from tercet_worker.cuda.kernels.sampling import draw_, penalize_, scan
from tercet_worker.sampling.noise import RowKeys

BF16, F8 = torch.bfloat16, torch.float8_e4m3fn
Launch = Callable[[], object]


class NoGpu:
    """Stands where Triton asks for the GPU of the process."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return self._target.arch  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class Compiler:
    """Is a ``jit_cache_hook``: compiles, and has nothing launched.

    Args:
        target: the processor.
    """

    def __init__(self, target: GPUTarget) -> None:
        self._target = target
        self.made: list[dict[str, Any]] = []

    def __call__(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002  # Triton's name
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        options = {name: compile[name] for name in ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion")}
        made = triton.compile(source, target=self._target, options=options)
        self.made.append(
            {
                "kernel": fn.name,
                "arch": self._target.arch,
                "cubin": len(made.asm["cubin"]),
                "shared": made.metadata.shared,
                "ptx": made.asm["ptx"],
            }
        )
        return True


def launches(arch: int) -> Iterator[Launch]:
    """Yields calls that between them launch every kernel in every form that the worker uses."""
    i32 = torch.zeros(64, dtype=torch.int32)
    i64 = torch.zeros(64, dtype=torch.int64)
    f32 = torch.zeros(64)
    table = torch.zeros((64, 64), dtype=torch.int32)
    for size in (512, 511):  # a row that begins at 16 bytes, and one that does not
        tokens = torch.zeros((8, size), dtype=torch.int32)
        yield lambda tokens=tokens: lay_out(
            slots=i32[:4], starts=i32[:5], computed=i32[:4], unwritten=i32[:4], tokens=tokens, block_tables=table,
            block_size=16, longest=7, padded=32, total=20, token_ids=i32, positions=i64, slot_mapping=i64,
        )  # fmt: skip
        for slots in (i32, i64):
            yield lambda tokens=tokens, slots=slots: hand_over(tokens, slots[:3], i32[:3], i64[:3])
    yield lambda: list_pages(slots=i32[:4], firsts=i32[:4], offsets=i32[:5], block_tables=table, most=9, pages=i32)
    for cache_dtype in (BF16, *((F8,) if arch >= 89 else ())):
        for query, kv, head in ((32, 8, 128), (9, 3, 64), (8, 1, 256)):
            qkv = torch.zeros((3, (query + 2 * kv) * head), dtype=BF16)
            angles = torch.zeros((3, head // 2))
            cache = torch.zeros((2, 2, 16, kv, head), dtype=cache_dtype)
            heads = qkv.view(3, -1, head)
            yield lambda qkv=qkv, angles=angles, cache=cache, query=query, head=head: rotate_and_write(
                qkv, angles, angles, i64[:3], torch.zeros((3, query, head), dtype=BF16), cache
            )
            yield lambda heads=heads, cache=cache, kv=kv: write(heads[:, :kv], heads[:, kv : 2 * kv], i64[:3], cache)
    for width in (4096, 576):
        stream, x, weight = torch.zeros((3, width)), torch.zeros((3, width), dtype=BF16), torch.ones(width)
        for added in (x, None):
            yield lambda s=stream, x=added, w=weight: add_norm(s, x, w, 1e-5, BF16)
        yield lambda x=x: silu_and_multiply(x)
    for inputs, outputs in ((4096, 1000), (576, 49_152)):
        x, weight = torch.zeros((3, inputs), dtype=BF16), torch.zeros((outputs, inputs), dtype=BF16)
        for bias, dtype in ((None, None), (weight[:, 0].contiguous(), None), (None, torch.float32)):
            yield lambda x=x, w=weight, b=bias, d=dtype: multiply(x, w, b, d)
    for vocab in (128_256, 49_153):
        logits = torch.zeros((3, vocab))
        yield lambda logits=logits: scan(logits)
        yield lambda logits=logits: draw_(
            logits, f32[:3], f32[:3], f32[:3], RowKeys(i32[:3], i32[:3]), i64[:3], i64[:3]
        )
        yield lambda logits=logits: penalize_(
            logits, torch.zeros_like(logits), rows=i64[:2], owner=i64[:9], tokens=i64[:9], output=f32[:9],
            repetition=f32[:2], frequency=f32[:2], presence=f32[:2],
        )  # fmt: skip


def main() -> None:
    """Prints what was made as JSON; raises what Triton raises."""
    found: list[dict[str, Any]] = []
    for arch in map(int, sys.argv[1:]):
        target = GPUTarget("cuda", arch, 32)
        compiler = Compiler(target)
        driver.set_active(NoGpu(target))
        triton.knobs.runtime.jit_cache_hook = compiler
        for launch in launches(arch):
            launch()
        found += compiler.made
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
