"""Records a model's operations, and gives the values between them places in one block of memory.

A value lives from the operation that makes it to the last one that reads it; values whose lives do not overlap share a
place.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tercet_shared.errors import InternalError
from tercet_worker.kernels.arena import Arena
from tercet_worker.kernels.step_abi import Epilogue, Op, OpKind
from tercet_worker.program.weights import PackedMatrix

if TYPE_CHECKING:
    from tercet_worker.layers.cut import Cut
    from tercet_worker.layers.embedding import Embedding, Head
    from tercet_worker.layers.linear import Linear
    from tercet_worker.layers.matrix import Matrix
    from tercet_worker.layers.norm import RMSNorm
    from tercet_worker.layers.rope import RotaryEmbedding
    from tercet_worker.models.ops import HeadShape

_PAGE = 4096
_LINE = 64


@dataclass(eq=False, slots=True)
class Value:
    """Activations ``[T, columns]`` in a recorded program."""

    columns: int
    dtype: torch.dtype

    @property
    def stride(self) -> int:
        """Bytes from row to row: whole cache lines, and not whole pages, which would all compete for the same ones."""
        size = -(-self.columns * self.dtype.itemsize // _LINE) * _LINE
        return size + _LINE if size % _PAGE == 0 else size


EXTERNAL = Value(0, torch.float32)
"""Stands for what the caller passes."""


@dataclass(slots=True)
class Record:
    """One operation: its constant fields, and the values that it reads and writes."""

    op: Op
    input: Value = EXTERNAL
    output: Value = EXTERNAL
    aux: Value | None = None
    name: str = ""
    weight_bytes: int = 0


class ExchangeKind(enum.Enum):
    """What ranks that compute a model together do between two operations."""

    EMBED = "add up the embedding rows of tokens that each rank holds"
    SUM = "add up a residual stream"
    RECEIVE = "take the residual stream from the stage before"
    SEND = "hand the residual stream to the next stage"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One of them."""

    kind: ExchangeKind
    after: int  # operations that come before
    value: Value
    embedding: Embedding | None = None  # of EMBED


@dataclass(slots=True)
class Recorder:
    """Implements ``Ops`` and ``HeadOps`` by taking note.

    Args:
        dtype: of the model.
        leads: whether partial products are added to the residual stream; in all ranks but one they take its place,
            and the sum of all streams is what is meant.
    """

    dtype: torch.dtype
    leads: bool = True
    records: list[Record] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    vocab: Cut | None = None  # of the output head
    tensors: list[torch.Tensor] = field(default_factory=list)  # whose addresses the records hold
    _angles: dict[int, Value] = field(default_factory=dict)

    def embed(self, embedding: Embedding) -> Value:
        """See ``Ops``."""
        matrix = _packed(embedding.matrix)
        stream = Value(matrix.in_features, torch.float32)
        op = Op(
            kind=OpKind.EMBED,
            in_features=matrix.columns,
            out_features=matrix.in_features,
            panels=matrix.panels,
            scalar=1.0,
            format=matrix.format,
            weight=self._address(matrix.memory),
        )
        self.records.append(Record(op, output=stream, name="embedding"))
        if embedding.partial:
            self._exchange(ExchangeKind.EMBED, stream, embedding)
        return stream

    def receive(self, hidden_size: int) -> Value:
        """See ``Ops``."""
        return self._exchange(ExchangeKind.RECEIVE, Value(hidden_size, torch.float32))

    def send(self, stream: Value) -> Value:
        """See ``Ops``."""
        return self._exchange(ExchangeKind.SEND, stream)

    def norm(self, stream: Value, norm: RMSNorm) -> Value:
        """See ``Ops``."""
        out = Value(stream.columns, self.dtype)
        op = Op(kind=OpKind.NORM, in_features=stream.columns, scalar=norm.eps, weight=self._address(norm.weight))
        self.records.append(Record(op, stream, out, name="norm"))
        return out

    def linear(self, x: Value, linear: Linear) -> Value:
        """See ``Ops``."""
        return self._product(x, linear.matrix, Epilogue.STORE, self.dtype)

    def gated_silu(self, x: Value, gate_up: Linear) -> Value:
        """See ``Ops``."""
        return self._product(x, gate_up.matrix, Epilogue.GATED_SILU, self.dtype)

    def add_linear(self, stream: Value, x: Value, linear: Linear) -> Value:
        """See ``Ops``."""
        epilogue = Epilogue.STORE_FLOAT if linear.partial and not self.leads else Epilogue.ADD
        self._product(x, linear.matrix, epilogue, torch.float32, into=stream)
        return self._exchange(ExchangeKind.SUM, stream) if linear.partial else stream

    def attention(self, layer: int, qkv: Value, heads: HeadShape, rope: RotaryEmbedding) -> Value:
        """See ``Ops``."""
        angles = self._angles.get(id(rope))
        if angles is None:
            angles = self._angles[id(rope)] = Value(2 * rope.half, torch.float32)
            op = Op(kind=OpKind.ANGLES, rotary_half=rope.half, weight=self._address(rope.inverse_frequencies))
            self.records.append(Record(op, output=angles, name="angles"))
        out = Value(heads.query * heads.size, self.dtype)
        op = Op(
            kind=OpKind.ATTENTION,
            layer=layer,
            query_heads=heads.query,
            kv_heads=heads.kv,
            head_size=heads.size,
            rotary_half=rope.half,
        )
        self.records.append(Record(op, qkv, out, angles, name="attention"))
        return out

    def head(self, hidden: Value, head: Head) -> Value:
        """See ``HeadOps``."""
        self.vocab = head.vocab
        return self._product(hidden, head.matrix, Epilogue.STORE_FLOAT, torch.float32, into=EXTERNAL)

    def place(self, rows: int, result: Value) -> Placed:
        """Gives every value so far a place for ``rows`` rows, and fills in the addresses.

        Args:
            rows: most rows of a step.
            result: the value that outlives the program.
        """
        last = {id(value): index for index, record in enumerate(self.records) for value in _values(record)}
        last[id(result)] = len(self.records)
        offsets: dict[int, int] = {}
        free: dict[int, list[int]] = {}  # by stride
        size = 0
        for index, record in enumerate(self.records):
            for value in _values(record):
                if id(value) not in offsets:
                    if free.get(value.stride):
                        offsets[id(value)] = free[value.stride].pop()
                    else:
                        offsets[id(value)] = size
                        size += -(-rows * value.stride // _PAGE) * _PAGE
            for value in {id(value): value for value in _values(record)}.values():
                if last[id(value)] == index:
                    free.setdefault(value.stride, []).append(offsets[id(value)])
        memory = Arena(size).memory
        base = memory.data_ptr()
        for record in self.records:
            if record.input is not EXTERNAL:
                record.op.input, record.op.in_stride = base + offsets[id(record.input)], record.input.stride
            if record.output is not EXTERNAL:
                record.op.output, record.op.out_stride = base + offsets[id(record.output)], record.output.stride
            if record.aux is not None:
                record.op.aux = base + offsets[id(record.aux)]
        return Placed(memory, rows, result, {value: offsets[id(value)] for value in (result, *self._exchanged())})

    def _exchanged(self) -> list[Value]:
        return [exchange.value for exchange in self.exchanges]

    def _exchange(self, kind: ExchangeKind, value: Value, embedding: Embedding | None = None) -> Value:
        self.exchanges.append(Exchange(kind, len(self.records), value, embedding))
        return value

    def _product(
        self, x: Value, weight: Matrix, epilogue: Epilogue, dtype: torch.dtype, *, into: Value | None = None
    ) -> Value:
        matrix = _packed(weight)
        out = Value(matrix.columns, dtype) if into is None else into
        op = Op(
            kind=OpKind.LINEAR,
            epilogue=epilogue,
            in_features=matrix.in_features,
            out_features=matrix.columns,
            panels=matrix.panels,
            format=matrix.format,
            weight=self._address(matrix.memory),
            aux=None if matrix.bias is None else self._address(matrix.bias),
        )
        name = f"linear {sum(matrix.out_features)} x {matrix.in_features}"
        self.records.append(Record(op, x, out, name=name, weight_bytes=matrix.nbytes))
        return out

    def _address(self, tensor: torch.Tensor) -> int:
        self.tensors.append(tensor)
        return tensor.data_ptr()


@dataclass(frozen=True, slots=True)
class Placed:
    """Memory of a program's values, and where some of them are."""

    memory: torch.Tensor  # uint8
    rows: int
    _result: Value
    _offsets: dict[Value, int]

    @property
    def result(self) -> torch.Tensor:
        """Returns the value that outlives the program, ``[rows, columns]``."""
        return self.lines(self._result)[:, : self._result.columns]

    def lines(self, value: Value) -> torch.Tensor:
        """Returns a value with what lies between its rows, contiguous."""
        start = self._offsets[value]
        return self.memory[start : start + self.rows * value.stride].view(value.dtype).view(self.rows, -1)


def _values(record: Record) -> list[Value]:
    return [value for value in (record.input, record.aux, record.output) if value is not None and value is not EXTERNAL]


def _packed(matrix: Matrix) -> PackedMatrix:
    if not isinstance(matrix, PackedMatrix):
        raise InternalError("a program reads packed weights")
    return matrix
