"""One choice while cores run it, one after the other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from tercet_frontend.cores.interface import Finished, FinishReason, GenerationRequest, Start, Tokens
from tercet_shared.errors import InternalError, ProtocolError
from tercet_shared.sampling_params import OFF

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tercet_frontend.cores.interface import TokenLogProbs
    from tercet_frontend.cores.journey import Journey
    from tercet_shared.errors import TercetError


class GenerationLink(Protocol):
    """Where a generation is: on a core's stream, or between two."""

    def finish(self, generation: StreamGeneration, output_tokens: int) -> None:
        """Tells the core that the choice has ended at a stop string, and forgets it."""

    def abort(self, generation: StreamGeneration, reason: str) -> None:
        """Tells the core that the choice is given up, and forgets it."""


class Placement(Protocol):
    """A generation's time on one core, for those who count."""

    def started(self) -> None:
        """Its first token there has come."""

    def lost(self, *, failed: bool) -> None:
        """The core does not go on with it; ``failed`` where that was the core's fault."""

    def ended(self, state: str) -> None:
        """The choice is over: it is ``finished``, ``failed`` or ``aborted``. Perhaps it was lost before."""


class StreamGeneration:
    """A `Generation`. The stream to its core adds tokens and the end; one reader takes them.

    It keeps all that another attempt needs: the request, and every token that came. When its core is lost it goes to
    another one, and the reader sees nothing of it: tokens, log-probabilities and what was cached are of one choice.

    Attributes:
        request: as submitted; the prompt never changes.
        submitted: when it first was, by the event loop's clock.
        received: output tokens so far, of all attempts, whether taken by the reader or not.
        logprobs: one for each of ``received``; None when they were not asked for.
        pooled: the vector of a request that asked for one, when it has come.
        handle: its number on the stream.
        attempt: 0 first; rows of another attempt are not for it.
        journey: what is kept of the cores that it lost; None before the first loss.
    """

    __slots__ = (
        "_error",
        "_finished",
        "_link",
        "_over",
        "_placement",
        "_prompt_logprobs",
        "_start",
        "_taken",
        "_waiter",
        "attempt",
        "handle",
        "journey",
        "logprobs",
        "pooled",
        "received",
        "request",
        "submitted",
    )

    def __init__(self, request: GenerationRequest, link: GenerationLink, handle: int, placement: Placement) -> None:
        self.request = request
        self.submitted = asyncio.get_running_loop().time()
        self.handle = handle
        self.attempt = 0
        self.journey: Journey | None = None
        self.received: list[int] = []
        self.logprobs: list[TokenLogProbs] | None = None if request.params.logprobs == OFF else []
        self.pooled: npt.NDArray[np.float32] | None = None
        self._prompt_logprobs: list[TokenLogProbs] | None = None if request.params.prompt_logprobs == OFF else []
        self._start: Start | None = None
        self._link: GenerationLink | None = link  # None once the core has nothing left to tell or to be told
        self._placement = placement  # the latest
        self._taken = 0
        self._finished: Finished | None = None
        self._error: TercetError | None = None
        self._over = False
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Tokens:
        """See `Generation.next`.

        Raises:
            TercetError: the choice failed; tokens that came before were returned before.
            RuntimeError: it has ended already or was given up, or another call is waiting.
        """
        if self._waiter is not None:
            raise RuntimeError("next() is awaited already")
        while True:
            if self._over:
                raise RuntimeError("the generation is over")
            if self._taken < len(self.received) or self._finished is not None:
                return self._take()
            if self._error is not None:
                self._over = True
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _take(self) -> Tokens:
        begin, self._taken = self._taken, len(self.received)
        self._over = self._finished is not None
        start = self._start if not begin else None
        if self.logprobs is None:
            return Tokens(self.received[begin:], self._finished, None, start, self.pooled)
        if len(self.logprobs) != len(self.received):
            self.abort("log-probabilities are missing")
            raise InternalError("The core left out log-probabilities.")
        return Tokens(self.received[begin:], self._finished, self.logprobs[begin:], start, self.pooled)

    def finish(self, output_tokens: int) -> None:
        """See `Generation.finish`."""
        link = self._give_up()
        if link is not None:
            link.finish(self, output_tokens)
            self._placement.ended("finished")

    def abort(self, reason: str) -> None:
        """See `Generation.abort`."""
        link = self._give_up()
        if link is not None:
            link.abort(self, reason)
            self._placement.ended("aborted")

    def wake(self) -> None:
        """Lets the reader see what was added to `received`; several calls before it runs are as one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def begin(self, cached_tokens: int) -> None:
        """The first token has come. What a later attempt found in a cache, an earlier one has computed."""
        self._placement.started()
        if self._start is None:
            self._start = Start(cached_tokens, self._prompt_logprobs)

    def add_prompt_logprobs(self, first: int, logprobs: list[TokenLogProbs]) -> None:
        """Adds those of the prompt tokens from position ``first`` on; what is known already is ignored.

        Raises:
            ProtocolError: tokens before them were left out, or the prompt has not that many.
        """
        known = self._prompt_logprobs
        if known is None:
            return
        new = len(known) + 1 - first  # the first token has none
        if first < 1 or new < 0 or first + len(logprobs) > len(self.request.prompt_ids):
            raise ProtocolError("Log-probabilities of a prompt do not fit to it.")
        known += logprobs[new:]

    def depart(self, link: GenerationLink, *, failed: bool) -> None:
        """Its core is lost, through its own fault or not; until it is on another one, ``link`` answers for it."""
        self._link = link
        self._placement.lost(failed=failed)

    def arrive(self, link: GenerationLink, handle: int, placement: Placement) -> None:
        """Another attempt begins: rows of those before are not for it any more."""
        self._link = link
        self._placement = placement
        self.handle = handle
        self.attempt += 1
        if not self.received:
            # All of them come from the core that yields the first token.
            if self._prompt_logprobs is not None:
                self._prompt_logprobs = []
        elif self._start is None:
            # The core that yielded the first token did not say; what a later one finds is not what the client saved.
            self._start = Start(0, self._prompt_logprobs)

    def outcome(self) -> Finished | None:
        """Returns the end that the received tokens show, where the core was lost before it could say so."""
        if not self.received:
            return None
        params, last = self.request.params, self.received[-1]
        if last in params.stop_token_ids or last in params.eos_token_ids:
            return Finished(FinishReason.STOP, last, 0)
        if len(self.received) >= params.max_tokens:
            return Finished(FinishReason.LENGTH, None, 0)
        return None

    def end(self, finished: Finished) -> None:
        """The choice has ended. What was cached its start says: later attempts find what earlier ones computed."""
        start = self._start
        if start is not None and start.cached_tokens != finished.cached_tokens:
            finished = replace(finished, cached_tokens=start.cached_tokens)
        self._finished = finished
        self._link = None
        self._placement.ended("aborted" if finished.reason is FinishReason.ABORT else "finished")
        self.wake()

    def fail(self, error: TercetError) -> None:
        """The choice ends with an error."""
        self._error = error
        self._link = None
        self._placement.ended("failed")
        self.wake()

    def _give_up(self) -> GenerationLink | None:
        link, self._link = self._link, None
        self._over = True
        self.wake()
        return link
