"""From a stream of server-sent events to the times of one request.

Formats: HTML Living Standard, section "Server-sent events"; chunks as in OpenAI's API reference, with the members in
which other servers stream reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from tercet_shared.errors import bounded
from tercet_tools.bench.http import RequestFailedError

_DELTAS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


@dataclass(slots=True)
class Sample:
    """One request that got its whole answer. Times are seconds.

    Attributes:
        start: when it was sent, or was due to be; of `tercet_tools.bench.http.clock`.
        first: from ``start`` to the first event with content (TTFT).
        last: from ``start`` to the last event with content.
        total: from ``start`` to the end of the answer (e2e).
        gaps: between events with content (ITL).
        input_tokens: of the prompt; None where the server does not say.
        output_tokens: of the answer, by usage; where there is none, its events with content.
        counted: whether ``output_tokens`` are by usage.
        cached_tokens: prompt tokens that came from a prefix cache; 0 where the server does not say.
        wanted: output tokens that were asked for.
    """

    start: float
    first: float
    last: float
    total: float
    gaps: list[float]
    input_tokens: int | None
    output_tokens: int
    counted: bool
    cached_tokens: int
    wanted: int

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None where there is no second."""
        return (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def events(self) -> int:
        """Events with content."""
        return len(self.gaps) + 1


@dataclass(slots=True)
class EventStream:
    """An `Answer` that notes when content comes.

    Args:
        start: see `Sample`.
        wanted: see `Sample`.
    """

    start: float
    wanted: int
    _status: int = 0
    _rest: bytes = b""
    _first: float = 0.0
    _last: float = 0.0
    _now: float = 0.0
    _gaps: list[float] = field(default_factory=list)
    _usage: dict[str, Any] | None = None
    _done: bool = False

    def head(self, status: int) -> None:
        """Takes the status."""
        self._status = status

    def body(self, data: bytes, now: float) -> None:
        """Takes a piece of the body."""
        self._now = now
        if self._status != 200:
            self._rest = (self._rest + data)[:10_000]
            return
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            # Every event of these APIs has one line of data; the lines around it say nothing more.
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def end(self) -> None:
        """Checks that the answer is whole."""
        if self._status != 200:
            raise RequestFailedError(f"HTTP {self._status}", f"HTTP {self._status}: {_message(self._rest)}")
        if self._rest.startswith(b"data:"):  # a last line without its end
            self._event(self._rest[5:].strip(), self._now)
        if not self._done:
            raise RequestFailedError("cut", "The stream ended without [DONE].")
        if not self._last:
            raise RequestFailedError("empty", "The stream ended without any content.")

    def sample(self) -> Sample:
        """Returns the times; only after `end`."""
        usage = self._usage or {}
        details = usage.get("prompt_tokens_details")
        tokens = usage.get("completion_tokens")
        return Sample(
            start=self.start,
            first=self._first - self.start,
            last=self._last - self.start,
            total=self._now - self.start,
            gaps=self._gaps,
            input_tokens=usage.get("prompt_tokens"),
            output_tokens=tokens or len(self._gaps) + 1,
            counted=bool(tokens),
            cached_tokens=(details.get("cached_tokens") or 0) if isinstance(details, dict) else 0,
            wanted=self.wanted,
        )

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            raise RequestFailedError("not JSON", f"An event is not a JSON object: {bounded(repr(data), 200)}.")
        if event.get("error"):
            raise RequestFailedError("error event", f"The stream ended with an error: {_message(data)}")
        if isinstance(usage := event.get("usage"), dict):
            self._usage = usage
        for choice in event.get("choices") or ():
            if _has_content(choice):
                if self._last:
                    self._gaps.append(now - self._last)
                else:
                    self._first = now
                self._last = now
                return


def _has_content(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    return any(map(delta.get, _DELTAS)) if isinstance(delta, dict) else bool(choice.get("text"))


def _message(body: bytes) -> str:
    """Returns the sentence of an error body, or what there is of it."""
    try:
        error = orjson.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return bounded(body.decode(errors="replace").strip(), 300) or "(no text)"
