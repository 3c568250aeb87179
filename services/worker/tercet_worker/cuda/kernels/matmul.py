"""A matrix product whose every row is computed alike whatever the other rows are: for ``--batch-invariant``.

Libraries choose how to divide a product by its size, and so the order in which a row is added up. Here tiles are of one
size, and each output adds up its columns from first to last.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _OUTPUTS, _INPUTS = 64, 64, 64


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x, weight, bias, out, rows, outputs, inputs, x_stride, weight_stride, out_stride,
    biased: tl.constexpr, tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * tile_m + tl.arange(0, tile_m)
    output = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
    total = tl.zeros((tile_m, tile_n), dtype=tl.float32)
    for begin in range(0, inputs, tile_k):
        column = begin + tl.arange(0, tile_k)
        left = tl.load(
            x + row[:, None].to(tl.int64) * x_stride + column[None, :],
            mask=(row[:, None] < rows) & (column[None, :] < inputs), other=0.0,
        )  # fmt: skip
        right = tl.load(
            weight + output[None, :].to(tl.int64) * weight_stride + column[:, None],
            mask=(output[None, :] < outputs) & (column[:, None] < inputs), other=0.0,
        )  # fmt: skip
        total = tl.dot(left, right, total, input_precision="ieee")
    if biased:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None].to(tl.int64) * out_stride + output[None, :],
        total.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (output[None, :] < outputs),
    )  # fmt: skip


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns ``x Wᵀ + b``, ``[M, N]`` in ``dtype`` (that of ``x``), for ``x [M, K]`` and ``weight [N, K]``."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    if rows:
        _multiply[(triton.cdiv(outputs, _OUTPUTS), triton.cdiv(rows, _ROWS))](
            x, weight, weight if bias is None else bias, out, rows, outputs, inputs,
            x.stride(0), weight.stride(0), out.stride(0),
            biased=bias is not None, tile_m=_ROWS, tile_n=_OUTPUTS, tile_k=_INPUTS,
        )  # fmt: skip
    return out
