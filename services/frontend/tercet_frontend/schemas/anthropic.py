"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, and how they map to a chat request."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from tercet_frontend.schemas.asked import Asked
from tercet_frontend.schemas.common import MAX_STOP_LENGTH, MAX_STOPS
from tercet_frontend.schemas.kinds import JsonObject, kind_of, refuse_kind
from tercet_frontend.schemas.messages import MAX_ALL_PARTS, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, FunctionName
from tercet_frontend.schemas.ranges import SOME_TOKENS, TEMPERATURE, TOP_K, TOP_P
from tercet_frontend.schemas.unbuilt import Neutral, refuse_unbuilt
from tercet_frontend.schemas.validation import Strict, Text
from tercet_shared.errors import InvalidRequestError

_FIELDS: dict[str, Neutral] = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
}
"""Fields of the request that are not built; see `refuse_unbuilt`."""

_BLOCKS = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})


class TextBlock(Strict):
    """Text. Marks for caching and citations are ignored: prefixes are cached without being asked to."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(Strict):
    """What the model thought in an earlier turn; the signature is not looked at."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(Strict):
    """Thinking that only its maker can read; left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Strict):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: Annotated[Text, Field(min_length=1)]
    name: FunctionName
    input: JsonObject


class ToolResultBlock(Strict):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[Text, Field(min_length=1)]
    content: Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    is_error: bool | None = None


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(kind_of),
]


class InputMessage(Strict):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]

    @property
    def blocks(self) -> list[Block]:
        """The content as blocks."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class MessagesTool(Strict):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: JsonObject


class MessagesToolChoice(Strict):
    """Whether, and what, the model is to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> MessagesToolChoice:
        if self.type == "tool" and not self.name:
            raise InvalidRequestError("tool_choice of type tool needs a name.", param="tool_choice.name")
        return self


class Thinking(Strict):
    """Whether the model thinks before it answers; the budget is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class JsonFormat(Strict):
    """A JSON schema that the answer follows."""

    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class OutputConfig(Strict):
    """What the answer looks like."""

    format: JsonFormat | None = None


class MessagesMetadata(Strict):
    """Who asks."""

    user_id: Text | None = Field(None, description="Requests of one user go to one core, where possible.")


class CountTokensRequest(Asked):
    """A conversation whose tokens are counted."""

    model: Text = Field(description="Name of a served model.")
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _unbuilt(cls, raw: Any) -> Any:
        refuse_unbuilt(raw, _FIELDS)
        _refuse_kinds(raw)
        return raw

    def chat(self) -> dict[str, Any]:
        """Returns the conversation as the body of a chat request."""
        body: dict[str, Any] = {"model": self.model, "messages": chat_messages(self.system, self.messages)}
        choice = self.tool_choice
        if self.tools:
            body["tools"] = [_chat_tool(tool) for tool in self.tools]
            body["tool_choice"] = _chat_choice(choice)
            if choice is not None and choice.disable_parallel_tool_use:
                body["parallel_tool_calls"] = False
        elif choice is not None and choice.type in {"any", "tool"}:
            raise InvalidRequestError(f"tool_choice of type {choice.type} needs tools.", param="tool_choice")
        if self.thinking is not None:
            body["enable_thinking"] = self.thinking.type != "disabled"
        if self.messages[-1].role == "assistant":
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        if self.output_config is not None and self.output_config.format is not None:
            schema = self.output_config.format.json_schema
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        return body


class MessagesRequest(CountTokensRequest):
    """A conversation to be continued by the assistant."""

    max_tokens: int = Field(description="Output tokens at most.", json_schema_extra=SOME_TOKENS)
    temperature: float | None = Field(None, description="0 takes the most likely token.", json_schema_extra=TEMPERATURE)
    top_p: float | None = Field(
        None, description="Draw from the most likely tokens of this total probability.", json_schema_extra=TOP_P
    )
    top_k: int | None = Field(None, description="Draw from this many most likely tokens.", json_schema_extra=TOP_K)
    stop_sequences: (
        Annotated[
            list[Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
            Field(max_length=MAX_STOPS, fail_fast=True),
        ]
        | None
    ) = Field(None, description="Strings at which the answer ends; not part of it.")
    stream: bool | None = Field(None, description="Answer as server-sent events.")
    metadata: MessagesMetadata | None = None

    @property
    def session(self) -> str:
        """See `Asked`."""
        return (self.metadata.user_id if self.metadata is not None else None) or ""

    def chat(self) -> dict[str, Any]:
        """Returns the body of the chat request that asks for the same."""
        body = super().chat()
        body |= {"max_tokens": self.max_tokens, "stream": bool(self.stream)}
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        for name in ("temperature", "top_p", "top_k"):
            value = getattr(self, name)
            if value is not None:
                body[name] = value
        if self.stop_sequences:
            body["stop"] = self.stop_sequences
        return body


def chat_messages(system: str | list[TextBlock] | None, messages: list[InputMessage]) -> list[dict[str, Any]]:
    """Returns the turns as chat messages: results of tools are messages of their own, before the text after them.

    Neighbours of one role are one turn, as Anthropic's API has it; many templates allow nothing else.
    """
    result: list[dict[str, Any]] = []
    if system:
        result.append({"role": "system", "content": system if isinstance(system, str) else _parts(system)})
    for message in messages:
        if message.role == "assistant":
            _assistant(result, message)
        else:
            _given(result, message)
    return result


def _given(result: list[dict[str, Any]], message: InputMessage) -> None:
    text: list[TextBlock] = []

    def close() -> None:
        if not text:
            return
        last = result[-1] if result else None
        if message.role == "user" and last is not None and last["role"] == "user":
            last["content"] = [*_as_parts(last["content"]), *_parts(text)]
        else:
            plain = isinstance(message.content, str)
            result.append({"role": message.role, "content": message.content if plain else _parts(text)})
        text.clear()

    for block in message.blocks:
        if isinstance(block, TextBlock):
            text.append(block)
        elif isinstance(block, ToolResultBlock):
            close()
            content = block.content or ""
            result.append(
                {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": content if isinstance(content, str) else _parts(content),
                }
            )
        else:
            raise InvalidRequestError(
                f"messages: a block of type {block.type} belongs into a message of the assistant.", param="messages"
            )
    close()


def _assistant(result: list[dict[str, Any]], message: InputMessage) -> None:
    text: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            text.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            raise InvalidRequestError(
                "messages: a block of type tool_result belongs into a message of the user.", param="messages"
            )
    last = result[-1] if result else None
    if last is None or last["role"] != "assistant":
        last = {"role": "assistant", "content": ""}
        result.append(last)
    last["content"] += "".join(text)
    if thoughts:
        last["reasoning_content"] = last.get("reasoning_content", "") + "".join(thoughts)
    if calls:
        last["tool_calls"] = [*last.get("tool_calls", ()), *calls]


def _parts(blocks: list[TextBlock]) -> list[dict[str, Any]]:
    # A message has at least one part.
    return [{"type": "text", "text": block.text} for block in blocks] or [{"type": "text", "text": ""}]


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _chat_tool(tool: MessagesTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _chat_choice(choice: MessagesToolChoice | None) -> str | dict[str, Any]:
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.type == "any":
        return "required"
    if choice.type == "none":
        return "none"
    return {"type": "function", "function": {"name": choice.name}}


def _refuse_kinds(raw: Any) -> None:
    """Raises `InvalidRequestError` for kinds of blocks and tools that Anthropic knows and that are not built."""
    messages = raw.get("messages") if isinstance(raw, dict) else None
    blocks = 0
    for index, message in enumerate(messages[:MAX_MESSAGES] if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        blocks += len(content)
        for position, block in enumerate(content[:MAX_PARTS]):
            path = f"messages[{index}].content[{position}]"
            refuse_kind(block, _BLOCKS, path, "blocks")
            inner = block.get("content") if isinstance(block, dict) else None
            for place, part in enumerate(inner[:MAX_PARTS] if isinstance(inner, list) else ()):
                refuse_kind(part, frozenset({"text"}), f"{path}.content[{place}]", "blocks")
            blocks += len(inner) if isinstance(inner, list) else 0
    if blocks > MAX_ALL_PARTS:
        raise InvalidRequestError(f"messages: at most {MAX_ALL_PARTS} blocks are allowed in all.", param="messages")
    tools = raw.get("tools") if isinstance(raw, dict) else None
    for index, tool in enumerate(tools[:MAX_TOOLS] if isinstance(tools, list) else ()):
        refuse_kind(tool, frozenset({"custom"}), f"tools[{index}]", "tools")
