"""Where the tensors of a checkpoint go: the seam between what owns a tensor's layout, and the loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one tensor of a checkpoint goes.

    Attributes:
        shape: of the tensor as the checkpoint holds it.
        dtype: in which the layer keeps it.
        store: called with a first row and whole rows from there on, in any floating dtype, on the CPU; converts them to
            the layer's dtype, layout and device. Called until every row was stored once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    store: Callable[[int, torch.Tensor], None]

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes once stored."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size


def into(target: torch.Tensor) -> Destination:
    """Returns a destination that copies rows into ``target`` (a tensor or a view of one) as they are."""

    def store(start: int, rows: torch.Tensor) -> None:
        target[start : start + rows.shape[0]].copy_(rows)

    return Destination(tuple(target.shape), target.dtype, store)
