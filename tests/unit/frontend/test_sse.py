"""Events: prepared bytes are the JSON that a serializer would write, and streams end once."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet_frontend.sse import ChatChunks, CompletionChunks, EventStream
from tercet_shared.errors import InternalError

_MODEL = 'a "quoted" \\ model\n🙂'


def _parse(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return dict(orjson.loads(event[6:]))


@pytest.mark.parametrize("include_usage", [False, True])
@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 200))
def test_chat_chunks(include_usage: bool, text: str, index: int) -> None:
    chunks = ChatChunks(identity="i", created=5, model=_MODEL, include_usage=include_usage)
    head = {"id": "i", "object": "chat.completion.chunk", "created": 5, "model": _MODEL}
    usage = {"usage": None} if include_usage else {}

    def expected(delta: dict[str, str], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**head, "choices": [choice], **usage}

    assert _parse(chunks.opening(index)) == expected({"role": "assistant", "content": ""}, None)
    for _ in range(2):
        assert _parse(chunks.text(index, text)) == expected({"content": text}, None)
    assert _parse(chunks.end(index, "length")) == expected({}, "length")
    assert _parse(chunks.usage({"total_tokens": 5})) == {**head, "choices": [], "usage": {"total_tokens": 5}}


@pytest.mark.parametrize("include_usage", [False, True])
@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 200))
def test_completion_chunks(include_usage: bool, text: str, index: int) -> None:
    chunks = CompletionChunks(identity="i", created=5, model=_MODEL, include_usage=include_usage)
    head = {"id": "i", "object": "text_completion", "created": 5, "model": _MODEL}
    usage = {"usage": None} if include_usage else {}

    def expected(said: str, reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "text": said, "logprobs": None, "finish_reason": reason}
        return {**head, "choices": [choice], **usage}

    assert chunks.opening(index) == b""
    assert _parse(chunks.text(index, text)) == expected(text, None)
    assert _parse(chunks.end(index, "stop")) == expected("", "stop")
    assert _parse(chunks.usage({"total_tokens": 5})) == {**head, "choices": [], "usage": {"total_tokens": 5}}


async def test_a_stream_has_one_end() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    stream = EventStream(send)
    assert not stream.started
    await stream.write(b"data: 1\n\n")
    await stream.fail(InternalError("broken"))
    await stream.finish()
    await stream.fail(InternalError("again"))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body", "http.response.body"]
    assert [message.get("more_body") for message in sent] == [None, True, False]
    error, done, rest = sent[-1]["body"].split(b"\n\n")
    assert orjson.loads(error[6:])["error"]["message"] == "broken"
    assert (done, rest) == (b"data: [DONE]", b"")
