"""Matrices of weights. Models name them; how one lies in memory is known here and in ``program/weights.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from tercet_shared.errors import InternalError
from tercet_worker.layers.destination import Destination, into

if TYPE_CHECKING:
    from collections.abc import Sequence


class Matrix(Protocol):
    """``[sum of out_features, in_features]`` and perhaps a bias: parts of a checkpoint, one above the other."""

    @property
    def in_features(self) -> int:
        """Columns."""
        ...

    @property
    def out_features(self) -> tuple[int, ...]:
        """Rows of each part."""
        ...

    def weight_destination(self, part: int) -> Destination:
        """Returns where the weight of one part goes."""
        ...

    def bias_destination(self, part: int) -> Destination | None:
        """Returns where the bias of one part goes, or None where the matrix has none."""
        ...


class MatrixFactory(Protocol):
    """Makes matrices in one layout, in the order in which a step reads them."""

    def __call__(self, in_features: int, out_features: Sequence[int], *, bias: bool, gated: bool) -> Matrix:
        """Returns a matrix without contents.

        Args:
            in_features: columns.
            out_features: rows of each part.
            bias: whether there is a bias.
            gated: whether the two parts are the gate and the input of a gated activation, and used for nothing else.
        """
        ...

    def allocate(self) -> None:
        """Takes the memory of all matrices made so far; what the checkpoint holds has been announced to them."""
        ...


class DenseMatrix:
    """As torch likes it: row by row.

    Args:
        in_features: columns.
        out_features: rows of each part.
        bias: whether there is a bias.
        dtype: of the weight and the bias.
        device: where they are.
    """

    def __init__(
        self, in_features: int, out_features: Sequence[int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.in_features = in_features
        self.out_features = tuple(out_features)
        rows = sum(out_features)
        self.weight = torch.empty((rows, in_features), dtype=dtype, device=device)  # [out, in]
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None  # [out]

    def weight_destination(self, part: int) -> Destination:
        """See `Matrix`."""
        return into(self.weight[self._rows(part)])

    def bias_destination(self, part: int) -> Destination | None:
        """See `Matrix`."""
        return None if self.bias is None else into(self.bias[self._rows(part)])

    def _rows(self, part: int) -> slice:
        start = sum(self.out_features[:part])
        return slice(start, start + self.out_features[part])


def dense(matrix: Matrix) -> DenseMatrix:
    """Returns ``matrix`` for use by torch. Raises InternalError where it is packed for the kernels."""
    if not isinstance(matrix, DenseMatrix):
        raise InternalError("a matrix that is packed for the kernels was used by torch")
    return matrix
