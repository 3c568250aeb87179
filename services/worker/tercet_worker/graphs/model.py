"""A model that is run as a recorded program, eagerly or as graphs.

Legend: T tokens of the step with padding, H hidden size, Hq query heads, D head size, R rotated dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from tercet_shared.errors import InternalError
from tercet_worker.graphs.compute import Function, Layers, function_of
from tercet_worker.graphs.dispatch import Choice, Dispatcher, Mode
from tercet_worker.graphs.program import Attend, Compute, Program, Receive, Reduce, Rotate, Segment, Send

if TYPE_CHECKING:
    from tercet_worker.graphs.capture import Capturer, Work
    from tercet_worker.models.interface import CausalLM, LayerAttention
    from tercet_worker.models.ops import HeadOps
    from tercet_worker.parallel.communicator import Communicator


Transform = Callable[[Function], Function]
"""What is done to a function before it is used, such as compiling."""


class PagedAttention(Protocol):
    """What a program needs of attention: the two halves of ``AttentionBackend.forward``, and the plan's choice."""

    @property
    def choice(self) -> Choice:
        """How the step of the plan in force is run."""
        ...

    def rotate_and_write(
        self,
        layer: int,
        qkv: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        slot_mapping: torch.Tensor,
        queries: torch.Tensor,
    ) -> None:
        """Rotates queries ``[T, Hq, D]`` out of ``qkv``, and keys, with the values, into the cache of ``layer``."""
        ...

    def attend(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Attends for the step that is planned; ``out [T, Hq, D]`` is overwritten."""
        ...

    def plan_for_capture(self, rows: int) -> None:
        """Plans a step of ``rows`` rows of one token, whose attention can be captured."""
        ...


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a step, at the same place each time; of each, the first T elements count."""

    token_ids: torch.Tensor  # int32 [most tokens]
    positions: torch.Tensor  # int64 [most tokens]
    slot_mapping: torch.Tensor  # int64 [most tokens]

    @classmethod
    def make(cls, most: int, device: torch.device) -> StepInputs:
        """Returns inputs of padding, for up to ``most`` tokens."""
        ids = torch.zeros(most, dtype=torch.int32, device=device)
        positions = torch.zeros(most, dtype=torch.int64, device=device)
        return cls(ids, positions, torch.full_like(positions, -1))


class Functions:
    """The functions of a program's computations: one for all that are alike.

    Args:
        layers: how operations are done.
        dtype: of the model.
        transform: what is done to a function before it is used, such as compiling; nothing by default.
    """

    def __init__(self, layers: Layers, dtype: torch.dtype, transform: Transform | None = None) -> None:
        self._layers = layers
        self._dtype = dtype
        self._transform = transform
        self._known: dict[tuple[object, ...], Function] = {}

    def of(self, compute: Compute) -> Function:
        """Returns the function of ``compute``."""
        found = self._known.get(compute.structure)
        if found is None:
            found = function_of(compute, self._layers, self._dtype)
            if self._transform is not None:
                found = self._transform(found)
            self._known[compute.structure] = found
        return found

    def __len__(self) -> int:
        return len(self._known)


class ProgramModel:
    """Implements ``StepModel`` over a `Program`.

    Args:
        model: whose program it is; asked for logits.
        program: the step.
        functions: of its computations.
        inputs: where the inputs of every step are.
        head: computes logits.
        communicator: to the other ranks.
        dtype: of the model.
    """

    def __init__(
        self,
        model: CausalLM,
        program: Program,
        functions: Functions,
        inputs: StepInputs,
        head: HeadOps[torch.Tensor],
        communicator: Communicator,
        dtype: torch.dtype,
    ) -> None:
        self._model = model
        self._program = program
        self._inputs = inputs
        self._head = head
        self._communicator = communicator
        self._functions = functions
        most, device = len(inputs.token_ids), inputs.token_ids.device
        self._stream = torch.zeros((most, program.hidden_size), dtype=torch.float32, device=device)
        self._hidden = torch.zeros((most, program.hidden_size), dtype=program.hidden_dtype, device=device)
        self._queries = torch.zeros(most * program.query_width, dtype=dtype, device=device)
        self._attended = torch.zeros(most * program.query_width, dtype=dtype, device=device)
        # Frequencies may be filled with the weights, so angles are computed in every step.
        self._cosines = [torch.zeros((most, rope.half), device=device) for rope in program.ropes]
        self._sines = [torch.zeros((most, rope.half), device=device) for rope in program.ropes]
        self._full: dict[int, Work] = {}
        self._pieces: dict[int, dict[int, Work]] = {}
        self._heads_of = _heads_by_layer(program)
        self._widths = {
            place + 1: self._heads_of[part.layer][0] * self._heads_of[part.layer][1]
            for place, part in enumerate(program.parts)
            if isinstance(part, Attend)
        }  # of what attention has returned, by place of the segment that follows

    @property
    def max_tokens(self) -> int:
        """Most tokens of a step."""
        return len(self._inputs.token_ids)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: LayerAttention) -> torch.Tensor:
        """See ``StepModel``. Ids and positions are those of the inputs, which are where they always are."""
        tokens = len(token_ids)
        if token_ids.data_ptr() != self._inputs.token_ids.data_ptr() or len(positions) != tokens:
            raise InternalError("a step's inputs are not where its graphs read them")
        return self.run(tokens, _paged(attention))

    def run(self, tokens: int, attention: PagedAttention) -> torch.Tensor:
        """Runs a step of ``tokens`` tokens, padding included, that was planned, and returns its hidden states."""
        choice = attention.choice
        if choice.tokens != tokens:
            raise InternalError(f"a step of {tokens} tokens was planned with {choice.tokens}")
        full = self._full.get(tokens) if choice.mode is Mode.FULL else None
        pieces = self._pieces.get(tokens, {}) if choice.mode is Mode.PIECEWISE else {}
        if full is not None:
            self._edge(self._program.parts[0], tokens)
            full()
            self._edge(self._program.parts[-1], tokens)
        else:
            for place, part in enumerate(self._program.parts):
                if isinstance(part, Segment):
                    pieces.get(place, partial(self._segment, place, tokens, attention))()
                elif isinstance(part, Attend):
                    attention.attend(part.layer, *self._heads(part.layer, tokens))
                else:
                    self._edge(part, tokens)
        return self._result(tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``StepModel``."""
        return self._model.logits(self._head, hidden)

    def compute_only(self, tokens: int) -> torch.Tensor:
        """Runs a step without cache and attention, to see what memory it takes. All ranks of a stage do it at once."""
        for place, part in enumerate(self._program.parts):
            if isinstance(part, Segment):
                self._segment(place, tokens, None)
        if self._communicator.topology.tensor > 1:
            self._communicator.all_reduce_(self._stream[:tokens])  # it takes memory at its first use
        return self._result(tokens)

    def capture(
        self,
        dispatcher: Dispatcher,
        capturer: Capturer,
        attention: PagedAttention,
        progress: Callable[[float], None],
    ) -> float:
        """Captures the graphs of ``dispatcher``, largest first, so that the small ones fit into their memory.

        Args:
            dispatcher: says which.
            capturer: makes them.
            attention: with its cache.
            progress: told the fraction done.

        Returns:
            Seconds that it took.
        """
        began = time.monotonic()
        work = [(size, Mode.PIECEWISE) for size in dispatcher.piecewise] + [
            (size, Mode.FULL) for size in dispatcher.full
        ]
        work.sort(key=lambda entry: -entry[0])
        for done, (size, mode) in enumerate(work):
            progress(done / len(work))
            if mode is Mode.FULL:
                self._full[size] = self._capture_full(size, capturer, attention)
            else:
                self._pieces[size] = {
                    place: capturer.capture(partial(self._segment, place, size, attention))
                    for place, part in enumerate(self._program.parts)
                    if isinstance(part, Segment)
                }
        progress(1.0)
        return time.monotonic() - began

    def _capture_full(self, size: int, capturer: Capturer, attention: PagedAttention) -> Work:
        attention.plan_for_capture(size)

        def work() -> None:
            for place, part in enumerate(self._program.parts):
                if isinstance(part, Segment):
                    self._segment(place, size, attention)
                elif isinstance(part, Attend):
                    attention.attend(part.layer, *self._heads(part.layer, size))

        return capturer.capture(work)

    def _edge(self, part: Segment | Attend | Receive | Send, tokens: int) -> None:
        """Takes the stream from the stage before, or hands it on, where a program begins or ends with that."""
        if isinstance(part, Receive):
            self._communicator.receive_stream(self._stream[:tokens])
        elif isinstance(part, Send):
            self._communicator.send_stream(self._stream[:tokens])

    def _segment(self, place: int, tokens: int, attention: PagedAttention | None) -> None:
        """Runs one segment at its tensors' places."""
        part = self._program.parts[place]
        if not isinstance(part, Segment):
            raise InternalError("only segments are run")
        inputs, stream = self._inputs, self._stream[:tokens]
        first = place == 0 or (place == 1 and isinstance(self._program.parts[0], Receive))
        if first:
            self._turn(tokens)
        result: torch.Tensor | None = None
        for step in part.steps:
            if isinstance(step, Compute):
                width = self._widths.get(place, self._program.query_width)
                attended = self._attended[: tokens * width].view(tokens, width)
                result = self._functions.of(step)(inputs.token_ids[:tokens], stream, attended, step.tensors)
            elif isinstance(step, Reduce):
                if attention is not None:
                    self._communicator.all_reduce_(stream)
            elif attention is not None and result is not None:
                number = next(n for n, rope in enumerate(self._program.ropes) if rope is step.rope)
                queries = self._queries[: tokens * step.heads.query * step.heads.size]
                attention.rotate_and_write(
                    step.layer,
                    result,
                    self._cosines[number][:tokens],
                    self._sines[number][:tokens],
                    inputs.slot_mapping[:tokens],
                    queries.view(tokens, step.heads.query, step.heads.size),
                )
        if place == len(self._program.parts) - 1 and result is not None:
            self._hidden[:tokens].copy_(result)

    def _turn(self, tokens: int) -> None:
        positions = self._inputs.positions[:tokens].to(torch.float32).unsqueeze(1)
        for rope, cosines, sines in zip(self._program.ropes, self._cosines, self._sines, strict=True):
            angles = positions * rope.inverse_frequencies
            torch.cos(angles, out=cosines[:tokens])
            torch.sin(angles, out=sines[:tokens])

    def _heads(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns queries and output of a layer's attention, ``[T, Hq, D]`` each."""
        heads = self._heads_of[layer]
        count = tokens * heads[0] * heads[1]
        return (
            self._queries[:count].view(tokens, *heads),
            self._attended[:count].view(tokens, *heads),
        )

    def _result(self, tokens: int) -> torch.Tensor:
        return (self._stream if isinstance(self._program.parts[-1], Send) else self._hidden)[:tokens]


def _heads_by_layer(program: Program) -> dict[int, tuple[int, int]]:
    """Returns query heads and head size of every layer."""
    steps = (step for part in program.parts if isinstance(part, Segment) for step in part.steps)
    return {step.layer: (step.heads.query, step.heads.size) for step in steps if isinstance(step, Rotate)}


def _paged(attention: LayerAttention) -> PagedAttention:
    if not hasattr(attention, "rotate_and_write"):
        raise InternalError("a recorded program needs attention that takes its two halves apart")
    return attention  # type: ignore[return-value]  # it has the methods
