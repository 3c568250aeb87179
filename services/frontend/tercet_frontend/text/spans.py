"""Which token brought which bytes of the text, and when all of them have been given out.

The bytes of all tokens joined are the text in UTF-8; ill-formed ones are U+FFFD in the text. Tokens may begin and end
within a code point. The cost per token is constant: at most three bytes, and so at most three tokens with any, wait for
what comes next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

Span: TypeAlias = tuple[bytes, int]
"""What a token adds to the text, and the characters of the text before it."""


class Spelled(NamedTuple):
    """What a decoder made of one token.

    Attributes:
        text: that the token completed.
        raw: its own bytes in the text.
        before: bytes of earlier tokens that were held back when it came; the text begins with them.
        held: how many of the last bytes, over all tokens, are held back now; any number above 0 where the decoder does
            not know.
        replaces: what earlier tokens held back is in ``raw`` (or in no text), and they have no bytes any more.
    """

    text: str
    raw: bytes
    before: bytes
    held: int
    replaces: bool


@dataclass(slots=True)
class _Token:
    raw: bytes
    offset: int
    before: bytes
    text: str
    needs: int | None  # characters that must be given out before it is; None while some of its bytes are held back


class TokenSpans:
    """The tokens of one text, from when they are decoded until their text has been given out."""

    __slots__ = ("_length", "_open", "_waiting")

    def __init__(self) -> None:
        self._length = 0  # characters that were decoded
        self._waiting: deque[_Token] = deque()
        self._open: list[_Token] = []  # those of `_waiting` with bytes that are held back

    def add(self, spelled: Spelled) -> None:
        """Adds a token."""
        if spelled.replaces:
            for token in self._open:
                token.raw = b""
        token = _Token(spelled.raw, self._length, spelled.before, spelled.text, None)
        self._length += len(spelled.text)
        self._waiting.append(token)
        self._open.append(token)
        self._settle(spelled.held)

    def add_textless(self) -> None:
        """Adds a token that stays out of the text."""
        self._waiting.append(_Token(b"", self._length, b"", "", self._length))

    def finish(self, text: str) -> None:
        """Adds what was decoded when no more tokens came; none, if what was held back is no text."""
        self._length += len(text)
        if self._open:
            last = self._open[-1]
            last.text += text
            if not text:
                for token in self._open:
                    token.raw = b""
            elif not any(token.raw for token in self._open):  # the decoder does not know its tokens' bytes
                last.raw = text.encode()
        self._settle(0)

    def released(self, given_out: int) -> list[Span]:
        """Removes and returns the first tokens, up to those whose text is not among the ``given_out`` characters."""
        spans: list[Span] = []
        waiting = self._waiting
        while waiting and (needs := waiting[0].needs) is not None and needs <= given_out:
            token = waiting.popleft()
            spans.append((token.raw, token.offset))
        return spans

    def cut(self, given_out: int) -> list[Span]:
        """Removes and returns all tokens; the text ends after ``given_out`` characters, and what is behind is dropped.

        Tokens that stand behind the end have no bytes then.
        """
        spans = self.released(given_out)
        rest = list(self._waiting)
        self._waiting.clear()
        self._open.clear()
        raws = _shortened(rest, given_out)
        return spans + [(raw, min(token.offset, given_out)) for raw, token in zip(raws, rest, strict=True)]

    def _settle(self, held: int) -> None:
        """Finds out which tokens have no byte among the last ``held`` ones."""
        still: list[_Token] = []
        for token in reversed(self._open):
            if held > 0 and (token.raw or not still):
                still.append(token)
                held -= len(token.raw)
            else:
                token.needs = self._length
        self._open = still[::-1]


def _shortened(tokens: Sequence[_Token], given_out: int) -> list[bytes]:
    """Returns the bytes of ``tokens`` that are in the first ``given_out`` characters of the text."""
    if not tokens or tokens[0].offset >= given_out:
        return [b""] * len(tokens)
    text = "".join([token.text for token in tokens])[: given_out - tokens[0].offset]
    before = tokens[0].before
    data = before + b"".join([token.raw for token in tokens])
    # From the end: where a U+FFFD stands for several bytes, all of them belong to it.
    ends = range(len(data), len(before), -1)
    end = next((end for end in ends if data[:end].decode("utf-8", "replace") == text), len(before))
    room = end - len(before)
    raws = []
    for token in tokens:
        raws.append(token.raw[:room])
        room -= len(raws[-1])
    return raws
