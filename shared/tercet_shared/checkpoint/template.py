"""Chat templates: Jinja programs from the checkpoint that turn messages into a prompt.

They behave as in Transformers (``utils/chat_template_utils.py``): the same environment, filters and functions. They are
code from strangers fed with text from strangers, so they run in Jinja's immutable sandbox, and the size of what they
make is bounded.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tercet_shared.errors import CheckpointError, TemplateError, bounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2.parser import Parser

MAX_RENDERED = 16 << 20
"""Characters of a rendered prompt; far above any context, below what hurts."""

_MAX_MESSAGE = 500
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""What a template raises when the messages are not what it expects."""


class ChatTemplate:
    """The templates of one checkpoint, compiled. May be rendered from several threads at once.

    Attributes:
        sources: Template texts by name; one of several is ``default``, ``tool_use`` is preferred where tools are given.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str], where: str) -> None:
        """Compiles the templates.

        Args:
            sources: Template texts by name.
            variables: What every rendering sees: ``bos_token``, ``eos_token`` …
            where: The file they come from, for errors.

        Raises:
            CheckpointError: A template is not valid Jinja.
        """
        self.sources = dict(sources)
        self._variables = dict(variables)
        environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}
        for name, text in self.sources.items():
            try:
                self._compiled[name] = environment.from_string(text)
            except (jinja2.TemplateError, RecursionError) as error:
                line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
                reason = bounded(str(error), _MAX_MESSAGE)
                raise CheckpointError(f"The chat template {name!r} of {where} is not valid{line}: {reason}.") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        limit: int = MAX_RENDERED,
    ) -> str:
        """Returns the prompt for a conversation.

        Args:
            messages: Plain JSON values. Keys whose value is None are left out, as in Transformers.
            add_generation_prompt: Ends with the opening of the assistant's turn.
            tools: JSON schemas of functions.
            variables: Further variables for the template, e.g. ``enable_thinking``; they win over the tokenizer's.
            limit: Characters of the result.

        Raises:
            TemplateError: The template refused the messages, failed on them, or made more than ``limit`` characters.
        """
        context = {
            **self._variables,
            **(variables or {}),
            "messages": [{key: value for key, value in message.items() if value is not None} for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._choose(tools).generate(context):
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    raise TemplateError(
                        f"The rendered conversation is longer than {limit} characters.", param="messages"
                    )
        except _FAILURES as error:
            reason = bounded(str(error) or type(error).__name__, _MAX_MESSAGE)
            raise TemplateError(
                f"The model's chat template refused the conversation: {reason}", param="messages"
            ) from None
        return "".join(pieces)

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        if tools and "tool_use" in self._compiled:
            return self._compiled["tool_use"]
        return self._compiled["default"]


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` … ``{% endgeneration %}`` marks the assistant's text for training; here it is rendered."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares a set

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the block into a scope around its body."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a bound on what multiplication and powers may build before anything is rendered."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Computes ``left * right`` or ``left ** right``."""
        sizes = [len(side) for side in (left, right) if isinstance(side, (str, list, tuple))]
        counts = [side for side in (left, right) if isinstance(side, int)]
        if operator == "*" and sizes and counts and sizes[0] * counts[0] > MAX_RENDERED:
            raise SecurityError(f"a value is longer than {MAX_RENDERED}")
        if operator == "**" and (abs(left) > 1_000_000 or abs(right) > 1_000):
            raise SecurityError("a power is too large")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002, RUF100  # templates pass it by position or name
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002, RUF100  # as above
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
