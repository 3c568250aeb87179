"""The messages of a conversation, the functions that its answer may call, and how a template writes it all down."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from tercet_frontend.schemas.unbuilt import MESSAGE, refuse_unbuilt
from tercet_frontend.schemas.validation import Strict, Text
from tercet_shared.errors import InvalidRequestError, bounded

MAX_MESSAGES = 10_000
"""Messages of one conversation: far above what a context holds, below what takes noticeable time to check."""

MAX_PARTS = 1_000
"""Parts of one message."""

MAX_ALL_PARTS = 10_000
"""Parts of all messages together, and their tool calls, for the same reason."""

MAX_TOOLS = 128
"""Functions of one request, and calls of one message."""

MAX_TOOLS_BYTES = 200_000
"""Bytes of all functions of a request as JSON: less than what a grammar may have."""

MAX_VARIABLES, MAX_VARIABLES_BYTES = 64, 64_000
"""Variables that a request may give the template, and bytes of them as JSON."""

MAX_DOCUMENTS, MAX_DOCUMENTS_BYTES = 1_000, 1_000_000
MAX_TEMPLATE = 100_000
"""Characters of a chat template that a request brings along."""

_RESERVED = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "documents", "messages", "tokenize", "tools",
})  # fmt: skip
"""What requests say in fields of their own, or not at all."""

_ROLES = ("system", "developer", "user", "assistant", "tool")

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}\z")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(Strict):
    """A part of a message; text is the only kind."""

    type: Literal["text"]
    text: Text


class CalledFunction(Strict):
    """What an earlier answer called."""

    name: FunctionName
    arguments: Text


class MessageToolCall(Strict):
    """A call in an earlier answer."""

    id: Annotated[Text, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = Field(None, description="What the assistant thought before it answered.")
    reasoning: Text | None = Field(None, description="Another name of reasoning_content.")

    @property
    def text(self) -> str | None:
        """The content as one string; parts are put on lines of their own. None where there is none."""
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)

    @property
    def thoughts(self) -> str | None:
        """The reasoning, whichever its name."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments, which are an object.")
    strict: bool | None = Field(
        None, description="With an enforced call, refuse schemas that cannot be enforced in full."
    )

    @field_validator("parameters")
    @classmethod
    def _an_object(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if parameters and parameters.get("type", "object") != "object":
            raise ValueError("The type of the arguments as a whole must be object")
        return parameters


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    """A function by its name."""

    name: FunctionName


class NamedTool(Strict):
    """Makes the answer a call of this function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(Strict):
    """Functions that may be called, of those that the model sees."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(Strict):
    """Leaves the model only some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def _kind_of_choice(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in ("function", "allowed_tools") else "mode"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(_kind_of_choice),
]


class ConversationFields(Strict):
    """What a request says about its prompt and its tools."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="False allows one call at most.")
    add_generation_prompt: bool | None = Field(None, description="End the prompt with the opening of the answer.")
    continue_final_message: bool | None = Field(None, description="Continue the last message instead of a new one.")
    chat_template: Annotated[Text, Field(max_length=MAX_TEMPLATE)] | None = Field(
        None, description="Another template, where the server trusts those of requests."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the template.")
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None
    reasoning_effort: Effort | None = Field(None, description="How long to think, where the template knows.")
    enable_thinking: bool | None = Field(None, description="Whether to think, where the template knows.")
    include_reasoning: bool | None = Field(None, description="False leaves the reasoning out of the answer.")

    @property
    def called_choice(self) -> Literal["none", "auto", "required"]:
        """Whether functions are called: not, as the model likes, or in any case."""
        choice = self.tool_choice
        if not self.tools or choice == "none":
            return "none"
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode
        return "auto" if choice in (None, "auto") else "required"

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that may be called, in the order in which they were given."""
        choice = self.tool_choice
        tools = self.tools or []
        if isinstance(choice, NamedTool):
            return [tool for tool in tools if tool.function.name == choice.function.name]
        if isinstance(choice, AllowedTools):
            names = {tool.function.name for tool in choice.allowed_tools.tools}
            return [tool for tool in tools if tool.function.name in names]
        return tools

    @property
    def one_call_only(self) -> bool:
        """Whether at most one function is called."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)

    @model_validator(mode="before")
    @classmethod
    def _messages_fit(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and isinstance(raw.get("messages"), list):
            _check_messages(raw["messages"])
        return raw

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _known_choice(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(value, dict) and kind not in ("function", "allowed_tools"):
            raise InvalidRequestError("tool_choice.type must be function or allowed_tools.", param="tool_choice.type")
        return value

    @model_validator(mode="after")
    def _tools_fit(self) -> ConversationFields:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise InvalidRequestError("tools has two functions of one name.", param="tools")
        if self.tools:
            _check_size("tools", [tool.model_dump() for tool in self.tools], MAX_TOOLS_BYTES)
        choice = self.tool_choice
        if choice == "required" and not names:
            raise InvalidRequestError("tool_choice required needs tools.", param="tool_choice")
        chosen: list[NamedTool] = [choice] if isinstance(choice, NamedTool) else []
        if isinstance(choice, AllowedTools):
            chosen = choice.allowed_tools.tools
        known = set(names)
        for tool in chosen:
            if tool.function.name not in known:
                name = bounded(tool.function.name, 100)
                raise InvalidRequestError(f"tool_choice names {name!r}, which is not in tools.", param="tool_choice")
        return self

    @model_validator(mode="after")
    def _template_fits(self) -> ConversationFields:
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message and add_generation_prompt exclude each other.",
                    param="continue_final_message",
                )
            if self.messages[-1].role != "assistant" or not self.messages[-1].text:
                raise InvalidRequestError(
                    "continue_final_message needs a last message of the assistant with text.",
                    param="continue_final_message",
                )
        _check_size("documents", self.documents, MAX_DOCUMENTS_BYTES)
        _check_size("chat_template_kwargs", self.chat_template_kwargs, MAX_VARIABLES_BYTES)
        variables = self.chat_template_kwargs or {}
        reserved = sorted(_RESERVED & variables.keys())
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {reserved[0]}.", param=f"chat_template_kwargs.{reserved[0]}"
            )
        if len(variables) > MAX_VARIABLES:
            raise InvalidRequestError(
                f"chat_template_kwargs: at most {MAX_VARIABLES} variables are allowed.", param="chat_template_kwargs"
            )
        return self


def _check_size(name: str, value: Any, limit: int) -> None:
    """Refuses JSON that is larger than ``limit`` bytes, or nested deeper than can be written."""
    try:
        size = len(orjson.dumps(value))
    except TypeError:
        raise InvalidRequestError(f"{name} is nested too deeply.", param=name) from None
    if size > limit:
        raise InvalidRequestError(f"{name} is larger than {limit} bytes.", param=name)


def _check_messages(messages: list[Any]) -> None:
    """Refuses, in messages as they were sent, what is known and not built, and fields that their roles do not have.

    Raises:
        InvalidRequestError: names the field.
    """
    parts = 0
    for index, message in enumerate(messages[:MAX_MESSAGES]):
        if isinstance(message, dict):
            path = f"messages[{index}]"
            refuse_unbuilt(message, MESSAGE, f"{path}.")
            _check_role(message, path)
            parts += _count_parts(message, path)
    if parts > MAX_ALL_PARTS:
        raise InvalidRequestError(
            f"messages: at most {MAX_ALL_PARTS} parts of content and tool calls are allowed in all.", param="messages"
        )


def _check_role(message: dict[str, Any], path: str) -> None:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        return  # the schema says so
    for name in ("tool_calls", "reasoning_content", "reasoning"):
        if message.get(name) and role != "assistant":
            raise InvalidRequestError(f"{path}.{name}: only messages of the assistant have it.", param=f"{path}.{name}")
    # An answer with nothing but reasoning comes back without content.
    if message.get("content") is None and role != "assistant":
        raise InvalidRequestError(f"{path}.content: a message of the role {role} needs it.", param=f"{path}.content")
    if (role == "tool") != bool(message.get("tool_call_id")):
        reason = "a message of the role tool needs it" if role == "tool" else "only messages of the role tool have it"
        raise InvalidRequestError(f"{path}.tool_call_id: {reason}.", param=f"{path}.tool_call_id")


def _count_parts(message: dict[str, Any], path: str) -> int:
    content, calls = message.get("content"), message.get("tool_calls")
    for number, part in enumerate(content[:MAX_PARTS] if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            where = f"{path}.content[{number}].type"
            raise InvalidRequestError(f"{where}: {bounded(kind, 50)!r} is not supported, only text is.", param=where)
    return sum(len(value) for value in (content, calls) if isinstance(value, list))
