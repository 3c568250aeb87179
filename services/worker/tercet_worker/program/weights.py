"""Weights as the kernels read them: packed, in the order of a step, on huge pages. See ``csrc/linear_types.hpp``."""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from tercet_shared.errors import ConfigurationError, InternalError
from tercet_worker.kernels.arena import Arena
from tercet_worker.kernels.step_abi import PANEL
from tercet_worker.layers.destination import Destination, QuantizedDestination
from tercet_worker.quantization import Blocks, WeightFormat, common_format, quantize_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_worker.kernels.library import Isa, KernelLibrary

_CHUNK = 256 * 1024 * 1024
"""Address space that is taken at once; memory is taken when it is written to."""
_ALIGNMENT = 4096


class PackedMatrix:
    """A matrix in panels of 16 rows; implements ``Matrix``.

    It takes its memory when it is first needed, and by then it has been told what the checkpoint holds.

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
        self._weights = weights
        self._dtype = weights.dtype
        self._stored: dict[int, WeightFormat] = {}  # formats that hold what the checkpoint has, by part
        self._memory: torch.Tensor | None = None
        self._compact = False
        self.bias = torch.zeros(PANEL * self.panels, dtype=torch.float32) if bias else None

    @property
    def format(self) -> WeightFormat:
        """How the weights lie. All parts have one format: the narrowest that holds each of them exactly."""
        if self._compact:
            return WeightFormat.COMPACT
        quantization = self._weights.quantization
        if (
            quantization is Quantization.NONE
            or self._dtype != torch.bfloat16
            or len(self._stored) < len(self.out_features)
        ):
            return WeightFormat.DENSE
        formats = list(self._stored.values())
        if quantization is Quantization.INT8:
            formats = [WeightFormat.EIGHT if found is WeightFormat.DENSE else found for found in formats]
        found = common_format(formats)
        return found if found is WeightFormat.DENSE or self.in_features % found.block == 0 else WeightFormat.DENSE

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        if self._compact:
            return len(self.memory)
        if self.format is not WeightFormat.DENSE:
            return self.format.nbytes(self.panels * PANEL * self.in_features)
        per_step = 4 // self._dtype.itemsize
        return self.panels * -(-self.in_features // per_step) * 64

    @property
    def memory(self) -> torch.Tensor:
        """The packed weights, uint8; zero where nothing was stored."""
        if self._memory is None:
            self._memory = self._weights.take(self, self.nbytes)
        return self._memory

    def compact(self, chunk: torch.Tensor, begin: int) -> int:
        """Moves the weights, and makes them compact if they can be; nothing is stored in the matrix any more.

        Args:
            chunk: the memory that they lie in.
            begin: where they shall begin, not behind where they do.

        Returns:
            Where they end.

        Raises:
            ConfigurationError: there is no memory for what is on its way.
        """
        source, target = self.memory.data_ptr(), chunk.data_ptr() + begin
        nbytes = 0
        if self.format is WeightFormat.DENSE:
            nbytes = self._weights.library.cdll.tercet_weights_compact(source, self.in_features, self.panels, target)
            if nbytes < 0:
                raise ConfigurationError("there is no memory to make weights compact")
        self._compact = nbytes > 0
        if not nbytes:
            nbytes = len(self.memory)
            ctypes.memmove(target, source, nbytes)
        self._memory = chunk[begin : begin + nbytes]
        return begin + nbytes

    def weight_destination(self, part: int) -> Destination:
        """See ``Matrix``."""
        shape = (self.out_features[part], self.in_features)
        quantized = QuantizedDestination(
            announce=lambda found: self._announce(part, found),
            nbytes=lambda: self.nbytes * shape[0] // sum(self.out_features),
            takes_blocks=lambda: WeightFormat.DENSE not in (self.format, self._stored.get(part, WeightFormat.DENSE)),
            store=lambda start, blocks: self._store_blocks(part, start, blocks),
        )
        return Destination(shape, self._dtype, lambda start, rows: self._store_dense(part, start, rows), quantized)

    def _announce(self, part: int, found: WeightFormat) -> None:
        if self._memory is not None:
            raise InternalError("a matrix was told what it will hold after it took its memory")
        self._stored[part] = found

    def _store_dense(self, part: int, start: int, rows: torch.Tensor) -> None:
        if self.format is not WeightFormat.DENSE:
            return self._store_blocks(part, start, quantize_rows(rows.to(torch.float32).contiguous().numpy()))
        base, pitch, offset = self._place(part)
        source = rows.to(self._dtype).contiguous()
        self._weights.library.cdll.tercet_weights_pack(
            0 if self._dtype == torch.float32 else 1,
            self.memory.data_ptr(),
            self.in_features,
            self.panels,
            base,
            pitch,
            offset + start,
            len(source),
            source.data_ptr(),
        )
        return None

    def _store_blocks(self, part: int, start: int, blocks: Blocks) -> None:
        base, pitch, offset = self._place(part)
        blocks = blocks.to(self.format)
        q, scales = np.ascontiguousarray(blocks.q), np.ascontiguousarray(blocks.scales)
        minima = None if blocks.minima is None else np.ascontiguousarray(blocks.minima)
        self._weights.library.cdll.tercet_weights_pack_quant(
            int(self.format),
            self.memory.data_ptr(),
            self.in_features,
            self.panels,
            base,
            pitch,
            offset + start,
            len(q),
            q.ctypes.data,
            scales.ctypes.data,
            None if minima is None else minima.ctypes.data,
        )

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


class Quantization(enum.Enum):
    """What becomes of weights: kept as the checkpoint has them, made dense, or made eight bits where they are dense."""

    AUTO = "auto"
    NONE = "none"
    INT8 = "int8"


class PackedWeights:
    """Memory of all packed matrices of a model; makes them (``MatrixFactory``).

    Args:
        library: the loaded kernels.
        dtype: float32 or bfloat16. With float32 all weights are dense.
        quantization: what becomes of weights.
    """

    def __init__(
        self, library: KernelLibrary, dtype: torch.dtype, quantization: Quantization = Quantization.AUTO
    ) -> None:
        self.library = library
        self.dtype = dtype
        self.quantization = quantization
        self.matrices: list[PackedMatrix] = []
        self._chunks: list[_Chunk] = []

    def __call__(self, in_features: int, out_features: Sequence[int], *, bias: bool, gated: bool) -> PackedMatrix:
        """See ``MatrixFactory``."""
        matrix = PackedMatrix(in_features, out_features, bias=bias, gated=gated, weights=self)
        self.matrices.append(matrix)
        return matrix

    def allocate(self) -> None:
        """Takes the memory of all matrices, in the order in which a step reads them.

        Raises:
            ConfigurationError: there is none.
        """
        for matrix in self.matrices:
            _ = matrix.memory

    def compact(self, isa: Isa) -> None:
        """Keeps dense bfloat16 weights in three quarters of their bytes, to the bit, where ``isa`` reads that.

        It is done in place, and gives the memory back. Weights are loaded by then, and no address of theirs was taken.
        Matrices that take their memory later stay dense.

        Raises:
            ConfigurationError: there is no memory for what is on its way.
        """
        if self.dtype != torch.bfloat16 or not self.library.cdll.tercet_weights_compacts(int(isa)):
            return
        for chunk in self._chunks:
            end = 0
            for matrix in chunk.matrices:
                end = matrix.compact(chunk.arena.memory, _aligned(end))
            chunk.arena.give_back(end)
        # What is taken from now on must be zero, as what lies behind these is not.
        self._chunks.clear()

    def take(self, matrix: PackedMatrix, nbytes: int) -> torch.Tensor:
        """Returns zeroed uint8 memory, behind what was taken before. Raises ConfigurationError where there is none."""
        if not self._chunks or _aligned(self._chunks[-1].used) + nbytes > self._chunks[-1].arena.nbytes:
            size = max(nbytes, _CHUNK)
            try:
                self._chunks.append(_Chunk(Arena(size)))
            except OSError as error:
                raise ConfigurationError(f"{size} bytes for weights cannot be had: {error}") from error
        chunk = self._chunks[-1]
        start = _aligned(chunk.used)
        chunk.used = start + nbytes
        chunk.matrices.append(matrix)
        return chunk.arena.memory[start : chunk.used]


@dataclass(eq=False, slots=True)
class _Chunk:
    arena: Arena
    used: int = 0
    matrices: list[PackedMatrix] = field(default_factory=list)  # in the order in which they lie


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT
