"""The choices of one request while they are generated: from token batches to text, finish reasons and counts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from tercet_frontend.cores.interface import FinishReason
from tercet_shared.errors import TercetError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from tercet_frontend.cores.interface import Generation, Tokens
    from tercet_frontend.text import TextStream


class Choice:
    """One choice.

    Attributes:
        index: its number in the answer.
        output_tokens: so far, for usage: those of the stop string or end-of-sequence included.
        cached_tokens: prompt tokens that came from the prefix cache; known at the end.
        finish_reason: None until the choice has ended.
    """

    __slots__ = ("_generation", "_text", "_waiting", "cached_tokens", "finish_reason", "index", "output_tokens")

    def __init__(self, index: int, generation: Generation, text: TextStream) -> None:
        self.index = index
        self.output_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self._generation = generation
        self._text = text
        self._waiting: asyncio.Task[None] | None = None

    def waits_in(self, task: asyncio.Task[None]) -> None:
        """Says which task awaits `next`, so that it is ended before the generation is."""
        self._waiting = task

    async def next(self) -> Tokens:
        """Waits for tokens; cancelling loses nothing. Raises `TercetError` when the choice failed."""
        return await self._generation.next()

    def take(self, tokens: Tokens) -> str:
        """Returns the text that ``tokens`` complete, and notes the end if it came; after the end there is no text.

        Raises:
            UnavailableError: the core gave the choice up.
        """
        if self.finish_reason is not None:
            return ""
        finished = tokens.finished
        if finished is not None and finished.reason is FinishReason.ABORT:
            raise UnavailableError("The generation was aborted by its core.")
        delta = self._text.push(
            tokens.ids,
            finished=finished is not None,
            drop_last=finished is not None and finished.stop_id is not None,
        )
        self.output_tokens = delta.output_tokens
        if finished is not None:
            self.cached_tokens = finished.cached_tokens
            self.finish_reason = finished.reason.value
        if delta.stopped_by is not None:
            self.finish_reason = FinishReason.STOP.value
            if finished is None:
                self._stop_waiting()
                self._generation.finish(delta.output_tokens)
        return delta.text

    def abort(self, reason: str) -> None:
        """Gives the choice up unless it has ended."""
        if self.finish_reason is None:
            self._stop_waiting()
            self._generation.abort(reason)

    def _stop_waiting(self) -> None:
        # A generation that is finished or aborted has no further event, and must not be awaited any more.
        if self._waiting is not None:
            self._waiting.cancel()


class Choices:
    """All choices of a request. An async context manager: leaving it aborts what has not ended.

    A single choice is awaited directly. Of several, each has a task that puts its tokens into one basket, and whoever
    awaits `next` wakes up once for all that one engine step brought.
    """

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.all = choices
        self._basket: list[tuple[Choice, Tokens]] = []
        self._failure: TercetError | None = None
        self._filled = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    @property
    def running(self) -> bool:
        """Whether a choice has not ended."""
        return any(choice.finish_reason is None for choice in self.all)

    async def __aenter__(self) -> Self:
        if len(self.all) > 1:
            self._group = await asyncio.TaskGroup().__aenter__()
            for choice in self.all:
                choice.waits_in(self._group.create_task(self._collect(choice)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = "the request failed" if isinstance(error, Exception) else "the client is gone"
        for choice in self.all:
            choice.abort(reason)
        if self._group is not None:
            # The error is the caller's and goes on as it is; the group would wrap it.
            await self._group.__aexit__(None, None, None)

    async def next(self) -> list[tuple[Choice, Tokens]]:
        """Waits until choices have tokens and returns them; cancelling loses nothing.

        Raises:
            TercetError: a choice failed, and with it the request.
        """
        if self._group is None:
            only = self.all[0]
            return [(only, await only.next())]
        await self._filled.wait()
        if self._failure is None:
            self._filled.clear()
        elif not self._basket:
            raise self._failure
        basket, self._basket = self._basket, []
        return basket

    async def _collect(self, choice: Choice) -> None:
        """Runs until the choice has ended, by its core or by a stop string."""
        last = False
        while not last and choice.finish_reason is None:
            try:
                tokens = await choice.next()
            except TercetError as error:
                self._failure = error
                self._filled.set()
                return
            last = tokens.finished is not None
            self._basket.append((choice, tokens))
            self._filled.set()
