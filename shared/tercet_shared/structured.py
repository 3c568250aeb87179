"""What an answer's text must look like: a grammar, as it travels from the front end to the core that enforces it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tercet_shared.errors import InvalidRequestError

MAX_GRAMMAR_BYTES = 256 * 1024
"""UTF-8 bytes of one grammar's text."""


class GrammarKind(Enum):
    """The language that a grammar is written in; the values are those of ``tercet.v1.GrammarKind``."""

    JSON_SCHEMA = 1  # a JSON schema; {"type": "object"} is any JSON object
    REGEX = 2  # a regular expression that the whole answer matches
    CHOICE = 3  # a JSON list of strings, one of which is the answer
    LARK = 4  # llguidance's dialect of Lark, with `%json {...}` and special tokens as <|name|>
    EBNF = 5  # GBNF, as llama.cpp and vLLM take it


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar.

    Attributes:
        kind: its language.
        text: it.
        param: the request's field that it came from, which errors name.
    """

    kind: GrammarKind
    text: str
    param: str = "response_format"

    def check(self) -> None:
        """Raises `InvalidRequestError` when the text is empty or too long; whether it is sound is the core's to say."""
        if not self.text:
            raise InvalidRequestError(f"{self.param} is empty.", param=self.param)
        if len(self.text.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(f"{self.param} is larger than {MAX_GRAMMAR_BYTES} bytes.", param=self.param)
