"""Parts of a layer that would be several passes over memory: the norm with the addition before it, the activation.

Legend: T tokens, H hidden size, I inner size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


@triton.jit
def _add_norm(stream, x, weight, out, width, x_stride, eps, adds: tl.constexpr, size: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, size)
    inside = lane < width
    value = tl.load(stream + row * width + lane, mask=inside, other=0.0)
    if adds:
        value += tl.load(x + row * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(stream + row * width + lane, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    factor = tl.load(weight + lane, mask=inside, other=0.0)
    tl.store(out + row * width + lane, (value * scale * factor).to(out.dtype.element_ty), mask=inside)


def add_norm(
    stream: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Adds ``x [T, H]`` to the residual ``stream [T, H]`` (float32, in place), and returns its norm ``[T, H]``.

    ``(stream + x) / sqrt(mean((stream + x)²) + eps) · weight``, as ``RMSNorm``. Without ``x`` nothing is added.
    """
    rows, width = stream.shape
    out = torch.empty((rows, width), dtype=dtype, device=stream.device)
    if rows:
        size = triton.next_power_of_2(width)
        _add_norm[(rows,)](
            stream, stream if x is None else x, weight, out, width, width if x is None else x.stride(0), eps,
            adds=x is not None, size=size, num_warps=min(max(size // 512, 1), 16),
        )  # fmt: skip
    return out


@triton.jit
def _silu_and_multiply(x, out, width, x_stride, size: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * size + tl.arange(0, size)
    inside = lane < width
    gate = tl.load(x + row * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + lane, mask=inside, other=0.0).to(tl.float32)
    # Rounded between the two, as two operations would.
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + lane, (activated * up).to(out.dtype.element_ty), mask=inside)


def silu_and_multiply(x: torch.Tensor) -> torch.Tensor:
    """Returns ``silu(gate) · up``, ``[T, I]``, for ``x [T, 2 I]``, whose first half is the gate."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        _silu_and_multiply[(rows, triton.cdiv(width, _COLUMNS))](x, out, width, x.stride(0), size=_COLUMNS)
    return out
