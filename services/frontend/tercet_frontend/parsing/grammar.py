"""Grammars that leave a model no way but to call functions, in the syntax that its family's parser reads.

Written in llguidance's dialect of Lark: ``%json {…}`` is a value of a JSON schema, ``<[5]>`` a special token by its id.
White space within arguments is fixed as templates write it, so that no model can lose itself in blanks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from tercet_frontend.parsing.reasoning import Opening
from tercet_shared.errors import InvalidRequestError
from tercet_shared.structured import Grammar, GrammarKind

if TYPE_CHECKING:
    from tercet_frontend.parsing.reasoning import ReasoningFormat
    from tercet_frontend.parsing.tools.base import Layout

MOST_CALLS = 32
"""Calls of one enforced answer."""

SpecialId: TypeAlias = Callable[[str], int | None]
"""The id of a special token of that text; None where the text is no token or an ordinary one."""

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Callee:
    """A function that an enforced answer may call.

    Attributes:
        name: its name.
        parameters: JSON schema of its arguments, an object's; None or empty where it takes none.
        strict: parts of the schema that grammars cannot express are refused, not left out.
    """

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning that an answer may have before what a grammar says."""

    form: ReasoningFormat
    opening: Opening


def calls_grammar(
    layout: Layout,
    callees: Sequence[Callee],
    special: SpecialId,
    *,
    many: bool,
    thinking: Thinking | None = None,
    otherwise: Grammar | None = None,
) -> Grammar:
    """Returns the grammar of an answer that is nothing but calls.

    Args:
        layout: how calls are written.
        callees: functions that may be called, at least one.
        special: the tokenizer's special tokens.
        many: allows several calls, `MOST_CALLS` at most; otherwise there is one.
        thinking: what may come before.
        otherwise: what the answer may be instead.

    Raises:
        InvalidRequestError: ``otherwise`` is of a kind that cannot be embedded.
    """
    write = _Writer(special)
    body = [*write.text(layout.opening), "call"]
    if many:
        more = " ".join([*write.text(layout.between), "call"])
        write.rule("more", more)
        body.append(f"more{{0,{MOST_CALLS - 1}}}")
    body += write.text(layout.closing)
    write.rule("call", " | ".join(f"call_{index}" for index in range(len(callees))))
    for index, callee in enumerate(callees):
        parts = [*write.text(layout.head(callee.name)), f"arguments_{index}", *write.text(layout.after)]
        write.rule(f"call_{index}", " ".join(parts))
        write.rule(f"arguments_{index}", f"%json {json.dumps(_schema(callee), ensure_ascii=False)}")
    write.rule("calls", " ".join(body))
    if otherwise is None:
        return Grammar(GrammarKind.LARK, write.grammar("calls", thinking), param="tool_choice")
    write.rule("answer", _embedded(otherwise))
    write.rule("either", "calls | answer")
    return Grammar(GrammarKind.LARK, write.grammar("either", thinking), param=otherwise.param)


def after_thinking(grammar: Grammar, thinking: Thinking, special: SpecialId) -> Grammar:
    """Returns ``grammar`` with the reasoning that may come before; itself where none may.

    Raises:
        InvalidRequestError: it is of a kind that cannot be embedded.
    """
    if thinking.opening is Opening.NEVER:
        return grammar
    write = _Writer(special)
    write.rule("answer", _embedded(grammar))
    return Grammar(GrammarKind.LARK, write.grammar("answer", thinking), param=grammar.param)


class _Writer:
    """Collects rules."""

    def __init__(self, special: SpecialId) -> None:
        self._special = special
        self._rules: list[str] = []

    def rule(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def text(self, text: str) -> list[str]:
        """Returns the symbols for a fixed text, in which markup may be special tokens."""
        symbols = []
        for part in re.split(r"(<[^<>\s]+>|\[[A-Z_/]+\])", text):
            token = self._special(part) if part else None
            if token is not None:
                symbols.append(f"<[{token}]>")
            elif part:
                symbols.append(json.dumps(part, ensure_ascii=False))
        return symbols

    def grammar(self, body: str, thinking: Thinking | None) -> str:
        if thinking is not None and thinking.opening is not Opening.NEVER:
            body = f"{self._thinking(thinking)} {body}"
        return "\n".join([f"start: {body}", *self._rules, ""])

    def _thinking(self, thinking: Thinking) -> str:
        """Writes the rules of the reasoning; returns its symbol."""
        closing = self._special(thinking.form.closes)
        if closing is None:
            suffix = json.dumps(thinking.form.closes)
            self._rules.append(f"thoughts[suffix={suffix}]: /(?s:.*)/")
        else:
            self._rules.append(f"thoughts: /(?s:.*)/ <[{closing}]>")
        self.rule("gap", r"/\n{0,2}/")
        if thinking.opening is Opening.PROMPT:
            self.rule("thinking", "thoughts gap")
            return "thinking"
        self.rule("thinking", " ".join([*self.text(thinking.form.opens), "thoughts", "gap"]))
        return "thinking?"


def _schema(callee: Callee) -> dict[str, Any]:
    schema = dict(callee.parameters) if callee.parameters else dict(_NO_ARGUMENTS)
    # Enforced arguments are an object in any case.
    schema.setdefault("type", "object")
    return {**schema, "x-guidance": {**_OPTIONS, "lenient": not callee.strict}}


def _answer_schema(grammar: Grammar) -> dict[str, Any]:
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"{grammar.param} is not valid JSON.", param=grammar.param) from None
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{grammar.param}: a JSON schema must be an object.", param=grammar.param)
    return {**schema, "x-guidance": _OPTIONS}


def _embedded(grammar: Grammar) -> str:
    """Returns a grammar as the body of a rule."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return f"%json {json.dumps(_answer_schema(grammar), ensure_ascii=False)}"
    if grammar.kind is GrammarKind.REGEX:
        return f"/{_lark_regex(grammar.text)}/"
    if grammar.kind is GrammarKind.CHOICE:
        return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.text))
    if grammar.kind is GrammarKind.LARK:
        return f"%lark {{\n{grammar.text}\n}}"
    raise InvalidRequestError(
        f"{grammar.param}: a grammar in GBNF cannot be combined with tools or reasoning; write it in Lark.",
        param=grammar.param,
    )


def _lark_regex(regex: str) -> str:
    """Returns a regular expression as it is written between slashes."""
    return re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), regex, flags=re.DOTALL)
