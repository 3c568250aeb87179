"""A choice whose tokens are watched on their way from a core to the API."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tercet_shared.errors import TercetError, status_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_frontend.cores.interface import Generation, Tokens
    from tercet_shared.telemetry.spans import Span


class WatchedGeneration:
    """A `Generation` in front of another one; few choices have it, the others pay nothing.

    Args:
        inner: the choice.
        span: of a traced request's choice; ends with it.
        gap: is told the seconds between chunks of tokens; None is not.
    """

    def __init__(self, inner: Generation, span: Span | None, gap: Callable[[float], None] | None) -> None:
        self._inner = inner
        self._span = span
        self._gap = gap
        self._last = 0.0
        self._tokens = 0
        self._attempt = 0

    async def next(self) -> Tokens:
        """See `Generation.next`."""
        try:
            tokens = await self._inner.next()
        except TercetError as error:
            status = status_of(error)
            self._end("error", status.code or status.type)
            raise
        if tokens.ids:
            self._received(len(tokens.ids))
        if tokens.finished is not None:
            self._end(tokens.finished.reason.value)
        return tokens

    def finish(self, output_tokens: int) -> None:
        """See `Generation.finish`."""
        self._inner.finish(output_tokens)
        self._end("stop_string")

    def abort(self, reason: str) -> None:
        """See `Generation.abort`."""
        self._inner.abort(reason)
        self._end("abort")

    def _received(self, count: int) -> None:
        now = time.perf_counter()
        if self._gap is not None and self._last:
            self._gap(now - self._last)
        self._last = now
        span = self._span
        if span is not None:
            if not self._tokens:
                span.event("tercet.first_token")
            self._note_attempt(span)
        self._tokens += count

    def _note_attempt(self, span: Span) -> None:
        # Whoever moves a choice to another core counts its attempts; see `tercet_frontend.cores.generation`.
        attempt = getattr(self._inner, "attempt", 0)
        if attempt != self._attempt:
            self._attempt = attempt
            journey = getattr(self._inner, "journey", None)
            reason = "" if journey is None else str(journey.reason)
            span.event(
                "tercet.migrated",
                {"tercet.attempt": attempt, "tercet.reason": reason, "tercet.resumed_tokens": self._tokens},
            )

    def _end(self, reason: str, error: str = "") -> None:
        span, self._span = self._span, None
        if span is None:
            return
        self._note_attempt(span)
        span.set({"tercet.end": reason, "tercet.attempt": self._attempt, "gen_ai.usage.output_tokens": self._tokens})
        if error:
            span.set({"error.type": error})
        span.end()
