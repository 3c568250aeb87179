"""Rows of integers with a scale and perhaps a minimum per block: ``weight = scale * q + minimum``, exactly.

Legend: N rows, K columns, B columns of a block.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt


class WeightFormat(enum.IntEnum):
    """How weights lie in memory for the kernels; the values are those of ``csrc/quant_types.hpp``."""

    DENSE = 0
    FOUR = 1  # four bits, blocks of 32, float16 scales and minima
    FOUR_WIDE = 2  # the same with float32
    EIGHT = 3  # eight bits, blocks of 32, float16 scales
    EIGHT_WIDE = 4  # eight bits, blocks of 16, float32 scales and minima
    COMPACT = 5  # no blocks: bfloat16 in twelve bits, exactly; what dense weights may become once they are loaded

    @property
    def block(self) -> int:
        """Columns that share a scale."""
        return _SHAPES[self].block

    @property
    def four_bits(self) -> bool:
        """Whether the integers are 0 to 15; otherwise they are -128 to 127."""
        return _SHAPES[self].bits == 4

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """Of scales and minima."""
        return _SHAPES[self].scale

    @property
    def has_minimum(self) -> bool:
        """Whether blocks have a minimum."""
        return _SHAPES[self].minimum

    def nbytes(self, elements: int) -> int:
        """Returns the bytes of ``elements`` weights, whole blocks."""
        shape = _SHAPES[self]
        scales = shape.scale.itemsize * (2 if shape.minimum else 1)
        return elements * shape.bits // 8 + elements // shape.block * scales


@dataclass(frozen=True, slots=True)
class _Shape:
    bits: int
    block: int
    scale: np.dtype[Any]
    minimum: bool


_HALF, _SINGLE = np.dtype(np.float16), np.dtype(np.float32)
_SHAPES: Final = {
    WeightFormat.FOUR: _Shape(4, 32, _HALF, minimum=True),
    WeightFormat.FOUR_WIDE: _Shape(4, 32, _SINGLE, minimum=True),
    WeightFormat.EIGHT: _Shape(8, 32, _HALF, minimum=False),
    WeightFormat.EIGHT_WIDE: _Shape(8, 16, _SINGLE, minimum=True),
}


def common_format(formats: Iterable[WeightFormat]) -> WeightFormat:
    """Returns the narrowest format that holds the weights of all ``formats`` exactly."""
    wanted = set(formats)
    if WeightFormat.DENSE in wanted:
        return WeightFormat.DENSE
    if len(wanted) == 1:
        return wanted.pop()
    if wanted == {WeightFormat.FOUR, WeightFormat.FOUR_WIDE}:
        return WeightFormat.FOUR_WIDE
    return WeightFormat.EIGHT_WIDE


@dataclass(frozen=True, slots=True)
class Blocks:
    """Whole rows of a quantized matrix."""

    format: WeightFormat
    q: npt.NDArray[np.uint8]  # [N, K]; int8 seen as bytes where there are eight bits
    scales: npt.NDArray[Any]  # [N, K / B]
    minima: npt.NDArray[Any] | None  # [N, K / B]

    def columns(self, begin: int, end: int) -> Blocks:
        """Returns some columns of all rows, whole blocks of them."""
        block = self.format.block
        of_blocks = slice(begin // block, end // block)
        minima = None if self.minima is None else self.minima[:, of_blocks]
        return Blocks(self.format, self.q[:, begin:end], self.scales[:, of_blocks], minima)

    def dense(self) -> npt.NDArray[np.float32]:
        """Returns the weights, float32 ``[N, K]``."""
        block = self.format.block
        q = self.q if self.format.four_bits else self.q.view(np.int8)
        scaled = q.astype(np.float32) * np.repeat(self.scales.astype(np.float32), block, axis=1)
        return scaled if self.minima is None else scaled + np.repeat(self.minima.astype(np.float32), block, axis=1)

    def to(self, wanted: WeightFormat) -> Blocks:
        """Returns the same weights in a format that holds them exactly (`common_format`)."""
        if wanted is self.format:
            return self
        times = self.format.block // wanted.block
        scales = np.repeat(self.scales.astype(wanted.scale_dtype), times, axis=1)
        minima = np.zeros_like(scales) if self.minima is None else self.minima.astype(wanted.scale_dtype)
        if self.minima is not None:
            minima = np.repeat(minima, times, axis=1)
        return Blocks(wanted, self.q, scales, minima)
