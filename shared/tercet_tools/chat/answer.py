"""One answer as it grows, and how fast it came."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tercet_tools.chat.client import Content, Finished, Reasoning, Usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_tools.chat.client import Part


@dataclass
class Answer:
    """What came so far.

    Attributes:
        content: the answer.
        reasoning: what the model thought first.
        finish_reason: why it ended; empty while it has not, or when it was stopped here.
        clock: seconds, from any moment.
    """

    content: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    clock: Callable[[], float] = time.monotonic
    _asked: float = field(init=False)
    _first: float | None = None
    _last: float = 0.0
    _pieces: int = 0
    _tokens: int | None = None

    def __post_init__(self) -> None:
        self._asked = self.clock()

    def add(self, part: Part) -> None:
        """Takes the next part."""
        match part:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case Finished(reason):
                self.finish_reason = reason
            case Usage(tokens):
                self._tokens = tokens
                return
        now = self.clock()
        if self._first is None:
            self._first = now
        self._last = now
        self._pieces += not isinstance(part, Finished)

    def figures(self) -> str:
        """Returns "61 tokens · 34.2 per second · first after 0.18 s"; empty while nothing came.

        Where the server did not count the tokens (the answer was stopped), pieces are counted, which is about the same.
        """
        if self._first is None:
            return ""
        tokens = self._pieces if self._tokens is None else self._tokens
        about = "about " if self._tokens is None else ""
        figures = [f"{about}{tokens} {'token' if tokens == 1 else 'tokens'}"]
        seconds = self._last - self._first
        if tokens > 1 and seconds > 0:
            figures.append(f"{(tokens - 1) / seconds:.1f} per second")
        figures.append(f"first after {self._first - self._asked:.2f} s")
        return " · ".join(figures)
