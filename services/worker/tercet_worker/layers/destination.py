"""Where the tensors of a checkpoint go: the seam between what owns a tensor's layout, and the loader."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tercet_worker.quantization import WeightFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tercet_worker.layers.cut import Cut
    from tercet_worker.quantization import Blocks


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one tensor of a checkpoint goes.

    Attributes:
        shape: of the tensor as the checkpoint holds it.
        dtype: in which the layer keeps it.
        store: called with a first row and whole rows from there on, in any floating dtype, on the CPU; converts them to
            the layer's dtype, layout and device. Called until every row was stored once. Rows and columns are those
            of the cuts.
        quantized: where the layer may keep weights as they are quantized; None where it keeps them dense.
        cuts: what the layer keeps of each dimension; nothing where it keeps all.
        fp8: where the layer may keep weights of E4M3; None where it keeps none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    store: Callable[[int, torch.Tensor], None]
    quantized: QuantizedDestination | None = None
    cuts: tuple[Cut, ...] = ()
    fp8: Fp8Destination | None = None

    def cut(self, *cuts: Cut) -> Destination:
        """Returns this destination for a part of a larger tensor, of which it is as large as ``cuts`` say."""
        quantized = self.quantized
        if quantized is not None and cuts[-1].partial:
            quantized = _cut_columns(quantized, cuts[-1])
        return replace(self, shape=tuple(cut.whole for cut in cuts), cuts=cuts, quantized=quantized)

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape of what is kept."""
        return tuple(len(cut) for cut in self.cuts) if self.cuts else self.shape

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes once stored."""
        if self.quantized is not None:
            return self.quantized.nbytes()
        if self.fp8 is not None:
            return self.fp8.nbytes()
        size = self.dtype.itemsize
        for extent in self.extents:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class QuantizedDestination:
    """Where a quantized tensor goes. `announce` comes before anything is stored, for all tensors of the model.

    Attributes:
        announce: told the format that holds the checkpoint's tensor exactly, DENSE where it is not quantized.
        nbytes: returns the bytes that the tensor takes, once it was announced.
        takes_blocks: returns whether rows are to be stored as blocks, by ``store``; otherwise dense, as everywhere.
        store: as `Destination.store`, for rows in blocks of any format.
    """

    announce: Callable[[WeightFormat], None]
    nbytes: Callable[[], int]
    takes_blocks: Callable[[], bool]
    store: Callable[[int, Blocks], None]


@dataclass(frozen=True, slots=True)
class Fp8Destination:
    """Where weights of E4M3 go, with a scale for each row. `announce` comes before anything is stored.

    Attributes:
        announce: told whether the checkpoint's tensor is such.
        nbytes: returns the bytes that the tensor takes, once it was announced.
        takes: returns whether the layer keeps such weights; it makes them of dense rows that are stored, too.
        store: called with a first row, whole rows as E4M3 ``[n, k]`` and their float32 scales ``[n]`` or ``[n, 1]``.
    """

    announce: Callable[[bool], None]
    nbytes: Callable[[], int]
    takes: Callable[[], bool]
    store: Callable[[int, torch.Tensor, torch.Tensor], None]


def _cut_columns(quantized: QuantizedDestination, columns: Cut) -> QuantizedDestination:
    """Returns the same for blocks of which only some are kept; where a block would be cut in two, it comes dense."""

    def announce(found: WeightFormat) -> None:
        whole = found is WeightFormat.DENSE or columns.begin % found.block == columns.end % found.block == 0
        quantized.announce(found if whole else WeightFormat.DENSE)

    return replace(quantized, announce=announce)


def into(target: torch.Tensor) -> Destination:
    """Returns a destination that copies rows into ``target`` (a tensor or a view of one) as they are."""

    def store(start: int, rows: torch.Tensor) -> None:
        target[start : start + rows.shape[0]].copy_(rows)

    return Destination(tuple(target.shape), target.dtype, store)
