"""In what dtype, where and in which layout a model is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tercet_worker.layers.destination import Destination, into
from tercet_worker.layers.fp8 import Fp8Matrix
from tercet_worker.layers.matrix import DenseMatrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tercet_worker.layers.fp8 import Fp8Choice
    from tercet_worker.layers.matrix import Matrix, MatrixFactory

__all__ = ["Destination", "Placement", "into"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model's tensors are made. On ``meta`` it takes no memory and knows its sizes.

    Attributes:
        dtype: of the model.
        device: of the model.
        packed: makes matrices in a layout of the kernels; None for dense ones.
        fp8: which linear layers have weights of eight bits; None for none.
    """

    dtype: torch.dtype
    device: torch.device
    packed: MatrixFactory | None = None
    fp8: Fp8Choice | None = None

    def matrix(
        self, in_features: int, out_features: Sequence[int], *, bias: bool = False, gated: bool = False
    ) -> Matrix:
        """Returns a matrix whose memory is not written to yet (and so not committed by the operating system)."""
        if self.packed is not None:
            return self.packed(in_features, out_features, bias=bias, gated=gated)
        return DenseMatrix(in_features, out_features, bias=bias, dtype=self.dtype, device=self.device)

    def linear(self, in_features: int, out_features: Sequence[int], *, bias: bool, gated: bool) -> Matrix:
        """Returns the matrix of a linear layer, as `matrix` does."""
        if self.fp8 is None:
            return self.matrix(in_features, out_features, bias=bias, gated=gated)
        return Fp8Matrix(in_features, out_features, bias=bias, dtype=self.dtype, device=self.device, choice=self.fp8)
