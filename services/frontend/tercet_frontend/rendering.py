"""From a chat request to what the model's template is given, and to how the answer will be read.

Where the template knows no tools, they are described in the first message, in the form that the parser reads, and calls
and results of earlier turns are written into the messages: so any model can be asked to call functions, and an enforced
choice works on any model.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tercet_frontend.parsing.grammar import Callee, Thinking, after_thinking, calls_grammar
from tercet_frontend.parsing.parser import ParserPlan
from tercet_frontend.parsing.reasoning import Opening
from tercet_frontend.parsing.registry import HERMES, PLAIN, knows_tools
from tercet_shared.checkpoint.template import ChatTemplate
from tercet_shared.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tercet_frontend.parsing.tools.base import ToolFormat
    from tercet_frontend.schemas.chat import ChatRequest
    from tercet_frontend.schemas.messages import Message, Tool
    from tercet_frontend.tokenizing import ModelText
    from tercet_shared.structured import Grammar

_WANTS_TEXT = re.compile(r"""[+~]\s*[\w.\[\]'"]*\barguments['"]?\]?\s*[+~]""")
"""A template that puts arguments between texts needs them as text; the others are written for objects."""

_MAX_DEPTH = 100
"""Nesting of arguments up to which they are handed to templates as objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a template is given: the arguments of `ChatTemplate.render`, and the template if it is the request's own.

    Attributes:
        size: about how much text it is, in characters.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    size: int = 0


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat request, understood.

    Attributes:
        text: of the model.
        fields: the request.
        conversation: for the template.
        tools: how calls are read; None where none are.
    """

    text: ModelText
    fields: ChatRequest
    conversation: Conversation
    tools: ToolFormat | None

    def parser(self, prompt: str) -> ParserPlan | None:
        """Returns what makes the parsers of the choices that follow ``prompt``; None where all is content."""
        reasoning = self.text.reasoning_format
        if reasoning is None and self.tools is None:
            return None
        markers = [marker for form in (reasoning, self.tools) if form is not None for marker in form.markers]
        ids = (self.text.special_id(marker) for marker in markers)
        return ParserPlan(
            reasoning=reasoning,
            opening=self._opening(prompt),
            keep_reasoning=self.fields.include_reasoning is not False,
            tools=self.tools,
            offered=frozenset(tool.function.name for tool in self.fields.callable_tools),
            max_calls=1 if self.fields.one_call_only else None,
            only_calls=self.fields.called_choice == "required",
            shown_token_ids=frozenset(token for token in ids if token is not None),
        )

    def grammar(self, prompt: str) -> Grammar | None:
        """Returns what the answer to ``prompt`` must look like; None where it is free.

        Raises:
            InvalidRequestError: the grammar of the request cannot be combined with reasoning.
        """
        reasoning = self.text.reasoning_format
        thinking = None if reasoning is None else Thinking(reasoning, self._opening(prompt))
        special = self.text.special_id
        enforced = self.fields.called_choice == "required"
        wanted = None if enforced else self.fields.grammar
        if self.tools is not None and self.tools.layout is not None and (enforced or wanted is not None):
            callees = [
                Callee(tool.function.name, tool.function.parameters, bool(tool.function.strict))
                for tool in self.fields.callable_tools
            ]
            many = not self.fields.one_call_only
            return calls_grammar(self.tools.layout, callees, special, many=many, thinking=thinking, otherwise=wanted)
        return wanted if wanted is None or thinking is None else after_thinking(wanted, thinking, special)

    def _opening(self, prompt: str) -> Opening:
        reasoning = self.text.reasoning_format
        if reasoning is None:
            return Opening.NEVER
        if self.conversation.continue_final_message:
            return reasoning.opening_within(self.fields.messages[-1].text or "")
        return reasoning.opening(prompt)


def plan_chat(text: ModelText, fields: ChatRequest) -> ChatPlan:
    """Returns the plan of a request.

    Raises:
        InvalidRequestError: the model has no template, or its template or the settings do not allow what is asked for.
    """
    if text.chat_template is None and fields.chat_template is None:
        raise InvalidRequestError("This model has no chat template; use /v1/completions.", param="messages")
    source = _template_text(text, fields)
    tools = _tool_format(text, fields)
    shown = fields.tools if fields.called_choice != "none" else None
    native = knows_tools(source)
    if native:
        messages = _native_messages(source, fields.messages)
    else:
        messages = _described_messages(source, fields.messages, shown, tools or text.tool_format or HERMES)
    described = [_tool_json(tool) for tool in shown] if shown else None
    size = sum(len(message.get("content") or "") + 100 for message in messages)
    # The rest is in the messages already, or has to be written.
    for value in (described if native else None, fields.documents, fields.chat_template_kwargs):
        size += len(json.dumps(value)) if value else 0
    conversation = Conversation(
        messages=messages,
        tools=described if native else None,
        documents=_documents(source, fields),
        variables=_variables(source, fields),
        add_generation_prompt=fields.add_generation_prompt is not False and not fields.continue_final_message,
        continue_final_message=bool(fields.continue_final_message),
        template=fields.chat_template,
        size=size,
    )
    return ChatPlan(text, fields, conversation, tools)


def compiled(text: ModelText, conversation: Conversation) -> ChatTemplate:
    """Returns the template of a conversation; compiles one that the request brought along.

    Raises:
        InvalidRequestError: it is not valid.
    """
    if conversation.template is None:
        if text.chat_template is None:
            raise InvalidRequestError("This model has no chat template; use /v1/completions.", param="messages")
        return text.chat_template
    try:
        return ChatTemplate(
            {"default": conversation.template}, text.tokenizer.special.template_variables(), "the request"
        )
    except CheckpointError as error:
        raise InvalidRequestError(str(error), param="chat_template") from None


# ---------------------------------------------------------------------------------------------------- what is allowed


def _template_text(text: ModelText, fields: ChatRequest) -> str:
    if fields.chat_template is not None:
        if not text.trust_request_template:
            raise InvalidRequestError(
                "chat_template is not allowed here; the server takes templates from requests only with "
                "--trust-request-chat-template.",
                param="chat_template",
            )
        return fields.chat_template
    return "" if text.chat_template is None else text.chat_template.text


def _tool_format(text: ModelText, fields: ChatRequest) -> ToolFormat | None:
    choice = fields.called_choice
    if choice == "none":
        return None
    if text.tool_format is None:
        if choice == "required":
            raise InvalidRequestError(
                "tool_choice cannot be enforced: no tool call parser fits this model.", param="tool_choice"
            )
        return None
    # Where arguments are not JSON, a grammar makes them so, and they are read as that.
    with_grammar = choice == "required" or fields.grammar is not None
    return PLAIN if with_grammar and text.tool_format.layout is None else text.tool_format


def _documents(source: str, fields: ChatRequest) -> list[dict[str, Any]] | None:
    if not fields.documents:
        return None
    if "documents" not in source:
        raise InvalidRequestError("The model's chat template does not take documents.", param="documents")
    return fields.documents


def _variables(source: str, fields: ChatRequest) -> dict[str, Any]:
    """Returns the template's further variables; what it does not know is refused unless it changes nothing."""
    variables: dict[str, Any] = {}
    effort, thinks = fields.reasoning_effort, fields.enable_thinking
    if thinks is None and effort is not None and "enable_thinking" in source:
        variables["enable_thinking"] = effort != "none"
    if effort is not None:
        if "reasoning_effort" in source:
            variables["reasoning_effort"] = effort
        elif effort != "none" and "enable_thinking" not in source:
            raise InvalidRequestError(
                "reasoning_effort has no effect on this model: its chat template does not take it.",
                param="reasoning_effort",
            )
    if thinks is not None:
        if "enable_thinking" not in source and thinks:
            raise InvalidRequestError(
                "enable_thinking has no effect on this model: its chat template does not take it.",
                param="enable_thinking",
            )
        variables["enable_thinking"] = thinks
    return {**variables, **(fields.chat_template_kwargs or {})}


# --------------------------------------------------------------------------------- messages for templates with tools


def _native_messages(source: str, messages: Sequence[Message]) -> list[dict[str, Any]]:
    as_text = _WANTS_TEXT.search(source) is not None
    # Some templates tell calls from answers by the missing content; others concatenate it.
    empty = None if re.search(r"content['\"]?\]? is none", source) else ""
    names: dict[str, str] = {}
    result = []
    for message in messages:
        given = _plain_message(source, message)
        if given["content"] is None:
            given["content"] = empty if message.tool_calls else ""
        if message.tool_calls:
            given["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.arguments if as_text else _arguments(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
            names.update((call.id, call.function.name) for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id is not None:
            given["tool_call_id"] = message.tool_call_id
            if message.name is None and message.tool_call_id in names:
                given["name"] = names[message.tool_call_id]
        result.append(given)
    return result


def _plain_message(source: str, message: Message) -> dict[str, Any]:
    role: str = message.role
    # OpenAI's newer name for the system role; most models were not trained on it.
    if role == "developer" and "developer" not in source:
        role = "system"
    given: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        given["name"] = message.name
    if message.thoughts is not None:
        # Templates know it by one name or the other.
        given["reasoning_content"] = given["thinking"] = message.thoughts
    return given


def _arguments(text: str) -> Any:
    """Returns arguments as an object, as most templates expect them; as they are where they are none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) and not _too_deep(value) else text


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def _tool_json(tool: Tool) -> dict[str, Any]:
    function = tool.function
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": described}


# ------------------------------------------------------------------------------ messages for templates without tools


def _described_messages(
    source: str, messages: Sequence[Message], tools: Sequence[Tool] | None, form: ToolFormat
) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    last_role = ""
    for message in messages:
        given = _plain_message(source, message)
        content = given["content"] or ""
        if message.tool_calls:
            calls = form.written([(call.function.name, call.function.arguments) for call in message.tool_calls])
            content = f"{content}\n{calls}" if content else calls
        elif message.role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if last_role == "tool":
                result[-1]["content"] += f"\n{content}"
                continue
            given = {"role": "user"}
        result.append({**given, "content": content})
        last_role = message.role
    if tools:
        description = _description(tools, form)
        if result[0]["role"] in ("system", "developer"):
            result[0]["content"] = f"{result[0]['content']}\n\n{description}".lstrip()
        else:
            result.insert(0, {"role": "system", "content": description})
    return result


def _description(tools: Sequence[Tool], form: ToolFormat) -> str:
    schemas = "\n".join(json.dumps(_tool_json(tool), ensure_ascii=False) for tool in tools)
    example = form.written([("<name>", "<arguments as a JSON object>")])
    return (
        "You have functions. Each line between the tags describes one, with a JSON schema of its arguments.\n"
        f"<tools>\n{schemas}\n</tools>\n\n"
        "To call a function, write exactly this, with its name and its arguments filled in:\n"
        f"{example}\n\n"
        "What it returns comes back between <tool_response> tags. Where no function helps, answer directly."
    )
