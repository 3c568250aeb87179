"""Answers as chat completions, whole and in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from tercet_frontend.api.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from tercet_frontend.parsing.events import Content, Event, Reasoning, ToolCallBegin
from tercet_frontend.sse import Chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_frontend.api.answers import AnswerHead, Detail, Ending, FinishedChoice, PromptDetail, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """What one request's answer has beyond the text.

    Attributes:
        names: how tokens are written.
        echo: what every choice's content begins with, before what is generated.
        logprobs: alternatives per token; None leaves log-probabilities out.
        prompt_logprobs: the same for the prompt.
        token_ids: with the ids of prompt and output.
        include_usage: a stream ends with the usage.
        continuous_usage: every chunk has the usage so far.
    """

    identity_prefix = "chatcmpl-"

    names: TokenNames
    echo: str = ""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    def chunks(self, head: AnswerHead) -> ChatChunks:
        """Returns the encoder of a streamed answer."""
        return ChatChunks(self, head)

    def body(self, head: AnswerHead, choices: Sequence[FinishedChoice], usage: Usage) -> dict[str, Any]:
        """Returns a whole answer."""
        first = choices[0].detail
        return {
            "id": head.identity,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [
                {
                    "index": choice.index,
                    "message": _message(choice, self.echo),
                    "finish_reason": choice.ending.reason,
                    "stop_reason": choice.ending.stop,
                    **self.token_fields(choice.detail),
                }
                for choice in choices
            ],
            **self.prompt_fields(None if first is None else first.prompt),
            "usage": usage.as_openai(),
        }

    def token_fields(self, detail: Detail | None) -> dict[str, Any]:
        """Returns what a choice says about ``detail``'s tokens."""
        fields: dict[str, Any] = {"logprobs": None}
        if detail is not None:
            if self.logprobs is not None:
                fields["logprobs"] = chat_logprobs(self.names, detail, self.logprobs)
            if self.token_ids:
                fields["token_ids"] = detail.ids
        return fields

    def prompt_fields(self, prompt: PromptDetail | None) -> dict[str, Any]:
        """Returns what the answer says about the prompt."""
        fields: dict[str, Any] = {}
        if prompt is not None:
            if self.prompt_logprobs is not None:
                fields["prompt_logprobs"] = prompt_logprobs(self.names, prompt, self.prompt_logprobs)
            if self.token_ids:
                fields["prompt_token_ids"] = prompt.ids.tolist()
        return fields


class ChatChunks(Chunks):
    """Events of ``/v1/chat/completions``."""

    def __init__(self, shape: ChatShape, head: AnswerHead) -> None:
        super().__init__(
            head,
            "chat.completion.chunk",
            include_usage=shape.include_usage,
            continuous_usage=shape.continuous_usage,
        )
        self._shape = shape
        self._heads: list[bytes] = []
        self._tail = b'},"logprobs":null,"finish_reason":null}' + self._suffix
        self._knows_prompt = False

    def opening(self, index: int) -> bytes:
        """Returns the event that names the role."""
        return self._written(index, {"role": "assistant", "content": self._shape.echo}, None)

    def events(self, index: int, events: Sequence[Event], detail: Detail | None) -> bytes:
        """Returns the events for more of a choice."""
        if detail is None and len(events) == 1 and isinstance(event := events[0], Content):
            heads = self._heads
            while len(heads) <= index:
                heads.append(self._prefix + b'{"index":%d,"delta":{"content":' % len(heads))
            return heads[index] + orjson.dumps(event.text) + self._tail
        # The tokens of all of them go with the last.
        *before, last = events
        return b"".join(
            [
                *(self._written(index, _delta(event), None, detail) for event in before),
                self._written(index, _delta(last), detail, detail),
            ]
        )

    def end(self, index: int, ending: Ending, detail: Detail | None) -> bytes:
        """Returns the event that ends a choice."""
        return self._written(index, {}, detail, detail, ending)

    def _written(
        self,
        index: int,
        delta: dict[str, Any],
        tokens: Detail | None,
        counts: Detail | None = None,
        ending: Ending | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, **self._shape.token_fields(tokens)}
        choice["finish_reason"] = None if ending is None else ending.reason
        if ending is not None:
            choice["stop_reason"] = ending.stop
        extra: dict[str, Any] = {}
        if tokens is not None and tokens.prompt is not None and not self._knows_prompt:
            self._knows_prompt = True
            extra = self._shape.prompt_fields(tokens.prompt)
        return self.chunk(choice, 0 if counts is None else counts.output_tokens, extra)


def _message(choice: FinishedChoice, echo: str) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in choice.tool_calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": echo + choice.content, "refusal": None}
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = calls
    if reasoning := choice.reasoning:
        # Clients look for one name or the other.
        message["reasoning_content"] = message["reasoning"] = reasoning
    return message


def _delta(event: Event) -> dict[str, Any]:
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text, "reasoning": event.text}
    if isinstance(event, ToolCallBegin):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
