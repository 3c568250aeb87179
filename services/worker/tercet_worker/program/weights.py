"""Weights as the kernels read them: packed, in the order of a step, on huge pages. See ``csrc/linear_types.hpp``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tercet_shared.errors import ConfigurationError
from tercet_worker.kernels.arena import Arena
from tercet_worker.kernels.step_abi import PANEL
from tercet_worker.layers.destination import Destination

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_worker.kernels.library import KernelLibrary

_CHUNK = 256 * 1024 * 1024
"""Address space that is taken at once; memory is taken when it is written to."""
_ALIGNMENT = 4096


class PackedMatrix:
    """A matrix in panels of 16 rows; implements ``Matrix``.

    Args:
        in_features: columns.
        out_features: rows of each part.
        bias: whether there is a bias; it is kept in float32, in the order of the panels.
        gated: two parts whose panels take turns, so that a tile has both sides of a gated activation.
        weights: where the memory comes from.
    """

    def __init__(
        self, in_features: int, out_features: Sequence[int], *, bias: bool, gated: bool, weights: PackedWeights
    ) -> None:
        self.in_features = in_features
        self.out_features = tuple(out_features)
        self.gated = gated
        if gated and (len(out_features) != 2 or out_features[0] != out_features[1]):
            raise ConfigurationError(f"a gated matrix has two equal parts, not {list(out_features)}")
        rows = out_features[0] if gated else sum(out_features)
        self.panels = -(-rows // PANEL) * (2 if gated else 1)
        self.columns = rows
        """Columns of the product: half the rows where the matrix is gated."""
        self._library = weights.library
        self._dtype = weights.dtype
        per_step = 4 // weights.dtype.itemsize
        self.memory = weights.take(self.panels * -(-in_features // per_step) * 64)  # uint8
        self.bias = torch.zeros(PANEL * self.panels, dtype=torch.float32) if bias else None

    def weight_destination(self, part: int) -> Destination:
        """See ``Matrix``."""
        base, pitch, offset = self._place(part)
        pack = self._library.cdll.tercet_weights_pack

        def store(start: int, rows: torch.Tensor) -> None:
            source = rows.to(self._dtype).contiguous()
            dtype = 0 if self._dtype == torch.float32 else 1
            pack(
                dtype,
                self.memory.data_ptr(),
                self.in_features,
                self.panels,
                base,
                pitch,
                offset + start,
                len(source),
                source.data_ptr(),
            )

        return Destination((self.out_features[part], self.in_features), self._dtype, store)

    def bias_destination(self, part: int) -> Destination | None:
        """See ``Matrix``."""
        if self.bias is None:
            return None
        target = self.bias
        base, pitch, offset = self._place(part)

        def store(start: int, rows: torch.Tensor) -> None:
            row = torch.arange(offset + start, offset + start + len(rows))
            target[(base + row // PANEL * pitch) * PANEL + row % PANEL] = rows.to(torch.float32)

        return Destination((self.out_features[part],), torch.float32, store)

    def _place(self, part: int) -> tuple[int, int, int]:
        """Returns first panel, distance of panels, and first row of a part."""
        return (part, 2, 0) if self.gated else (0, 1, sum(self.out_features[:part]))


class PackedWeights:
    """Memory of all packed matrices of a model; makes them (``MatrixFactory``).

    Args:
        library: the loaded kernels.
        dtype: float32 or bfloat16.
    """

    def __init__(self, library: KernelLibrary, dtype: torch.dtype) -> None:
        self.library = library
        self.dtype = dtype
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def __call__(self, in_features: int, out_features: Sequence[int], *, bias: bool, gated: bool) -> PackedMatrix:
        """See ``MatrixFactory``."""
        return PackedMatrix(in_features, out_features, bias=bias, gated=gated, weights=self)

    def take(self, nbytes: int) -> torch.Tensor:
        """Returns zeroed uint8 memory, behind what was taken before. Raises ConfigurationError where there is none."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > len(self._chunk):
            size = max(nbytes, _CHUNK)
            try:
                self._chunk = Arena(size).memory
            except OSError as error:
                raise ConfigurationError(f"{size} bytes for weights cannot be had: {error}") from error
            start = 0
        self._used = start + nbytes
        return self._chunk[start : self._used]
