"""``POST /v1/responses``: OpenAI's newer shape, and how its items map to the messages of a chat request."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from tercet_frontend.schemas.asked import SessionFields
from tercet_frontend.schemas.chat import ChatRequest
from tercet_frontend.schemas.kinds import JsonObject, kind_of, refuse_kind
from tercet_frontend.schemas.messages import MAX_ALL_PARTS, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Effort, FunctionName
from tercet_frontend.schemas.ranges import MIN_P, SOME_TOKENS, TEMPERATURE, TOP_K, TOP_P
from tercet_frontend.schemas.structured import grammar_of
from tercet_frontend.schemas.unbuilt import Neutral, refuse_unbuilt
from tercet_frontend.schemas.validation import Strict, Text
from tercet_shared.errors import InvalidRequestError

if TYPE_CHECKING:
    from tercet_shared.structured import Grammar

MAX_METADATA = 16
"""Pairs of ``metadata``; keys have at most 64 characters and values 512, as in OpenAI's API."""

_FIELDS: dict[str, Neutral] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "moderation": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
}
"""Fields of the request that are not built; see `refuse_unbuilt`."""

Include: TypeAlias = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""What may be asked for. All but log-probabilities are about what does not occur in answers here, and add nothing."""

_ITEMS = frozenset({"message", "function_call", "function_call_output", "reasoning"})
_TEXTS = frozenset({"input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"})


class TextContent(Strict):
    """A part of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


class RefusalContent(Strict):
    """A part of an earlier answer."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """The refusal."""
        return self.refusal


_Parts = Annotated[list[TextContent | RefusalContent], Field(max_length=MAX_PARTS, fail_fast=True)]


class MessageItem(Strict):
    """A message, of the client or of an earlier answer."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | _Parts


class FunctionCallItem(Strict):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Annotated[Text, Field(min_length=1)]
    name: FunctionName
    arguments: Text


class FunctionCallOutputItem(Strict):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: Annotated[Text, Field(min_length=1)]
    output: Text | _Parts


class ReasoningText(Strict):
    """A part of what the model thought."""

    type: Literal["reasoning_text", "summary_text"] | None = None
    text: Text


_Thoughts = Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)]


class ReasoningItem(Strict):
    """What the model thought before what follows. Without its content, a summary stands in for it."""

    type: Literal["reasoning"]
    summary: _Thoughts | None = None
    content: _Thoughts | None = None

    @property
    def text(self) -> str:
        """The thoughts."""
        return "".join(part.text for part in self.content or self.summary or ())


def _kind(raw: Any) -> str | None:
    return kind_of(raw) or "message"  # the one that needs no type


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedTool(Strict):
    """Names a function of ``tools``."""

    type: Literal["function"]
    name: FunctionName


class AllowedTools(Strict):
    """Leaves the model only some of ``tools``."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class PlainFormat(Strict):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """What follows a JSON schema."""

    type: Literal["json_schema"]
    name: Text
    json_schema: JsonObject = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class TextConfig(Strict):
    """What the answer's text looks like."""

    format: Annotated[PlainFormat | JsonObjectFormat | JsonSchemaFormat, Discriminator("type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Accepted, without effect.")


class ReasoningConfig(Strict):
    """How the model thinks. Thoughts are returned as they are; summaries are not made."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Accepted, without effect.")


class ResponsesStreamOptions(Strict):
    """Options of a streamed answer."""

    include_obfuscation: bool | None = Field(None, description="Accepted, without effect: nothing is padded.")


class ResponsesChat(ChatRequest):
    """A chat request that was made of a `ResponsesRequest`: errors name that one's fields."""

    def requested_max_tokens(self) -> tuple[int | None, str]:
        """See `GenerationFields`."""
        return self.max_tokens, "max_output_tokens"

    @cached_property
    def grammar(self) -> Grammar | None:
        """See `GenerationFields`."""
        found = grammar_of(self.response_format, None, {})
        return None if found is None else replace(found, param="text.format")


class ResponsesRequest(SessionFields):
    """Input to be answered, by itself or after an earlier response."""

    model: Text = Field(description="Name of a served model.")
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="A user's message, or items."
    )
    instructions: Text | None = Field(None, description="A system message for this response alone.")
    previous_response_id: Text | None = Field(None, description="A stored response that the input follows.")
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = Field(
        None, description="Output tokens at most, thoughts included.", json_schema_extra=SOME_TOKENS
    )
    max_tool_calls: int | None = Field(None, description="Accepted, without effect: it is about built-in tools.")
    temperature: float | None = Field(None, description="0 takes the most likely token.", json_schema_extra=TEMPERATURE)
    top_p: float | None = Field(
        None, description="Draw from the most likely tokens of this total probability.", json_schema_extra=TOP_P
    )
    top_k: int | None = Field(
        None, description="Draw from this many most likely tokens; 0 or -1: from all.", json_schema_extra=TOP_K
    )
    min_p: float | None = Field(
        None, description="Drop tokens below this share of the best one's probability.", json_schema_extra=MIN_P
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[Include], Field(max_length=100, fail_fast=True)] | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto leaves out the oldest turns when the conversation is too long."
    )
    metadata: dict[str, Text] | None = None
    store: bool | None = Field(None, description="Keep the response for what follows it; true by default.")
    stream: bool | None = Field(None, description="Answer as server-sent events.")
    stream_options: ResponsesStreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _unbuilt(cls, raw: Any) -> Any:
        refuse_unbuilt(raw, _FIELDS)
        _refuse_kinds(raw)
        return raw

    @model_validator(mode="after")
    def _sizes(self) -> ResponsesRequest:
        pairs = self.metadata or {}
        if len(pairs) > MAX_METADATA or any(len(key) > 64 or len(value) > 512 for key, value in pairs.items()):
            raise InvalidRequestError(
                f"metadata has at most {MAX_METADATA} pairs, keys of 64 characters and values of 512.",
                param="metadata",
            )
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def chat(self, items: list[Item]) -> dict[str, Any]:
        """Returns the body of the chat request that asks for an answer to ``items`` and to nothing else."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": chat_messages(self.instructions, items),
            "stream": bool(self.stream),
        }
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
            value = getattr(self, name)
            if value is not None:
                body[name] = value
        if self.max_output_tokens is not None:
            body["max_tokens"] = self.max_output_tokens
        if self.wants_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.reasoning is not None and self.reasoning.effort is not None:
            body["reasoning_effort"] = self.reasoning.effort
        form = self.text.format if self.text is not None else None
        if isinstance(form, JsonSchemaFormat):
            schema = {"name": form.name, "schema": form.json_schema, "strict": form.strict}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif isinstance(form, JsonObjectFormat):
            body["response_format"] = {"type": "json_object"}
        self._tools(body)
        return body

    def _tools(self, body: dict[str, Any]) -> None:
        choice = self.tool_choice
        if self.tools:
            body["tools"] = [_chat_tool(tool) for tool in self.tools]
        if isinstance(choice, AllowedTools):
            allowed = [_named(tool) for tool in choice.tools]
            body["tool_choice"] = {"type": choice.type, choice.type: {"mode": choice.mode, "tools": allowed}}
        elif choice is not None:
            body["tool_choice"] = choice if isinstance(choice, str) else _named(choice)
        if self.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = self.parallel_tool_calls


def chat_messages(instructions: str | None, items: list[Item]) -> list[dict[str, Any]]:
    """Returns the items as chat messages.

    Thoughts, text and calls of one answer are items of their own, and one message of the assistant.

    Raises:
        InvalidRequestError: a call's output comes without its call.
    """
    result: list[dict[str, Any]] = []
    if instructions:
        result.append({"role": "system", "content": instructions})
    open_answer: dict[str, Any] | None = None  # the assistant's message that the next item may belong to
    called: set[str] = set()

    def answer() -> dict[str, Any]:
        nonlocal open_answer
        if open_answer is None:
            open_answer = {"role": "assistant", "content": ""}
            result.append(open_answer)
        return open_answer

    for index, item in enumerate(items):
        if isinstance(item, ReasoningItem):
            if open_answer is not None and (open_answer["content"] or "tool_calls" in open_answer):
                open_answer = None  # a new answer begins with its thoughts
            message = answer()
            message["reasoning_content"] = message.get("reasoning_content", "") + item.text
        elif isinstance(item, FunctionCallItem):
            called.add(item.call_id)
            function = {"name": item.name, "arguments": item.arguments}
            answer().setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, FunctionCallOutputItem):
            open_answer = None
            if item.call_id not in called:
                path = f"input[{index}].call_id"
                raise InvalidRequestError(f"{path}: there is no call of this id before its output.", param=path)
            result.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif item.role == "assistant":
            if open_answer is not None and (open_answer["content"] or "tool_calls" in open_answer):
                open_answer = None
            answer()["content"] += _text(item.content)
        else:
            open_answer = None
            result.append({"role": item.role, "content": _content(item.content)})
    return result


def _text(content: str | list[TextContent | RefusalContent]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _content(content: str | list[TextContent | RefusalContent]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content] or ""


def _named(tool: NamedTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    for name in ("description", "parameters", "strict"):
        value = getattr(tool, name)
        if value is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _refuse_kinds(raw: Any) -> None:
    """Raises `InvalidRequestError` for kinds of items, parts and tools that OpenAI knows and that are not built."""
    if not isinstance(raw, dict):
        return
    items = raw.get("input")
    parts = 0
    for index, item in enumerate(items[:MAX_MESSAGES] if isinstance(items, list) else ()):
        if not isinstance(item, dict):
            continue
        path = f"input[{index}]"
        refuse_kind(item, _ITEMS, path, "items")
        for name in ("content", "output"):
            content = item.get(name)
            if isinstance(content, list):
                parts += len(content)
                for position, part in enumerate(content[:MAX_PARTS]):
                    refuse_kind(part, _TEXTS, f"{path}.{name}[{position}]", "parts")
    if parts > MAX_ALL_PARTS:
        raise InvalidRequestError(f"input: at most {MAX_ALL_PARTS} parts are allowed in all.", param="input")
    tools = raw.get("tools")
    refuse_kind(raw.get("tool_choice"), {"function", "allowed_tools"}, "tool_choice", "choices")
    for index, tool in enumerate(tools[:MAX_TOOLS] if isinstance(tools, list) else ()):
        refuse_kind(tool, frozenset({"function"}), f"tools[{index}]", "tools")
