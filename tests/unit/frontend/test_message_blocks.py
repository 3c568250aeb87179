"""Anthropic's shape: from turns to chat messages, and from the parser's events to blocks."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tercet_frontend.api.answers import AnswerHead, Ending, FinishedChoice, Usage
from tercet_frontend.api.message_blocks import MessagesShape
from tercet_frontend.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from tercet_frontend.schemas.anthropic import MessagesRequest
from tercet_frontend.schemas.validation import validate
from tercet_shared.errors import InvalidRequestError

HEAD = AnswerHead(identity="msg_1", created=0, model="m", prompt_tokens=10)
USAGE = Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=4)
EVENTS: list[Event] = [
    Reasoning("Hm. "),
    Content("Let me "),
    Content("see."),
    ToolCallBegin(0, "a", "f"),
    ToolCallArguments(0, '{"x":'),
    ToolCallArguments(0, "1}"),
    ToolCallBegin(1, "b", "g"),
    Content("Done."),
]


def chat(messages: list[Any], **more: Any) -> list[dict[str, Any]]:
    fields = validate(MessagesRequest, {"model": "m", "max_tokens": 1, "messages": messages, **more})
    found: list[dict[str, Any]] = fields.chat()["messages"]
    return found


def test_blocks_of_a_stream() -> None:
    events = MessagesShape().chunks(HEAD)
    written = events.opening(0) + b"".join(events.events(0, [event], None) for event in EVENTS)
    written += events.end(0, Ending("tool_calls", None, 5), None) + events.usage(USAGE) + events.done()
    found = [orjson.loads(block.split(b"data: ")[1]) for block in written.strip().split(b"\n\n")]
    starts = [event for event in found if event["type"] == "content_block_start"]
    assert [event["content_block"]["type"] for event in starts] == [
        "thinking", "text", "tool_use", "tool_use", "text"
    ]  # fmt: skip
    assert [event["index"] for event in starts] == list(range(5))
    # Every block is ended before the next begins.
    open_block = None
    for event in found:
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
    assert open_block is None
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"] == {
        "input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 5
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"x":1}', {"x": 1}),
        ('{"x":', {"INVALID_JSON": '{"x":'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("", {}),
    ],
)
def test_arguments_of_a_whole_answer(arguments: str, given: Any) -> None:
    events: list[Event] = [ToolCallBegin(0, "a", "f")]
    if arguments:
        events.append(ToolCallArguments(0, arguments))
    body = MessagesShape().body(HEAD, [FinishedChoice(0, events, Ending("length", None, 5), None)], USAGE)
    assert body["content"] == [{"type": "tool_use", "id": "a", "name": "f", "input": given}]
    assert body["stop_reason"] == "max_tokens"


def test_turns_of_one_role_are_one_message() -> None:
    assert chat(
        [
            {"role": "user", "content": "One"},
            {"role": "user", "content": [{"type": "text", "text": "Two"}]},
            {"role": "assistant", "content": "Three"},
            {"role": "assistant", "content": [{"type": "text", "text": " Four"}]},
            {"role": "user", "content": "Five"},
        ],
        system="Six",
    ) == [
        {"role": "system", "content": "Six"},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]},
        {"role": "assistant", "content": "Three Four"},
        {"role": "user", "content": "Five"},
    ]


def test_results_are_messages_of_their_own() -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"ü": [1]}}
    results = [
        {"type": "tool_result", "tool_use_id": "a"},
        {"type": "text", "text": "Next"},
        {"type": "tool_result", "tool_use_id": "b", "content": [], "is_error": True},
    ]
    assert chat([{"role": "assistant", "content": [call]}, {"role": "user", "content": results}]) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"ü": [1]}'}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "Next"}]},
        {"role": "tool", "tool_call_id": "b", "content": ""},
    ]


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("user", {"type": "thinking", "thinking": "x", "signature": ""}),
        ("assistant", {"type": "tool_result", "tool_use_id": "a"}),
    ],
)
def test_blocks_in_the_wrong_place(role: str, block: Any) -> None:
    with pytest.raises(InvalidRequestError):
        chat([{"role": role, "content": [block]}])
