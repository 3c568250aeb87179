"""Where the tensors of a checkpoint go: the seam between what owns a tensor's layout, and the loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tercet_worker.quantization import Blocks


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one tensor of a checkpoint goes.

    Attributes:
        shape: of the tensor as the checkpoint holds it.
        dtype: in which the layer keeps it.
        store: called with a first row and whole rows from there on, in any floating dtype, on the CPU; converts them to
            the layer's dtype, layout and device. Called until every row was stored once.
        quantized: where the layer may keep weights as they are quantized; None where it keeps them dense.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    store: Callable[[int, torch.Tensor], None]
    quantized: QuantizedDestination | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes once stored."""
        if self.quantized is not None:
            return self.quantized.nbytes()
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class QuantizedDestination:
    """Where a quantized tensor goes. `announce` comes before anything is stored, for all tensors of the model.

    Attributes:
        announce: told the checkpoint's name of the tensor's type.
        nbytes: returns the bytes that the tensor takes, once it was announced.
        takes_blocks: returns whether rows are to be stored as blocks, by ``store``; otherwise dense, as everywhere.
        store: as `Destination.store`, for rows in blocks of any format.
    """

    announce: Callable[[str], None]
    nbytes: Callable[[], int]
    takes_blocks: Callable[[], bool]
    store: Callable[[int, Blocks], None]


def into(target: torch.Tensor) -> Destination:
    """Returns a destination that copies rows into ``target`` (a tensor or a view of one) as they are."""

    def store(start: int, rows: torch.Tensor) -> None:
        target[start : start + rows.shape[0]].copy_(rows)

    return Destination(tuple(target.shape), target.dtype, store)
