"""Weights that several tensors of a checkpoint stand for, some rows and columns at a time: as blocks, or dense.

How the tensors lie is in `tercet_shared.checkpoint.packed`. Whatever the layout, integers become ``q [n, k]`` from 0
on, with a scale and a zero for each row and group of columns: ``weight = scale * (q - zero)``. As blocks they are
``scale * q + minimum`` with ``minimum = -scale * zero``. A scale of 11 bits (float16 has those, bfloat16 8) times a
zero of 4 or 8 bits is exact in float32, and so is the sum: such blocks hold the very weights. Where even float16 holds
scale and minimum, as it does where the zero is the middle of the range, narrow blocks do. With float32 scales the
minimum is rounded to float32, as dense weights are.

Legend: N rows and K columns of the weight, n and k of those that are read, G groups.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from tercet_shared.checkpoint import Layout, TensorEntry, read_stored, to_float32
from tercet_shared.errors import CheckpointError, InternalError, bounded
from tercet_worker.quantization.blocks import Blocks, WeightFormat

if TYPE_CHECKING:
    import numpy.typing as npt

    from tercet_shared.checkpoint import PackedWeight

    Bytes = npt.NDArray[np.uint8]
    Floats = npt.NDArray[np.float32]

_FORMATS: Final = {
    4: (WeightFormat.FOUR, WeightFormat.FOUR_WIDE),
    8: (WeightFormat.EIGHT, WeightFormat.EIGHT_WIDE),
}
"""What holds integers of so many bits, the narrowest first."""
_MIDDLE: Final = 128
"""What 8 bits of blocks are less than those from 0 on."""
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight numbers the four bits of AWQ's words are, from the lowest on."""
_E4M3: Final = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()
"""What each byte is."""


class PackedRows(Protocol):
    """One weight ``[N, K]``."""

    @property
    def format(self) -> WeightFormat:
        """The narrowest format that holds it; DENSE where none does."""
        ...

    def dense(self, rows: slice, columns: slice) -> Floats:
        """Returns a part, float32 ``[n, k]``."""
        ...

    def blocks(self, rows: slice, columns: slice) -> Blocks:
        """Returns a part in `format`, which is not DENSE; columns begin and end between blocks."""
        ...

    def fp8(self, rows: slice, columns: slice) -> tuple[Bytes, Floats]:
        """Returns E4M3 ``[n, k]`` and the scales of their rows ``[n]``, where `is_row_scaled`."""
        ...


def open_packed(entry: TensorEntry) -> PackedRows:
    """Returns the weight of an entry with `TensorEntry.packed`. Its scales, zeros and groups are read at once.

    Raises:
        CheckpointError: what they hold cannot be; the sentence names the tensor.
    """
    packed = entry.packed
    if packed is None:
        raise InternalError(f"the tensor {entry.name} is not packed")
    rows, columns = entry.shape
    if packed.shape is not None and read_stored(packed.shape).tolist() != [rows, columns]:
        stated = read_stored(packed.shape).tolist()
        raise CheckpointError(
            f"The tensor {bounded(packed.shape.name, 200)!r} says {stated}, and {bounded(packed.numbers.name, 200)!r} "
            f"holds {[rows, columns]}."
        )
    if packed.scheme.layout is Layout.FLOAT:
        return _FloatRows(packed)
    return _IntegerRows(packed, rows, columns)


def is_fp8(entry: TensorEntry) -> bool:
    """Says whether a weight is floats of eight bits."""
    return entry.packed is not None and entry.packed.scheme.layout is Layout.FLOAT


def is_row_scaled(entry: TensorEntry) -> bool:
    """Says whether such a weight has one scale for each row, or for all."""
    return entry.packed is not None and is_fp8(entry) and entry.packed.scheme.block is None


class _FloatRows:
    """Floats of eight bits, with scales for blocks, rows, or all."""

    format = WeightFormat.DENSE

    def __init__(self, packed: PackedWeight) -> None:
        self._numbers = read_stored(packed.numbers)
        scales = _scales(packed.scales)
        rows, columns = self._numbers.shape
        self._scales = scales if scales.ndim == 2 else scales.reshape(-1, 1)
        height, width = packed.scheme.block or (1 if len(self._scales) > 1 else rows, columns)
        self._block = height, width

    def dense(self, rows: slice, columns: slice) -> Floats:
        """See `PackedRows`."""
        values: Floats = np.take(_E4M3, self._numbers[rows, columns])
        height, width = self._block
        run = math.gcd(columns.start, columns.stop, width)  # columns that all have one scale
        down, across = np.arange(rows.start, rows.stop) // height, np.arange(columns.start, columns.stop, run) // width
        in_runs = values.reshape(len(values), -1, run)
        in_runs *= self._scales[down][:, across, None]
        return values

    def blocks(self, rows: slice, columns: slice) -> Blocks:  # noqa: ARG002  # there are none
        """See `PackedRows`."""
        raise InternalError("floats of eight bits were asked for as blocks of integers")

    def fp8(self, rows: slice, columns: slice) -> tuple[Bytes, Floats]:
        """See `PackedRows`."""
        down = np.arange(rows.start, rows.stop) // self._block[0]
        return np.array(self._numbers[rows, columns]), self._scales[down, 0]


class _IntegerRows:
    """Integers in groups."""

    def __init__(self, packed: PackedWeight, rows: int, columns: int) -> None:
        self._layout, self._bits = packed.scheme.layout, packed.scheme.bits
        self._numbers = read_stored(packed.numbers)
        scales = _scales(packed.scales)
        if self._layout in (Layout.AWQ, Layout.GPTQ):
            scales = scales.T
        scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
        count = scales.shape[1]
        self._scales: Floats = np.broadcast_to(scales, (rows, count))  # [N, G]
        zeros = self._read_zeros(packed, rows).astype(np.float32)
        self._zeros: Floats = np.broadcast_to(zeros, (rows, count))  # [N, G]
        width = columns if packed.scheme.block is None else packed.scheme.block[1]
        self._groups = np.arange(columns) // width if packed.groups is None else _groups(packed.groups, count)
        self.format = next((found for found in _FORMATS[self._bits] if self._holds(found)), WeightFormat.DENSE)

    def dense(self, rows: slice, columns: slice) -> Floats:
        """See `PackedRows`."""
        block = 1 if self.format is WeightFormat.DENSE else self.format.block
        block = block if columns.start % block == columns.stop % block == 0 else 1
        groups = self._groups[columns][::block]
        values = self._integers(rows, columns).astype(np.float32)
        in_blocks = values.reshape(len(values), -1, block)
        in_blocks -= np.take(self._zeros[rows], groups, axis=1)[..., None]
        in_blocks *= np.take(self._scales[rows], groups, axis=1)[..., None]
        return values

    def blocks(self, rows: slice, columns: slice) -> Blocks:
        """See `PackedRows`."""
        groups = self._groups[columns][:: self.format.block]
        q, scales = self._integers(rows, columns), self._scales[rows][:, groups]
        if not self.format.four_bits:
            q ^= _MIDDLE  # as signed bytes: less 128
        minima = self._minima(rows)[:, groups].astype(self.format.scale_dtype) if self.format.has_minimum else None
        return Blocks(self.format, q, scales.astype(self.format.scale_dtype), minima)

    def fp8(self, rows: slice, columns: slice) -> tuple[Bytes, Floats]:  # noqa: ARG002  # there are none
        """See `PackedRows`."""
        raise InternalError("integers were asked for as floats of eight bits")

    def _minima(self, rows: slice) -> Floats:
        base = np.float32(0 if self._bits == 4 else _MIDDLE)
        minima: Floats = (base - self._zeros[rows]) * self._scales[rows]
        return minima

    def _holds(self, wanted: WeightFormat) -> bool:
        if len(self._groups) % wanted.block:
            return False
        of_blocks = self._groups.reshape(-1, wanted.block)
        if (of_blocks != of_blocks[:, :1]).any():
            return False
        minima = self._minima(slice(None))
        if not wanted.has_minimum and minima.any():
            return False
        return wanted.scale_dtype.itemsize == 4 or (_is_half(self._scales) and _is_half(minima))

    def _integers(self, rows: slice, columns: slice) -> Bytes:
        """Returns q ``[n, k]``, a copy."""
        stored, per = self._numbers, 32 // self._bits
        if self._layout is Layout.PLAIN:
            return stored[rows, columns].view(np.uint8) ^ np.uint8(_MIDDLE)
        if self._layout is Layout.AWQ:
            words, part = _words(rows, per)
            return _unpack_rows(stored[columns, words].T)[part]
        words, part = _words(columns, per)
        taken = stored[words, rows].T if self._layout is Layout.GPTQ else stored[rows, words]
        return np.ascontiguousarray(_unpack(taken, self._bits)[:, part])

    def _read_zeros(self, packed: PackedWeight, rows: int) -> npt.NDArray[Any]:
        """Returns zeros of integers from 0 on, ``[N, G]`` or something that becomes that."""
        middle = 1 << (self._bits - 1)
        if packed.zeros is None:
            return np.array([[middle]], np.int32)
        stored = read_stored(packed.zeros)
        if packed.zeros.dtype == "I8":
            signed = stored.astype(np.int32) + middle
            return signed if signed.ndim == 2 else signed.reshape(-1, 1)
        if self._layout is Layout.PACKED:
            return _unpack(stored.T, self._bits)[:, :rows].T
        if self._layout is Layout.AWQ:
            return _unpack_rows(stored.T)
        # The ones that GPTQ's first version has less were taken from whole words, and borrowed between their numbers.
        ones = sum(1 << place for place in range(0, 32, self._bits))
        stored = stored.view(np.uint32) + np.uint32(ones * packed.scheme.zero_offset)
        return _unpack(stored, self._bits)[:, :rows].T


def _scales(entry: TensorEntry) -> Floats:
    scales: Floats = np.asarray(to_float32(read_stored(entry), entry))
    if not np.isfinite(scales).all():
        raise CheckpointError(f"The tensor {bounded(entry.name, 200)!r} holds scales that are not finite.")
    return scales


def _groups(entry: TensorEntry, count: int) -> npt.NDArray[np.int64]:
    groups = read_stored(entry).astype(np.int64)
    if groups.min() < 0 or groups.max() >= count:
        raise CheckpointError(f"The tensor {bounded(entry.name, 200)!r} names groups that are not among {count}.")
    return groups


def _is_half(values: Floats) -> bool:
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16) == values).all())


def _words(part: slice, per: int) -> tuple[slice, slice]:
    """Returns the words that hold a run of numbers, and where in them it is."""
    first = part.start // per
    return slice(first, -(-part.stop // per)), slice(part.start - first * per, part.stop - first * per)


def _unpack(words: npt.NDArray[Any], bits: int) -> Bytes:
    """Returns the numbers of ``[r, w]`` words one behind the other, a copy: ``[r, 32 / bits * w]``."""
    found = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return found.copy()
    numbers = np.empty((*found.shape, 2), np.uint8)
    np.bitwise_and(found, 0xF, out=numbers[..., 0])
    np.right_shift(found, 4, out=numbers[..., 1])
    return numbers.reshape(len(found), -1)


def _unpack_rows(words: npt.NDArray[Any]) -> Bytes:
    """Returns the numbers of AWQ's ``[r, w]`` words one above the other, a copy: ``[8 r, w]``."""
    found = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    numbers = np.empty((len(words), 8, words.shape[1]), np.uint8)
    for byte in range(4):
        np.bitwise_and(found[..., byte], 0xF, out=numbers[:, _AWQ_ORDER[2 * byte]])
        np.right_shift(found[..., byte], 4, out=numbers[:, _AWQ_ORDER[2 * byte + 1]])
    return numbers.reshape(-1, words.shape[1])
