"""Where parsers put what they find: events in order, calls with their numbers and ids, no stray white space."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from tercet_frontend.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from tercet_frontend.parsing.reader import SPACE

FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""What functions may be called, in requests and in answers."""

NewId: TypeAlias = Callable[[], str]
"""Makes the id of a call."""


class Sink:
    """The events of one choice.

    White space is layout where it stands between calls, between reasoning and what follows, and alone beside calls;
    there it is left out. Elsewhere it is text.

    Args:
        new_id: makes the ids of calls.
        max_calls: further calls are left out of the answer; None keeps all.
        keep_reasoning: otherwise reasoning is left out.
        only_calls: the answer is nothing but calls, so that text after the first is one that was cut short; it is left
            out.
    """

    def __init__(
        self, new_id: NewId, *, max_calls: int | None = None, keep_reasoning: bool = True, only_calls: bool = False
    ) -> None:
        self._new_id = new_id
        self._max_calls = max_calls
        self._keep_reasoning = keep_reasoning
        self._only_calls = only_calls
        self._events: list[Event] = []
        self._pieces: list[str] = []
        self._kind: type[Content | Reasoning | ToolCallArguments] = Content
        self._blank: list[str] | None = []  # white space of which it is not known yet whether it is text
        self._trim = False  # whether white space that follows is left out in any case
        self._muted = False
        self.num_calls = 0

    def take(self) -> list[Event]:
        """Returns the events since the last call."""
        self._close()
        events, self._events = self._events, []
        return events

    def content(self, text: str) -> None:
        """Adds to the answer's text."""
        if self._only_calls and self.num_calls:
            return
        if self._trim:
            text = text.lstrip(SPACE)
            self._trim = not text
        if self._blank is not None and text:
            if not text.strip(SPACE):
                self._blank.append(text)
                return
            text = "".join(self._blank) + text
            self._blank = None
        self._add(Content, text)

    def reasoning(self, text: str) -> None:
        """Adds to the reasoning; white space around it is the caller's."""
        if self._keep_reasoning:
            self._add(Reasoning, text)

    def end_reasoning(self) -> None:
        """Says that the answer follows."""
        self._blank = []
        self._trim = True

    def begin(self, name: str) -> None:
        """Begins a call."""
        self._blank = []
        self._trim = False
        self._muted = self._max_calls is not None and self.num_calls >= self._max_calls
        if not self._muted:
            self._close()
            self._events.append(ToolCallBegin(self.num_calls, self._new_id(), name))
            self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the call that was begun last."""
        if not self._muted:
            self._add(ToolCallArguments, text)

    def end(self) -> None:
        """Says that nothing follows."""
        blank, self._blank = self._blank, None
        if blank and not self.num_calls:
            self._add(Content, "".join(blank))

    def _add(self, kind: type[Content | Reasoning | ToolCallArguments], text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._close()
            self._kind = kind
        self._pieces.append(text)

    def _close(self) -> None:
        if not self._pieces:
            return
        text = "".join(self._pieces)
        self._pieces.clear()
        if self._kind is ToolCallArguments:
            self._events.append(ToolCallArguments(self.num_calls - 1, text))
        else:
            self._events.append(Content(text) if self._kind is Content else Reasoning(text))
