"""From the instructions of a `Compute` to a function over tensors, to be called as it is or compiled.

Legend: T tokens of the step, H hidden size, V rows of the vocabulary that this rank holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import FunctionType
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  # the customary name

from tercet_worker.graphs.program import Op
from tercet_worker.layers.fp8 import multiply

if TYPE_CHECKING:
    from tercet_worker.graphs.program import Compute, Instruction

Function = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Sequence[torch.Tensor]],
    torch.Tensor | None,
]
"""From token ids ``[T]``, the residual stream ``[T, H]``, what attention returned, and the weights, to the result. The
stream is changed in place."""


class Layers(Protocol):
    """How the operations are done that are more than one of torch's."""

    def norm(
        self, stream: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """Adds ``x`` to the float32 ``stream`` in place, where there is one, and returns the norm in ``dtype``."""
        ...

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``silu(gate) · up`` of the two halves of ``x``."""
        ...

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns ``x Wᵀ + b``."""
        ...


class TorchLayers:
    """Implements `Layers` with torch; to be compiled, which makes one kernel of each."""

    def norm(
        self, stream: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """See `Layers`."""
        if x is not None:
            stream.add_(x)
        return F.rms_norm(stream, (stream.shape[1],), weight, eps).to(dtype)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """See `Layers`."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `Layers`."""
        return F.linear(x, weight, bias)


def function_of(compute: Compute, layers: Layers, dtype: torch.dtype) -> Function:
    """Returns the function. It depends on ``compute.structure`` alone; the weights are its arguments.

    An addition whose sum is normed next is left to the norm.
    """
    instructions = tuple(compute.instructions)
    fused = _fused(instructions)
    streams, attended_value, result = frozenset(compute.streams), compute.attended, compute.result

    def run(
        token_ids: torch.Tensor, stream: torch.Tensor, attended: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        values: dict[int, torch.Tensor] = dict.fromkeys(streams, stream)
        if attended_value is not None:
            values[attended_value] = attended
        pending: torch.Tensor | None = None
        for place, instruction in enumerate(instructions):
            if place in fused:
                pending = values[instruction.inputs[1]]
                continue
            weights = [tensors[index] for index in instruction.tensors]
            inputs = [values[index] for index in instruction.inputs]
            if instruction.op is Op.NORM:
                values[instruction.out] = layers.norm(stream, pending, weights[0], instruction.number, dtype)
                pending = None
            elif instruction.op is Op.LINEAR:
                values[instruction.out] = layers.linear(inputs[0], weights[0], weights[1] if len(weights) > 1 else None)
            elif instruction.op is Op.LINEAR_FP8:
                weight, scales, one, *bias = weights
                values[instruction.out] = multiply(
                    inputs[0], weight, scales, one, bias[0] if bias else None,
                    outputs=instruction.outputs, row_scaled=instruction.row_scaled,
                )  # fmt: skip
            elif instruction.op is Op.GATED:
                values[instruction.out] = layers.gated(inputs[0])
            elif instruction.op is Op.ADD:
                stream.add_(inputs[1])
            elif instruction.op is Op.REPLACE:
                stream.copy_(inputs[1])
            else:
                stream.copy_(_embed(token_ids, weights[0], instruction.begin))
        return None if result is None or result in streams else values[result]

    return _apart(run, repr(compute.structure))  # type: ignore[arg-type]  # a function, for its code


def _apart(function: FunctionType, of: str) -> Function:
    """Returns ``function`` with code of its own, named by what it is made of.

    torch's compiler counts what it compiled, and remembers which sizes it has seen, by the code and its name: with one
    code for all, the weights of one function would make those of the next ones sizes that vary, and a model of more
    than four functions would be beyond its limit.
    """
    name = f"run_{hashlib.blake2b(of.encode(), digest_size=8).hexdigest()}"
    code = function.__code__.replace(co_name=name, co_qualname=name)
    made: Function = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    return made


def _fused(instructions: tuple[Instruction, ...]) -> frozenset[int]:
    """Returns the places of additions that a norm follows at once."""
    return frozenset(
        place
        for place, (first, second) in enumerate(pairwise(instructions))
        if first.op is Op.ADD and second.op is Op.NORM
    )


def _embed(token_ids: torch.Tensor, weight: torch.Tensor, begin: int) -> torch.Tensor:
    """Returns ``[T, H]``; with ``begin``, the first row of a share of the vocabulary, zeros for other ranks' tokens."""
    if begin < 0:
        return F.embedding(token_ids, weight)
    rows = token_ids - begin
    others = (rows < 0) | (rows >= weight.shape[0])
    return F.embedding(rows.masked_fill(others, 0), weight).masked_fill(others.unsqueeze(1), 0)
