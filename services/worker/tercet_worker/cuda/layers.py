"""A model's operations on a GPU with our kernels, where they are not compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # the customary name

from tercet_worker.cuda.kernels.layers import add_norm, silu_and_multiply
from tercet_worker.cuda.kernels.matmul import multiply
from tercet_worker.layers.matrix import dense

if TYPE_CHECKING:
    from tercet_worker.layers.embedding import Head
    from tercet_worker.parallel.communicator import Communicator


class KernelLayers:
    """Implements ``Layers``.

    Args:
        batch_invariant: whether products are computed row by row alike, which is slower.
    """

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self._invariant = batch_invariant

    def norm(
        self, stream: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """See ``Layers``."""
        return add_norm(stream, x, weight, eps, dtype)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Layers``."""
        return silu_and_multiply(x)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See ``Layers``."""
        return multiply(x, weight, bias) if self._invariant else F.linear(x, weight, bias)


class DeviceHead:
    """Implements ``HeadOps``: logits are added up, and kept, in float32.

    Args:
        communicator: to the other ranks.
        batch_invariant: as in `KernelLayers`.
    """

    def __init__(self, communicator: Communicator, *, batch_invariant: bool = False) -> None:
        self._communicator = communicator
        self._invariant = batch_invariant

    def head(self, hidden: torch.Tensor, head: Head) -> torch.Tensor:
        """See ``HeadOps``."""
        weight = dense(head.matrix).weight
        if self._invariant:
            logits = multiply(hidden, weight, None, torch.float32)
        elif hidden.is_cuda:
            logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        else:  # torch has no such product there
            logits = F.linear(hidden.to(torch.float32), weight.to(torch.float32))
        return self._communicator.gather_logits(logits, head.vocab) if head.partial else logits
