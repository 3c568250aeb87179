"""A model's step, recorded once: what is computed between two points where other things happen.

A model is written as operations (``models/ops.py``). Here they are not executed but noted, and cut into steps:
`Compute` for what torch or our kernels do alone, and one step for each thing that needs more than the values at hand:
attention, the other ranks, the cache. What lies between two attention calls is a `Segment`.

Values are numbers. The residual stream, queries, and what attention returns lie in memory that is there for good, so
that a graph finds them at the same place each time; all others are gone with their segment.

Legend: T tokens of the step, H hidden size, Hq query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from tercet_shared.errors import InternalError
from tercet_worker.layers.fp8 import Fp8Matrix, Fp8Weights
from tercet_worker.layers.matrix import dense

if TYPE_CHECKING:
    from tercet_worker.layers.embedding import Embedding
    from tercet_worker.layers.linear import Linear
    from tercet_worker.layers.norm import RMSNorm
    from tercet_worker.layers.rope import RotaryEmbedding
    from tercet_worker.models.interface import CausalLM
    from tercet_worker.models.ops import HeadShape


class Op(enum.Enum):
    """What a `Compute` is made of. Arguments are places of values and of tensors in the step's lists."""

    EMBED = "embed"  # out: stream. tensors: weight
    NORM = "norm"  # inputs: stream. tensors: weight
    LINEAR = "linear"  # inputs: x. tensors: weight, bias?
    LINEAR_FP8 = "linear of eight bits"  # inputs: x. tensors: weight, scales, one, bias?
    GATED = "gated"  # inputs: x
    ADD = "add"  # inputs: stream, x; out is the stream
    REPLACE = "replace"  # inputs: stream, x; out is the stream, which x takes the place of


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation. Hashable: two computations with the same instructions are the same function."""

    op: Op
    out: int
    inputs: tuple[int, ...] = ()
    tensors: tuple[int, ...] = ()
    number: float = 0.0  # of a norm: eps
    begin: int = 0  # of an embedding: its first row of the vocabulary
    outputs: int = 0  # of a product of eight bits: rows of the weight, without padding
    row_scaled: bool = False  # of the same: as in ``Fp8Choice``


@dataclass(slots=True)
class Compute:
    """Instructions in order, and the tensors that they refer to."""

    instructions: list[Instruction] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    streams: set[int] = field(default_factory=set)  # values that are in the residual stream
    attended: int | None = None  # value that attention has returned
    result: int | None = None  # value that is used after this step

    @property
    def structure(self) -> tuple[object, ...]:
        """Returns what makes it the function that it is, whatever the weights are."""
        shapes = tuple(tuple(tensor.shape) for tensor in self.tensors)
        return (tuple(self.instructions), shapes, frozenset(self.streams), self.attended, self.result)


@dataclass(frozen=True, slots=True)
class Rotate:
    """Rotates queries and keys of the last `Compute`'s result, and writes keys and values to the cache."""

    layer: int
    heads: HeadShape
    rope: RotaryEmbedding


@dataclass(frozen=True, slots=True)
class Attend:
    """Attends for one layer. It stands between two segments."""

    layer: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Adds up the residual stream over the ranks of the stage."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Takes the residual stream from the stage before."""


@dataclass(frozen=True, slots=True)
class Send:
    """Hands the residual stream to the next stage."""


Step = Compute | Rotate | Reduce


@dataclass(slots=True)
class Segment:
    """Steps between two attention calls: what a graph can hold."""

    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True)
class Program:
    """A whole step: segments, with an attention call between each two."""

    parts: list[Segment | Attend | Receive | Send]
    hidden_size: int
    hidden_dtype: torch.dtype  # of what the last step returns
    query_width: int  # largest Hq · D
    ropes: list[RotaryEmbedding]
    leads: bool


class Recorder:
    """Implements ``Ops`` by noting what is asked for.

    Args:
        leads: whether this rank adds its share of a sum to the residual stream, rather than to put it in its place.
    """

    def __init__(self, *, leads: bool) -> None:
        self._leads = leads
        self._parts: list[Segment | Attend | Receive | Send] = []
        self._compute: Compute | None = None
        self._next = 0
        self._streams: set[int] = set()
        self._attended: int | None = None
        self._ropes: list[RotaryEmbedding] = []
        self._hidden_size = 0
        self._query_width = 0

    def embed(self, embedding: Embedding) -> int:
        """See ``Ops``."""
        weight = dense(embedding.matrix).weight
        self._hidden_size = weight.shape[1]
        out = self._stream()
        begin = embedding.vocab.begin if embedding.partial else -1
        self._note(Op.EMBED, out, tensors=(weight,), begin=begin)
        if embedding.partial:
            self._reduce()
        return out

    def receive(self, hidden_size: int) -> int:
        """See ``Ops``."""
        self._hidden_size = hidden_size
        self._parts.append(Receive())
        return self._stream()

    def send(self, stream: int) -> int:
        """See ``Ops``."""
        self._end()
        self._parts.append(Send())
        return stream

    def norm(self, stream: int, norm: RMSNorm) -> int:
        """See ``Ops``."""
        return self._note(Op.NORM, self._value(), (stream,), (norm.weight,), number=norm.eps)

    def linear(self, x: int, linear: Linear) -> int:
        """See ``Ops``."""
        return self._linear(x, linear)

    def gated_silu(self, x: int, gate_up: Linear) -> int:
        """See ``Ops``."""
        return self._note(Op.GATED, self._value(), (self._linear(x, gate_up),))

    def add_linear(self, stream: int, x: int, linear: Linear) -> int:
        """See ``Ops``."""
        product = self._linear(x, linear)
        # Of a sum over ranks one adds its part to the stream; the others put theirs in its place.
        op = Op.ADD if self._leads or not linear.partial else Op.REPLACE
        self._note(op, stream, (stream, product))
        if linear.partial:
            self._reduce()
        return stream

    def attention(self, layer: int, qkv: int, heads: HeadShape, rope: RotaryEmbedding) -> int:
        """See ``Ops``."""
        if self._compute is None:
            raise InternalError("attention was asked for with a value of an earlier segment")
        self._compute.result = qkv
        if not any(known is rope for known in self._ropes):
            self._ropes.append(rope)
        self._query_width = max(self._query_width, heads.query * heads.size)
        self._segment().steps.append(Rotate(layer, heads, rope))
        self._end()
        self._parts.append(Attend(layer))
        self._attended = self._value()
        return self._attended

    def finish(self, hidden: int) -> Program:
        """Returns what was noted, for a step that returns ``hidden``."""
        dtype = torch.float32
        if hidden not in self._streams:
            if self._compute is None:
                raise InternalError("a step returned a value of an earlier segment")
            self._compute.result = hidden
            dtype = torch.bfloat16
        return Program(self._parts, self._hidden_size, dtype, self._query_width, self._ropes, self._leads)

    def _linear(self, x: int, linear: Linear) -> int:
        matrix = linear.matrix
        held = matrix.held if isinstance(matrix, Fp8Matrix) else dense(matrix)
        bias = () if held.bias is None else (held.bias,)
        if not isinstance(held, Fp8Weights):
            return self._note(Op.LINEAR, self._value(), (x,), (held.weight, *bias))
        tensors = (held.weight, held.scales, held.one, *bias)
        out = self._value()
        return self._note(Op.LINEAR_FP8, out, (x,), tensors, outputs=held.outputs, row_scaled=held.row_scaled)

    def _value(self) -> int:
        self._next += 1
        return self._next

    def _stream(self) -> int:
        value = self._value()
        self._streams.add(value)
        return value

    def _segment(self) -> Segment:
        if not self._parts or not isinstance(self._parts[-1], Segment):
            self._parts.append(Segment())
        last = self._parts[-1]
        if not isinstance(last, Segment):
            raise InternalError("a segment was expected")
        return last

    def _note(
        self,
        op: Op,
        out: int,
        inputs: tuple[int, ...] = (),
        tensors: tuple[torch.Tensor, ...] = (),
        *,
        number: float = 0.0,
        begin: int = 0,
        outputs: int = 0,
        row_scaled: bool = False,
    ) -> int:
        if self._compute is None:
            self._compute = Compute()
            self._segment().steps.append(self._compute)
        compute = self._compute
        first = len(compute.tensors)
        compute.tensors.extend(tensors)
        places = tuple(range(first, first + len(tensors)))
        compute.instructions.append(Instruction(op, out, inputs, places, number, begin, outputs, row_scaled))
        for value in (out, *inputs):
            if value in self._streams:
                compute.streams.add(value)
            elif value == self._attended:
                compute.attended = value
        return out

    def _reduce(self) -> None:
        self._segment().steps.append(Reduce())
        self._compute = None

    def _end(self) -> None:
        self._compute = None


def record(model: CausalLM, dtype: torch.dtype, *, leads: bool = True) -> Program:
    """Returns the program of ``model``, whose matrices are dense and of ``dtype``, or of eight bits.

    Raises:
        InternalError: the model uses a value in a way that has no place here.
    """
    recorder = Recorder(leads=leads)
    program = recorder.finish(model.hidden(recorder))
    if program.hidden_dtype is not torch.float32:
        program.hidden_dtype = dtype
    for part in program.parts:
        if isinstance(part, Segment):
            for step in part.steps:
                if isinstance(step, Compute):
                    _renumber(step)
    return program


def _renumber(compute: Compute) -> None:
    """Counts values anew in each computation, so that those of all layers are alike; checks that all come from here."""
    numbers: dict[int, int] = {}
    known = set(compute.streams) | ({compute.attended} if compute.attended is not None else set())

    def number(value: int) -> int:
        return numbers.setdefault(value, len(numbers))

    renumbered = []
    for instruction in compute.instructions:
        for value in instruction.inputs:
            if value not in known:
                raise InternalError("a value was used that is gone with its segment")
        known.add(instruction.out)
        renumbered.append(
            replace(
                instruction,
                out=number(instruction.out),
                inputs=tuple(number(value) for value in instruction.inputs),
            )
        )
    compute.instructions = renumbered
    compute.streams = {number(value) for value in compute.streams}
    compute.attended = None if compute.attended is None else number(compute.attended)
    compute.result = None if compute.result is None else number(compute.result)
