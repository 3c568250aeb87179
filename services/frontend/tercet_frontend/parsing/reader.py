"""Text as it comes, for parsers that are written as if it were all there.

A parser is a generator: it yields where it needs more text and is resumed when there is some, or when none will come.
Every primitive here waits for no more than it needs to decide and looks at each character a bounded number of times, so
the whole is linear in the text, and what a parser does depends on the text alone, not on how it was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]
"""A part of a parser: yields for more text, returns a result."""

Emit: TypeAlias = Callable[[str], None]
"""Takes a piece of text, not empty."""

SPACE = " \t\r\n"

_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[A-Za-z0-9_-]*")
_WITHIN = {quote: re.compile(rf"(?:[^{quote}\\]+|\\.)*", re.DOTALL) for quote in ('"', "'")}
_SCALAR = re.compile(r"[0-9A-Za-z+\-._]*")
_BETWEEN = re.compile(r"[ \t\r\n0-9A-Za-z:,+\-.]+")
_CLOSERS = {"{": "}", "[": "]"}

_LONGEST_KEY = 400
"""Characters of a quoted name: 64, each written as an escape, and then some."""


class Markers:
    """Strings that are looked for together.

    Args:
        texts: none is part of another, so that the first to be complete is the first to have begun.
    """

    def __init__(self, *texts: str) -> None:
        if any(one in other for one in texts for other in texts if one is not other):
            raise ValueError(f"one of the markers {texts} is part of another")
        self._texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)))

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """Returns the first marker at or after ``start``."""
        return self._pattern.search(text, start)

    def unfinished(self, text: str, start: int) -> int:
        """Returns where a marker may have begun that ``text`` does not complete; the end of the text if none has."""
        first = len(text)
        for marker in self._texts:
            at = text.find(marker[0], max(start, len(text) - len(marker) + 1))
            while at >= 0 and not marker.startswith(text[at:]):
                at = text.find(marker[0], at + 1)
            if at >= 0:
                first = min(first, at)
        return first


class Reader:
    """The text of one choice, read once from front to end."""

    __slots__ = ("_at", "_ended", "_held", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._held: list[str] | None = None

    # ------------------------------------------------------------------------------------------- for who has the text

    def feed(self, text: str) -> None:
        """Adds text. What is unread before it is shorter than the longest string that a parser compares with."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Says that no more comes."""
        self._ended = True

    # ------------------------------------------------------------------------------------------- for parsers: holding

    def hold(self, text: str = "") -> None:
        """Begins to remember what is read, after ``text``, which was; until `release` or `drop`."""
        self._held = [text] if text else []

    def release(self) -> str:
        """Returns what was read since `hold`: it was not what it looked like."""
        held = "".join(self._held or ())
        self._held = None
        return held

    def drop(self) -> None:
        """Forgets what was read since `hold`."""
        self._held = None

    # ------------------------------------------------------------------------------------------- for parsers: reading

    def more(self) -> Steps[bool]:
        """Waits for a character; returns False when there is none left."""
        while self._at >= len(self._text):
            if self._ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """Returns the next character without reading it; empty at the end."""
        return self._text[self._at] if (yield from self.more()) else ""

    def literal(self, text: str) -> Steps[bool]:
        """Reads ``text`` if it is what comes next; otherwise reads nothing and returns False."""
        while True:
            piece = self._text[self._at : self._at + len(text)]
            if piece == text:
                self._take(len(text))
                return True
            if self._ended or not text.startswith(piece):
                return False
            yield

    def any_of(self, *texts: str) -> Steps[str]:
        """Reads the first of ``texts`` that comes next and returns it; empty if none does."""
        for text in texts:
            if (yield from self.literal(text)):
                return text
        return ""

    def closing(self, text: str) -> Steps[bool]:
        """Reads ``text`` as `literal` does; at the end of everything, its beginning will do."""
        if (yield from self.literal(text)):
            return True
        rest = self._text[self._at :]
        if self._ended and rest and text.startswith(rest):
            self._take(len(rest))
            return True
        return False

    def space(self) -> Steps[None]:
        """Reads white space, all that there is."""
        yield from self._run(_SPACE, None)

    def word(self, limit: int) -> Steps[str | None]:
        """Reads letters, digits, ``_`` and ``-``; returns them, or None if there are none or more than ``limit``."""
        word = yield from self._run(_WORD, limit)
        return word if word and len(word) <= limit else None

    def scalar(self, limit: int) -> Steps[str]:
        """Reads a number or a word; returns it, or nothing if there is none or it is longer than ``limit``."""
        scalar = yield from self._run(_SCALAR, limit)
        return scalar if len(scalar) <= limit else ""

    def until(self, markers: Markers, emit: Emit) -> Steps[str]:
        """Passes text on up to a marker, reads it, and returns it; returns nothing when there is none to the end."""
        while True:
            found = markers.find(self._text, self._at)
            if found is not None:
                self._pass(found.start(), emit)
                self._at = found.end()
                return found.group()
            self._pass(len(self._text) if self._ended else markers.unfinished(self._text, self._at), emit)
            if self._ended:
                return ""
            yield

    def rest(self, emit: Emit) -> Steps[None]:
        """Passes on everything to the end."""
        while (yield from self.more()):
            self._pass(len(self._text), emit)

    def key(self) -> Steps[str | None]:
        """Reads a short JSON string; returns its value, or None where it is not one."""
        pieces: list[str] = []
        if not (yield from self.literal('"')) or not (yield from self.quoted('"', pieces.append, _LONGEST_KEY)):
            return None
        try:
            value = json.loads(f'"{"".join(pieces)}"')
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    def quoted(self, quote: str, emit: Emit, limit: int | None = None) -> Steps[bool]:
        """Passes text on up to ``quote``, which is read; what follows a backslash is text.

        Args:
            quote: one quotation mark, or three of the same.
            emit: takes the text, with its backslashes.
            limit: characters of it.

        Returns:
            Whether the closing quote came, within the limit.
        """
        within = _WITHIN[quote[0]]
        size = 0
        while (yield from self.more()):
            if self._text[self._at] == quote[0]:
                if (yield from self.literal(quote)):
                    return True
                emit(self._take(1))
                continue
            found = within.match(self._text, self._at)
            end = self._at if found is None else found.end()
            if end == self._at:  # a backslash, and what it escapes has not come
                if self._ended:
                    self._pass(len(self._text), emit)
                    return False
                yield
                continue
            size += end - self._at
            if limit is not None and size > limit:
                return False
            self._pass(end, emit)
        return False

    def json(self, emit: Emit) -> Steps[bool]:
        """Passes one JSON value on, verbatim and as it comes.

        Strings and brackets are followed, and characters that JSON does not have outside of strings are not read. That
        is what it takes to find the end; whether the value is quite correct is its reader's business.

        Returns:
            Whether the value is complete.
        """
        closers: list[str] = []
        while (yield from self.more()):
            char = self._text[self._at]
            if char == '"':
                emit(self._take(1))
                if not (yield from self.quoted('"', emit)):
                    return False
                emit('"')
            elif char in _CLOSERS:
                closers.append(_CLOSERS[char])
                emit(self._take(1))
            elif closers and char == closers[-1]:
                closers.pop()
                emit(self._take(1))
            elif closers:
                found = _BETWEEN.match(self._text, self._at)
                if found is None:
                    return False
                self._pass(found.end(), emit)
                continue
            else:
                return bool((yield from self._run(_SCALAR, None, emit)))
            if not closers:
                return True
        return False

    # ------------------------------------------------------------------------------------------- parts of the above

    def _take(self, count: int) -> str:
        piece = self._text[self._at : self._at + count]
        self._at += count
        if self._held is not None:
            self._held.append(piece)
        return piece

    def _pass(self, end: int, emit: Emit) -> None:
        if end > self._at:
            emit(self._take(end - self._at))

    def _run(self, pattern: re.Pattern[str], limit: int | None, emit: Emit | None = None) -> Steps[str]:
        """Reads characters of one kind until another comes, or there are more than ``limit``; returns them."""
        pieces: list[str] = []
        size = 0
        while (yield from self.more()):
            found = pattern.match(self._text, self._at)
            if found is None or not found.group():
                break
            piece = self._take(len(found.group()))
            pieces.append(piece)
            if emit is not None:
                emit(piece)
            size += len(piece)
            if self._at < len(self._text) or (limit is not None and size > limit):
                break
        return "".join(pieces)
