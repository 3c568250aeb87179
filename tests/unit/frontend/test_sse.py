"""Events: prepared bytes are the JSON that a serializer would write, and streams end once."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_frontend.api.answers import AnswerHead, Detail, Ending, PromptDetail, Usage, joined
from tercet_frontend.api.chat_shape import ChatShape
from tercet_frontend.api.completion_shape import CompletionShape
from tercet_frontend.api.logprobs import TokenNames
from tercet_frontend.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from tercet_frontend.sse import EventStream
from tercet_shared.errors import InternalError

HEAD = AnswerHead(identity="i", created=5, model='a "quoted" \\ model\n🙂', prompt_tokens=7)
NAMES = TokenNames(cast("Any", None), as_ids=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


def _parse(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return dict(orjson.loads(event[6:]))


def _parse_all(events: bytes) -> list[dict[str, Any]]:
    return [_parse(event + b"\n\n") for event in events.split(b"\n\n")[:-1]]


@pytest.mark.parametrize("include_usage", [False, True])
@settings(deadline=None)
@given(TEXT, st.integers(0, 200))
def test_chat_chunks(include_usage: bool, text: str, index: int) -> None:
    chunks = ChatShape(names=NAMES, include_usage=include_usage).chunks(HEAD)
    head = {"id": "i", "object": "chat.completion.chunk", "created": 5, "model": HEAD.model}
    usage = {"usage": None} if include_usage else {}

    def expected(delta: dict[str, str], reason: str | None, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
        return {**head, "choices": [choice], **usage}

    assert _parse(chunks.opening(index)) == expected({"role": "assistant", "content": ""}, None)
    for _ in range(2):
        assert _parse(chunks.events(index, [Content(text)], None)) == expected({"content": text}, None)
    assert _parse(chunks.end(index, Ending("length", None, 3), None)) == expected({}, "length", stop_reason=None)
    said = _parse(chunks.usage(Usage(2, 3, 1)))
    assert (said.pop("choices"), said.pop("usage")["total_tokens"]) == ([], 5)
    assert said == head
    assert chunks.done() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("include_usage", [False, True])
@settings(deadline=None)
@given(TEXT, st.integers(0, 200))
def test_completion_chunks(include_usage: bool, text: str, index: int) -> None:
    chunks = CompletionShape(names=NAMES, include_usage=include_usage).chunks(HEAD)
    head = {"id": "i", "object": "text_completion", "created": 5, "model": HEAD.model}
    usage = {"usage": None} if include_usage else {}

    def expected(said: str, reason: str | None, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "text": said, "logprobs": None, "finish_reason": reason, **more}
        return {**head, "choices": [choice], **usage}

    assert chunks.opening(index) == b""
    assert _parse(chunks.events(index, [Content(text)], None)) == expected(text, None)
    assert _parse(chunks.end(index, Ending("stop", "x", 3), None)) == expected("", "stop", stop_reason="x")


def test_every_kind_of_event_has_its_delta() -> None:
    chunks = ChatShape(names=NAMES).chunks(HEAD)
    events: list[Event] = [
        Reasoning("hm"), Content("a"), ToolCallBegin(0, "c", "f"), ToolCallArguments(0, "{"), ToolCallArguments(0, "}")
    ]  # fmt: skip
    deltas = [chunk["choices"][0]["delta"] for chunk in _parse_all(chunks.events(0, events, None))]
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert deltas == [
        {"reasoning_content": "hm", "reasoning": "hm"},
        {"content": "a"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
    ]


def test_neighbours_are_joined() -> None:
    events: list[Event] = [
        Content("a"), Content("b"), Reasoning("c"), ToolCallBegin(0, "x", "f"), ToolCallArguments(0, "d"),
        ToolCallArguments(0, "e"), ToolCallBegin(1, "y", "f"), ToolCallArguments(1, "g"), Content("h"), Content("i"),
    ]  # fmt: skip
    assert joined(events) == [
        Content("ab"), Reasoning("c"), ToolCallBegin(0, "x", "f"), ToolCallArguments(0, "de"),
        ToolCallBegin(1, "y", "f"), ToolCallArguments(1, "g"), Content("hi"),
    ]  # fmt: skip
    assert joined([]) == []


@pytest.mark.parametrize("shape", [ChatShape, CompletionShape])
def test_continuous_usage_and_ids(shape: Any) -> None:
    chunks = shape(names=NAMES, token_ids=True, include_usage=True, continuous_usage=True).chunks(HEAD)
    prompt = PromptDetail(np.array([1, 2], np.int32), None)
    *_, first = _parse_all(chunks.events(0, [Content("a")], Detail([5, 6], [b"a", b""], [0, 1], None, 2, prompt)))
    (second,) = _parse_all(chunks.end(0, Ending("stop", None, 3), Detail([9], [b""], [1], None, 3)))
    assert first["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert second["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert (first["choices"][0]["token_ids"], second["choices"][0]["token_ids"]) == ([5, 6], [9])


def test_a_chunk_with_fields_of_its_own() -> None:
    prompt = PromptDetail(np.array([1, 2], np.int32), None)
    for usage in (False, True):
        chunks = ChatShape(names=NAMES, token_ids=True, include_usage=usage).chunks(HEAD)
        chunk = _parse(chunks.events(1, [Content("a")], Detail([5], [b"a"], [0], None, 1, prompt)))
        assert chunk["prompt_token_ids"] == [1, 2]
        assert ("usage" in chunk) is usage
        again = _parse(chunks.events(0, [Content("a")], Detail([5], [b"a"], [0], None, 1, prompt)))
        assert "prompt_token_ids" not in again  # it is the answer's, not the choice's


async def test_a_stream_has_one_end() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    stream = EventStream(send)
    assert not stream.started
    await stream.write(b"data: 1\n\n")
    chunks = ChatShape(names=NAMES).chunks(HEAD)
    await stream.finish(chunks.error(InternalError("broken")))
    await stream.finish(chunks.done())
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body", "http.response.body"]
    assert [message.get("more_body") for message in sent] == [None, True, False]
    error, done, rest = sent[-1]["body"].split(b"\n\n")
    assert orjson.loads(error[6:])["error"]["message"] == "broken"
    assert (done, rest) == (b"data: [DONE]", b"")


async def test_only_the_middle_of_a_stream_takes_the_short_way() -> None:
    ways: list[tuple[str, bytes]] = []

    async def common(message: Any) -> None:
        ways.append(("common", message.get("body", b"head")))

    async def short(message: Any) -> None:
        assert message["more_body"]
        ways.append(("short", message["body"]))

    stream = EventStream(common, short)
    for events in (b"1", b"2", b"3"):
        await stream.write(events)
    await stream.finish(b"4")
    assert ways == [("common", b"head"), ("common", b"1"), ("short", b"2"), ("short", b"3"), ("common", b"4")]
