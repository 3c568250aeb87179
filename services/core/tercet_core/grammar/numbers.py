"""Where numbers in JSON end: a grammar lets them have digits without end, and some models go on for ever.

No reader of JSON keeps more digits than these: a number that would get more is ended as its grammar allows it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from tercet_shared.structured import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from tercet_shared.wire.step import U32

MAX_DIGITS: Final = 18
"""Digits before the point, and as many behind it: more than a double or a 64-bit integer holds."""
MAX_EXPONENT_DIGITS: Final = 2
TAIL: Final = 64
"""Last bytes of an output that say whether it is within a number that has all its digits."""

# Numbers follow one of these signs, or stand at the beginning, for which the space stands with which a tail begins.
_FULL: Final = re.compile(
    rb"[\[:, ]-?(?:\d{%d,}|\d+\.\d{%d,}|\d+(?:\.\d+)?[eE][+-]?\d{%d,})\Z"
    % (MAX_DIGITS, MAX_DIGITS, MAX_EXPONENT_DIGITS)
)


def may_hold_numbers(grammar: Grammar) -> bool:
    """Whether texts of a grammar have JSON in them. A grammar that spells its numbers itself means what it says."""
    return grammar.kind is GrammarKind.JSON_SCHEMA or (grammar.kind is GrammarKind.LARK and "%json" in grammar.text)


class NumberLimit:
    """Takes tokens out of masks that would lengthen a number that has all its digits. Immutable."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._digits = _beginning(tokenizer, "[0-9]")
        self._quotes = _beginning(tokenizer, '"')

    def tail(self, tail: bytes, tokens: list[int]) -> bytes:
        """Returns the last bytes of an output, whose last bytes were ``tail`` before ``tokens`` came; b" " at first."""
        return (tail + self._tokenizer.decode_bytes(tokens))[-TAIL:]

    def apply(self, tail: bytes, words: U32) -> None:
        """Takes the digits out of a mask ``[words]`` if something else is left and ``tail`` ends in a full number."""
        if _FULL.search(tail) is None or np.any(words & self._quotes):  # within a string, quotes are allowed
            return
        rest = words & ~self._digits
        if rest.any():
            words[:] = rest


def _beginning(tokenizer: LLTokenizer, pattern: str) -> U32:
    """Returns the tokens, as a mask ``[words]``, that begin with a character of ``pattern``."""
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(f"{pattern}(?s:.*)"), log_level=0)
    words = allocate_token_bitmask(1, tokenizer.vocab_size)
    fill_next_token_bitmask(matcher, words)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    mask: U32 = words[0].view(np.uint32)
    return mask
