"""Chat templates: Jinja programs from the checkpoint that turn messages into a prompt.

They behave as in Transformers (``utils/chat_template_utils.py``): the same environment, filters and functions. They are
code from strangers fed with text from strangers, so they run in Jinja's immutable sandbox, and the work that they do
and the size of what they make are bounded (`tercet_shared.checkpoint.template_environment`).
"""

from __future__ import annotations

from dataclasses import dataclass
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import jinja2

from tercet_shared.checkpoint.template_environment import MAX_LENGTH, Budget, BudgetError, create_environment
from tercet_shared.errors import CheckpointError, InvalidRequestError, TemplateError, bounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_RENDERED = MAX_LENGTH
"""Characters of a rendered prompt."""

MAX_STEPS, MAX_SECONDS = 1_000_000, 10.0
"""Work of one rendering: far above what ten thousand messages take. Its thread is free again after that time."""

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


class TemplateBudgetError(TemplateError):
    """The template did not finish within its limits."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one rendering may use.

    Attributes:
        characters: of the result.
        steps: iterations and calls.
        seconds: of time.
    """

    characters: int = MAX_RENDERED
    steps: int = MAX_STEPS
    seconds: float = MAX_SECONDS


class ChatTemplate:
    """The templates of one checkpoint, compiled. May be rendered from several threads at once.

    Attributes:
        sources: Template texts by name; one of several is ``default``, ``tool_use`` is preferred where tools are given.
        text: All of them, to look for what they mention.
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
        self.text = "\n".join(self.sources.values())
        self._variables = dict(variables)
        environment = create_environment()
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
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        limits: RenderLimits | None = None,
    ) -> str:
        """Returns the prompt for a conversation.

        Args:
            messages: Plain JSON values. Keys whose value is None are left out, but for ``content``.
            add_generation_prompt: Ends with the opening of the assistant's turn.
            continue_final_message: Ends within the last message, right after its content, as in Transformers.
            tools: JSON schemas of functions.
            documents: For templates that show texts to be answered from.
            variables: Further variables for the template, e.g. ``enable_thinking``; they win over the tokenizer's.
            limits: What it may use.

        Raises:
            TemplateError: The template refused the messages, failed on them, or made too much text.
            TemplateBudgetError: It did too much work.
            InvalidRequestError: The last message cannot be continued.
        """
        limits = limits or RenderLimits()
        given = [_given(message) for message in messages]
        mark = _marked(given) if continue_final_message else None
        context = {
            **self._variables,
            **(variables or {}),
            "messages": given,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        rendered = self._render(self._choose(tools), context, limits)
        return rendered if mark is None else _cut(rendered, mark)

    def _render(self, template: jinja2.Template, context: Mapping[str, Any], limits: RenderLimits) -> str:
        pieces: list[str] = []
        size = 0
        try:
            with Budget(limits.steps, limits.seconds).running():
                for piece in template.generate(context):
                    pieces.append(piece)
                    size += len(piece)
                    if size > limits.characters:
                        raise TemplateError(
                            f"The rendered conversation is longer than {limits.characters} characters.",
                            param="messages",
                        )
        except BudgetError:
            raise TemplateBudgetError(
                "The model's chat template takes too long for this conversation.", param="messages"
            ) from None
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


def _given(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _marked(messages: list[dict[str, Any]]) -> str:
    """Marks the end of the last message's content; returns the mark, which nobody can have written before."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise InvalidRequestError("The last message has no text that could be continued.", param="messages")
    mark = f"[end {token_hex(16)}] "
    messages[-1]["content"] = content + mark
    return mark


def _cut(rendered: str, mark: str) -> str:
    """Returns what comes before the mark; if the template took off the space at its end, then also that before it."""
    before, found, after = rendered.rpartition(mark.rstrip())
    if not found:
        raise TemplateError(
            "The last message cannot be continued: the model's chat template leaves it out.", param="messages"
        )
    return before if after.startswith(" ") else before.rstrip()
