"""Finds stop strings in a text that comes in pieces, and holds back only what could still become one.

The strings are compiled into one automaton (Aho and Corasick, "Efficient string matching", CACM 18(6), 1975). Its
state after a character is the longest end of the text that begins a stop string: exactly what must be held back.
The cost is constant per character, however many strings there are and however they overlap.

Which one counts, where several occur: the one that is complete first, as generation ends there; of those complete
with the same character, the longest, which begins earliest.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopStrings:
    """Stop strings, compiled; immutable, shared by the choices of a request.

    Args:
        strings: at least one character each.

    Raises:
        ValueError: one of them is empty.
    """

    __slots__ = ("_depth", "_fail", "_first", "_goto", "_match", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise ValueError("a stop string is empty")
        self.strings = tuple(strings)
        self._goto: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for string in self.strings:
            self._insert(string)
        self._fail = self._link()
        firsts = "".join(re.escape(char) for char in self._goto[0])
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def __bool__(self) -> bool:
        return bool(self.strings)

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            following = self._goto[state].get(char)
            if following is None:
                following = len(self._goto)
                self._goto.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
                self._goto[state][char] = following
            state = following
        self._match[state] = string

    def _link(self) -> list[int]:
        """Returns for each state the state of its longest proper end, and lets matches shine through these links."""
        fail = [0] * len(self._goto)
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._goto[state].items():
                fallback = fail[state]
                while fallback and char not in self._goto[fallback]:
                    fallback = fail[fallback]
                fail[following] = self._goto[fallback].get(char, 0)
                if self._match[following] is None:
                    self._match[following] = self._match[fail[following]]
                queue.append(following)
        return fail

    def idle_until(self, text: str) -> int:
        """Returns the index of the first character of ``text`` that begins a stop string, or its length."""
        found = self._first.search(text) if self._first is not None else None
        return len(text) if found is None else found.start()

    def advance(self, state: int, char: str) -> int:
        """Returns the state after ``char``."""
        goto = self._goto
        while char not in goto[state]:
            if not state:
                return 0
            state = self._fail[state]
        return goto[state][char]

    def depth(self, state: int) -> int:
        """Returns how many of the last characters could become a stop string."""
        return self._depth[state]

    def match(self, state: int) -> str | None:
        """Returns the longest stop string that is complete in ``state``."""
        return self._match[state]


class StopMatcher:
    """Searches one text for `StopStrings`."""

    __slots__ = ("_held", "_state", "_stops", "stopped_by")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, text: str) -> str:
        """Adds text and returns what is certainly before any stop string.

        When a stop string is complete, `stopped_by` is set, and what is returned ends before it; no more may be pushed.
        """
        stops = self._stops
        state = self._state
        start = 0
        if not state:
            start = stops.idle_until(text)
            if start == len(text):
                return text
        known = self._held + text
        offset = len(self._held)
        for index in range(start, len(text)):
            state = stops.advance(state, text[index])
            found = stops.match(state)
            if found is not None:
                self.stopped_by = found
                self._held = ""
                return known[: offset + index + 1 - len(found)]
        self._state = state
        cut = len(known) - stops.depth(state)
        self._held = known[cut:]
        return known[:cut]

    def flush(self) -> str:
        """Returns what was held back, when no more text comes."""
        held, self._held, self._state = self._held, "", 0
        return held
