"""From the languages that grammars are written in to the one that llguidance compiles.

JSON comes out with one space after each comma and colon that separate and no other white space between its parts, as
``json.dumps`` writes it: a model that may add white space wherever JSON allows it can do so for ever.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from tercet_shared.errors import InvalidRequestError, bounded
from tercet_shared.structured import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_REASON = 500
"""Characters of the compiler's own words in an error; it likes to quote the grammar."""

_JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def refused(grammar: Grammar, reason: str) -> InvalidRequestError:
    """Returns the error that a grammar was refused with."""
    text = bounded(" ".join(reason.replace("<non-verbose/>", "").split()), MAX_REASON)
    return InvalidRequestError(f"{grammar.param} cannot be enforced: {text}", param=grammar.param)


def translate(grammar: Grammar) -> str:
    """Returns a grammar as llguidance takes it. Raises `InvalidRequestError`; what is well-formed may be refused later.

    May take long, and may need a deep stack: it runs where neither matters.
    """
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return _json_schema(grammar)
    if grammar.kind is GrammarKind.REGEX:
        return str(LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind is GrammarKind.CHOICE:
        return _choice(grammar)
    if grammar.kind is GrammarKind.LARK:
        if grammar.text.lstrip().startswith("{"):  # llguidance would read it as its internal format
            raise refused(grammar, "it is not a Lark grammar.")
        return str(LLMatcher.grammar_from_lark(grammar.text))
    return _ebnf(grammar)


def _json(grammar: Grammar) -> Any:
    try:
        return json.loads(grammar.text)
    except RecursionError:
        raise refused(grammar, "it is nested too deeply.") from None
    except ValueError as error:
        raise refused(grammar, f"it is not valid JSON: {error}.") from None


def _json_schema(grammar: Grammar) -> str:
    schema = _json(grammar)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise refused(grammar, "a JSON schema must be an object.")
    schema.pop("x-guidance", None)  # options of the compiler; white space is ours to bound
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS))
    except (ValueError, RecursionError) as error:
        raise refused(grammar, str(error)) from None


def _choice(grammar: Grammar) -> str:
    choices = _json(grammar)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise refused(grammar, "the choices must be a list of strings with at least one entry.")
    # Every character by its number: then none means anything to a regular expression.
    escaped = ("".join(f"\\x{{{ord(character):x}}}" for character in choice) for choice in choices)
    return str(LLMatcher.grammar_from_regex("|".join(escaped)))


def _ebnf(grammar: Grammar) -> str:
    try:
        lark = gbnf_to_lark(grammar.text)
    except RecursionError:
        raise refused(grammar, "it is nested too deeply.") from None
    except Exception as error:  # noqa: BLE001  # the library raises bare Exception for what is undefined
        raise refused(grammar, str(error)) from None
    return str(LLMatcher.grammar_from_lark(lark))
