"""Activation functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  # the customary name


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns ``silu(gate) · up [T, I]`` for gate and up side by side, ``[T, 2 I]`` (SwiGLU, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
