"""Token ids to text, one token at a time, in constant time and memory per token.

What a stream yields is never a part of a code point: bytes that could still become one are held back (three at most),
bytes that cannot are given out as U+FFFD at once, so that no run of them stalls a stream or grows a buffer.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

from tercet_frontend.text.pieces import PieceRules, piece_rules
from tercet_frontend.text.spans import Spelled
from tercet_frontend.text.windowed import WindowedDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    from tokenizers import Tokenizer

_LONGEST_INCOMPLETE = 3
"""Bytes of a code point that may be there before its last one comes."""

_MOST_TEXTLESS = 64
"""Ids of the prompt without text (special tokens, ids of no token) that are looked past in search of text. A prompt may
consist of nothing else, and the search is made for every choice."""


class TokenDecoder(Protocol):
    """The text of one output, in pieces."""

    def push(self, token: int) -> str:
        """Returns the text that ``token`` completes; empty when it ends within a code point, or has no text."""

    def flush(self) -> str:
        """Returns what is held back (as U+FFFD), when no more tokens come."""

    def spell(self, token: int) -> Spelled:
        """Does what `push` does, and says which bytes the token brought."""


class Detokenizer:
    """A model's tokenizer, prepared for decoding; shared by all streams of a process.

    Args:
        tokenizer: read only; ids that it does not know have no text.
        shown: special tokens that have text all the same.
    """

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._rules = piece_rules(tokenizer)
        special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        self._special = frozenset(special - shown)
        # Filled as ids occur: what a vocabulary holds is many times what is ever generated.
        self._with_special: dict[int, str | bytes] = {}
        self._without_special: dict[int, str | bytes] = dict.fromkeys(self._special, "")
        self._showing: dict[frozenset[int], Detokenizer] = {}

    def showing(self, tokens: frozenset[int]) -> Detokenizer:
        """Returns a detokenizer that does not skip ``tokens`` with the special ones; made once for each set of them.

        Args:
            tokens: one of the few sets that parsers of answers ask for.
        """
        if not tokens & self._special:
            return self
        if tokens not in self._showing:
            self._showing[tokens] = Detokenizer(self._tokenizer, tokens)
        return self._showing[tokens]

    def decoder(
        self, prompt_ids: Sequence[int] | npt.NDArray[np.int32], *, skip_special_tokens: bool = True
    ) -> TokenDecoder:
        """Returns a decoder for the output that follows ``prompt_ids``."""
        if self._rules is None:
            context = self._tail(prompt_ids, WindowedDecoder.CONTEXT, skip_special_tokens=skip_special_tokens)
            return WindowedDecoder(self._tokenizer, context, hidden=self._special if skip_special_tokens else ())
        table = self._without_special if skip_special_tokens else self._with_special
        pieces = _Pieces(self._tokenizer, self._rules, table)
        return _PieceDecoder(pieces, _unfinished(pieces, prompt_ids), self._strippable(pieces, prompt_ids))

    def raw(self, token: int) -> bytes:
        """Returns the bytes of a token by itself, special or not; they may be a part of a code point.

        An unknown id has none.
        """
        if self._rules is not None:
            return _Pieces(self._tokenizer, self._rules, self._with_special).raw(token)
        try:
            return self._tokenizer.decode([token], skip_special_tokens=False).encode()
        except OverflowError:  # negative, or over 32 bits
            return b""

    def _tail(self, ids: Sequence[int] | npt.NDArray[np.int32], count: int, *, skip_special_tokens: bool) -> list[int]:
        tail: list[int] = []
        for index in range(len(ids) - 1, max(len(ids) - 1 - _MOST_TEXTLESS, -1), -1):
            token = int(ids[index])
            if not (skip_special_tokens and token in self._special):
                tail.append(token)
                if len(tail) == count:
                    break
        return tail[::-1]

    def _strippable(self, pieces: _Pieces, prompt_ids: Sequence[int] | npt.NDArray[np.int32]) -> int:
        """Returns how many leading characters the output may lose: what the prompt's own beginning left over."""
        char, left = pieces.rules.strip
        for token in prompt_ids[:_MOST_TEXTLESS]:
            if not left:
                break
            text = pieces.raw(int(token)).decode("utf-8", "replace")
            rest = text.lstrip(char)
            left = max(left - (len(text) - len(rest)), 0) if not rest else 0
        return left


class _Pieces:
    """The text of single tokens: `str` where they are whole code points, `bytes` where they are not."""

    __slots__ = ("_table", "_tokenizer", "rules")

    def __init__(self, tokenizer: Tokenizer, rules: PieceRules, table: dict[int, str | bytes]) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self.rules = rules

    def __getitem__(self, token: int) -> str | bytes:
        piece = self._table.get(token)
        return self._fill(token) if piece is None else piece

    def raw(self, token: int) -> bytes:
        piece = self[token]
        return piece.encode() if isinstance(piece, str) else piece

    def _fill(self, token: int) -> str | bytes:
        try:
            string = self._tokenizer.id_to_token(token)
        except OverflowError:  # negative, or over 32 bits
            string = None
        raw = b"" if string is None else self.rules.piece(string)
        piece: str | bytes
        try:
            piece = raw.decode()
        except UnicodeDecodeError:
            piece = raw
        if string is not None:  # others are not bounded by the vocabulary
            self._table[token] = piece
        return piece


def _unfinished(pieces: _Pieces, ids: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    """Returns the code point's first bytes with which ``ids`` end, or none."""
    tail = b""
    for index in range(len(ids) - 1, max(len(ids) - 1 - _MOST_TEXTLESS, -1), -1):
        tail = pieces.raw(int(ids[index])) + tail
        if len(tail) >= _LONGEST_INCOMPLETE:
            break
    # A tail that begins within a code point decodes to rubbish there, but never beyond the next first byte.
    tail = tail[-_LONGEST_INCOMPLETE:]
    return tail[codecs.utf_8_decode(tail, "replace", False)[1] :]


class _PieceDecoder:
    """Concatenates the bytes of tokens and decodes them as UTF-8."""

    __slots__ = ("_from_prompt", "_pending", "_pieces", "_strip")

    def __init__(self, pieces: _Pieces, pending: bytes, strip: int) -> None:
        self._pieces = pieces
        self._pending = pending
        # What the prompt left unfinished belongs to the output only if the output finishes it.
        self._from_prompt = bool(pending)
        self._strip = strip

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if not self._pending and isinstance(piece, str):
            return self._stripped(piece) if self._strip else piece
        data = self._pending + (piece.encode() if isinstance(piece, str) else piece)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        if self._from_prompt and text:
            self._from_prompt = False
            if text[0] == "\ufffd":
                text = text[1:]
        return self._stripped(text) if self._strip and text else text

    def spell(self, token: int) -> Spelled:
        before, adjusts = self._pending, self._from_prompt or self._strip > 0
        text = self.push(token)
        held = self._pending
        if not adjusts:
            return Spelled(text, self._pieces.raw(token), before, len(held), replaces=False)
        # The text is not the bytes of the tokens: a space is dropped, or what the prompt left unfinished is at its
        # beginning. What has come out is the token's, whoever began it.
        return Spelled(text, text.encode() + held, b"", len(held), replaces=True)

    def flush(self) -> str:
        held, self._pending = self._pending, b""
        # More than one U+FFFD where Python waits for what could only be a surrogate, which UTF-8 does not have.
        return "" if self._from_prompt else held.decode("utf-8", "replace")

    def _stripped(self, text: str) -> str:
        char = self._pieces.rules.strip[0]
        start = 0
        while start < len(text) and start < self._strip and text[start] == char:
            start += 1
        self._strip = self._strip - start if start == len(text) else 0
        return text[start:]
