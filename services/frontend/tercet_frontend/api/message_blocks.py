"""Answers of ``/v1/messages``: content blocks, whole or as Anthropic's events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from tercet_frontend.api.errors import messages_error_body
from tercet_frontend.parsing.events import Content, Reasoning, ToolCallArguments, ToolCallBegin
from tercet_shared.errors import status_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_frontend.api.answers import AnswerHead, Detail, Ending, FinishedChoice, Usage
    from tercet_frontend.parsing.events import Event
    from tercet_shared.errors import TercetError

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesShape:
    """Answers as messages; they have one choice."""

    identity_prefix = "msg_"

    def chunks(self, head: AnswerHead) -> MessageEvents:
        """Returns the encoder of a streamed answer."""
        return MessageEvents(head)

    def body(self, head: AnswerHead, choices: Sequence[FinishedChoice], usage: Usage) -> dict[str, Any]:
        """Returns a whole answer."""
        (choice,) = choices
        return _message(head) | {"content": _blocks(choice.events), **_end(choice.ending), "usage": _usage(usage)}


class MessageEvents:
    """Events of one streamed answer. A block is open from its first event to the first one of another kind."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._index = -1  # of the latest block
        self._open: type[Event] | None = None  # what the open block is made of: for calls, ToolCallBegin
        self._ending: Ending | None = None

    def opening(self, index: int) -> bytes:  # noqa: ARG002  # see ChunkEncoder
        """Returns the start of the message."""
        # What of the prompt was cached is known at the end: usage is corrected there.
        usage = {"input_tokens": self._head.prompt_tokens, "output_tokens": 0}
        message = _message(self._head) | {"usage": usage}
        return _event("message_start", message=message) + _event("ping")

    def events(self, index: int, events: Sequence[Event], detail: Detail | None) -> bytes:  # noqa: ARG002
        """Returns deltas, and what lies between blocks."""
        found: list[bytes] = []
        for event in events:
            if isinstance(event, ToolCallBegin):
                found.append(self._begin(ToolCallBegin, _call(event, {})))
            elif isinstance(event, ToolCallArguments):
                found.append(self._delta({"type": "input_json_delta", "partial_json": event.text}))
            elif isinstance(event, Content):
                if self._open is not Content:
                    found.append(self._begin(Content, {"type": "text", "text": ""}))
                found.append(self._delta({"type": "text_delta", "text": event.text}))
            else:
                if self._open is not Reasoning:
                    found.append(self._begin(Reasoning, {"type": "thinking", "thinking": "", "signature": ""}))
                found.append(self._delta({"type": "thinking_delta", "thinking": event.text}))
        return b"".join(found)

    def end(self, index: int, ending: Ending, detail: Detail | None) -> bytes:  # noqa: ARG002
        """Ends the last block; why the message ends comes with the usage."""
        self._ending = ending
        return self._close()

    def usage(self, usage: Usage) -> bytes:
        """Returns the event with the end of the message and its usage."""
        delta = _end(self._ending) if self._ending is not None else {}
        return _event("message_delta", delta=delta, usage=_usage(usage))

    def done(self) -> bytes:
        """Returns the last event."""
        return _event("message_stop")

    def error(self, error: TercetError) -> bytes:
        """Returns the event that is the last when the request fails."""
        return (
            b"event: error\ndata: " + orjson.dumps(messages_error_body(status_of(error).http, error.message)) + b"\n\n"
        )

    def _begin(self, kind: type[Event], block: dict[str, Any]) -> bytes:
        closing = self._close()
        self._index += 1
        self._open = kind
        return closing + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def _message(head: AnswerHead) -> dict[str, Any]:
    return {
        "id": head.identity,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _end(ending: Ending) -> dict[str, Any]:
    if isinstance(ending.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop}
    return {"stop_reason": _STOP_REASONS.get(ending.reason, "end_turn"), "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, int]:
    # Anthropic counts what was read from the cache apart.
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _blocks(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Returns the blocks of a whole answer; neighbouring events of one kind are joined already."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, ToolCallBegin):
            blocks.append(_call(event, {}))
        elif isinstance(event, ToolCallArguments):
            blocks[-1]["input"] = _input(event.text)
        elif isinstance(event, Content):
            blocks.append({"type": "text", "text": event.text})
        else:
            blocks.append({"type": "thinking", "thinking": event.text, "signature": ""})
    return blocks


def _call(event: ToolCallBegin, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": event.id, "name": event.name, "input": arguments}


def _input(text: str) -> dict[str, Any]:
    """Returns a call's arguments as an object. A call that was cut is not JSON: the text is kept under one key."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
