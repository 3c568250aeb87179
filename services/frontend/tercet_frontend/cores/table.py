"""The choices that run on one core, by handle, and what the core's frames do to them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tercet_frontend.cores.frames import FINISH_REASONS, StepColumns, error_of, step_columns, token_logprobs
from tercet_frontend.cores.interface import Finished
from tercet_frontend.cores.journey import Loss
from tercet_shared.errors import InternalError, OverloadedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_frontend.cores.generation import StreamGeneration
    from tercet_frontend.cores.pace import Pace
    from tercet_proto.v1 import engine_pb2
    from tercet_shared.errors import TercetError


_LONGEST_HOLD = 0.02
"""Seconds for which a token waits for more of its stream."""


class GenerationTable:
    """Generations while they are on the core. Rows for others (given up, ended, older attempts) are ignored.

    Args:
        lost: is given those that this core does not go on with and that another one may, and why.
        pace: of the front end.
    """

    def __init__(self, lost: Callable[[StreamGeneration, Loss, str], None], pace: Pace) -> None:
        self._by_handle: dict[int, StreamGeneration] = {}
        self._lost = lost
        self._pace = pace
        self._held: set[StreamGeneration] = set()  # whose readers have not been woken for their latest tokens
        self._held_steps = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._by_handle)

    def add(self, generation: StreamGeneration) -> None:
        """Lets a generation receive what comes for its handle."""
        self._by_handle[generation.handle] = generation

    def remove(self, generation: StreamGeneration) -> None:
        """Forgets a generation, if it is known."""
        self._by_handle.pop(generation.handle, None)

    def step(self, step: engine_pb2.Step) -> None:
        """Hands out a step's tokens and ends. Each generation's reader is woken at most once.

        Where the pace is to let tokens go together, only those are woken that have their first token or their end, and
        the others some steps or milliseconds later.

        Raises:
            ProtocolError: the frame is malformed; then nothing of it was used.
        """
        columns = step_columns(step)
        ids = columns.ids
        by_handle = self._by_handle
        self._pace.count(len(ids), asyncio.get_running_loop().time())
        hold = self._pace.steps > 1
        held = self._held
        start = 0
        for handle, attempt, end in zip(columns.handles, columns.attempts, columns.ends, strict=True):
            if end > start:
                generation = by_handle.get(handle)
                if generation is not None and generation.attempt == attempt:
                    if hold and generation.received:
                        held.add(generation)
                    else:
                        generation.wake()
                    generation.received += ids[start:end]
                start = end
        if held:
            self._held_steps += 1
            if self._held_steps >= self._pace.steps:
                self._release()
            elif self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_LONGEST_HOLD, self._release)
        if columns.logprobs or columns.starts or columns.pooled:
            self._extras(columns)
        if columns.finish_rows:
            self._finish(columns, step)

    def _release(self) -> None:
        """Wakes the readers of all that was held back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._held_steps = 0
        held, self._held = self._held, set()
        for generation in held:
            generation.wake()

    def _extras(self, columns: StepColumns) -> None:
        """Hands out what comes beside tokens; whoever reads them runs after this."""
        for row, cached in columns.starts:
            generation = self._find(columns.handles[row], columns.attempts[row])
            if generation is not None:
                generation.begin(cached)
        for row, logprobs in columns.logprobs:
            generation = self._find(columns.handles[row], columns.attempts[row])
            if generation is not None and generation.logprobs is not None:
                generation.logprobs += logprobs
        for row, vector in columns.pooled:
            generation = self._find(columns.handles[row], columns.attempts[row])
            if generation is not None:
                generation.pooled = vector

    def prompt_logprobs(self, message: engine_pb2.PromptLogProbs) -> None:
        """Hands out log-probabilities of prompt tokens.

        Raises:
            ProtocolError: they are malformed, or tokens before them were left out.
        """
        generation = self._find(message.handle, message.attempt)
        if generation is not None:
            generation.add_prompt_logprobs(message.first, token_logprobs(message.logprobs))

    def _finish(self, columns: StepColumns, step: engine_pb2.Step) -> None:
        errors = {error.row: error for error in step.errors}
        for entry, row in enumerate(columns.finish_rows):
            generation = self._take(columns.handles[row], columns.attempts[row])
            if generation is None:
                continue
            reason = FINISH_REASONS.get(columns.finish_reasons[entry])
            if reason is not None:
                stop_id = columns.finish_stop_ids[entry]
                generation.end(Finished(reason, stop_id if stop_id >= 0 else None, columns.finish_cached[entry]))
            elif row in errors:
                error = error_of(errors[row].kind, errors[row].message, errors[row].param)
                self._fail(generation, error, Loss.ENDED)
            else:
                generation.fail(InternalError("The core ended the request without saying why."))

    def reject(self, rejected: engine_pb2.Rejected) -> None:
        """Takes back a generation that the core did not take."""
        generation = self._take(rejected.handle, rejected.attempt)
        if generation is not None:
            error = error_of(rejected.kind, rejected.message, rejected.param)
            self._fail(generation, error, Loss.REJECTED)

    def take_all(self) -> list[StreamGeneration]:
        """Removes and returns every generation: the core is gone."""
        lost, self._by_handle = self._by_handle, {}
        return list(lost.values())

    def _fail(self, generation: StreamGeneration, error: TercetError, loss: Loss) -> None:
        # A full core refuses who is new. Who has begun elsewhere was let in already.
        begun = loss is Loss.REJECTED and bool(generation.received)
        elsewhere = begun or not isinstance(error, OverloadedError)
        if isinstance(error, UnavailableError) and elsewhere:
            self._lost(generation, loss, error.message)
        else:
            generation.fail(error)

    def _find(self, handle: int, attempt: int) -> StreamGeneration | None:
        generation = self._by_handle.get(handle)
        return generation if generation is not None and generation.attempt == attempt else None

    def _take(self, handle: int, attempt: int) -> StreamGeneration | None:
        generation = self._find(handle, attempt)
        if generation is not None:
            del self._by_handle[handle]
        return generation
