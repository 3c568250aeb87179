"""Server-sent events: bytes that are prepared once per request, and the one terminal event of every stream.

Format: HTML Living Standard, section "Server-sent events"; chunks as in OpenAI's API reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import orjson

from tercet_shared.errors import TercetError, error_body

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx and its relatives pass every event on at once
]


class ChunkEncoder(Protocol):
    """Turns what happens to the choices of one request into events."""

    def opening(self, index: int) -> bytes:
        """Returns what comes before a choice's text; may be nothing."""

    def text(self, index: int, text: str) -> bytes:
        """Returns the event for a piece of text."""

    def end(self, index: int, finish_reason: str) -> bytes:
        """Returns the event that ends a choice."""

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Returns the event with the usage of the request."""


class _Chunks:
    """What both kinds of chunks share: everything around the text is known when the request starts."""

    def __init__(self, *, identity: str, kind: str, created: int, model: str, include_usage: bool) -> None:
        fields = {"id": identity, "object": kind, "created": created, "model": model}
        self._prefix = b"data: " + orjson.dumps(fields)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._heads: list[bytes] = []
        self._tail = b',"logprobs":null,"finish_reason":null}' + self._suffix

    def _head(self, index: int) -> bytes:
        """Returns everything before the text of a choice."""
        heads = self._heads
        while len(heads) <= index:
            heads.append(self._prefix + b'{"index":%d,' % len(heads) + self._lead)
        return heads[index]

    _lead: bytes

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._prefix + b'],"usage":' + orjson.dumps(usage) + b"}\n\n"


class ChatChunks(_Chunks):
    """Events of ``/v1/chat/completions``."""

    _lead = b'"delta":{"content":'

    def __init__(self, *, identity: str, created: int, model: str, include_usage: bool) -> None:
        super().__init__(
            identity=identity,
            kind="chat.completion.chunk",
            created=created,
            model=model,
            include_usage=include_usage,
        )
        self._tail = b"}" + self._tail

    def opening(self, index: int) -> bytes:
        """Returns the event that names the role."""
        return self._prefix + b'{"index":%d,"delta":{"role":"assistant","content":""}' % index + self._tail[1:]

    def text(self, index: int, text: str) -> bytes:
        """Returns the event for a piece of text."""
        return self._head(index) + orjson.dumps(text) + self._tail

    def end(self, index: int, finish_reason: str) -> bytes:
        """Returns the event that ends a choice."""
        reason = orjson.dumps(finish_reason)
        return (
            self._prefix
            + b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (index, reason)
            + self._suffix
        )


class CompletionChunks(_Chunks):
    """Events of ``/v1/completions``."""

    _lead = b'"text":'

    def __init__(self, *, identity: str, created: int, model: str, include_usage: bool) -> None:
        super().__init__(
            identity=identity, kind="text_completion", created=created, model=model, include_usage=include_usage
        )

    def opening(self, index: int) -> bytes:  # noqa: ARG002  # see ChunkEncoder
        """Returns nothing: completions have no role."""
        return b""

    def text(self, index: int, text: str) -> bytes:
        """Returns the event for a piece of text."""
        return self._head(index) + orjson.dumps(text) + self._tail

    def end(self, index: int, finish_reason: str) -> bytes:
        """Returns the event that ends a choice."""
        reason = orjson.dumps(finish_reason)
        return (
            self._prefix + b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b}' % (index, reason) + self._suffix
        )


class EventStream:
    """The response side of one stream. Headers go out with the first event; after the terminal event nothing does."""

    def __init__(self, send: Send) -> None:
        """Takes the request's ASGI channel."""
        self._send = send
        self.started = False
        self._ended = False

    async def write(self, events: bytes) -> None:
        """Sends events; waits while the client's connection is full."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def finish(self, events: bytes = b"") -> None:
        """Sends the last events and the end of the stream."""
        if self._ended:
            return
        self._ended = True
        await self._send({"type": "http.response.body", "body": events + DONE, "more_body": False})

    async def fail(self, error: TercetError) -> None:
        """Ends the stream with one error event, unless it has ended."""
        await self.finish(b"data: " + orjson.dumps(error_body(error)) + b"\n\n")
