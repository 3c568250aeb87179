"""Server-sent events: bytes that are prepared once per request, and the one terminal event of every stream.

Format: HTML Living Standard, section "Server-sent events"; chunks as in OpenAI's API reference.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson

from tercet_shared.errors import TercetError, error_body

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, MutableMapping

    from tercet_frontend.api.answers import AnswerHead, Usage

    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

DONE = b"data: [DONE]\n\n"

_BEAT = b": \n\n"
"""A comment, which clients ignore; what is between them and the server sees that the connection is alive."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx and its relatives pass every event on at once
]


class Chunks:
    """What OpenAI's two kinds of chunks share: everything around a choice is known when the answer begins.

    Args:
        head: of the answer.
        kind: the ``object`` of its chunks.
        include_usage: a chunk with the usage comes before the end, and all others have the field.
        continuous_usage: that field is the usage so far.
    """

    def __init__(
        self, head: AnswerHead, kind: str, *, include_usage: bool = False, continuous_usage: bool = False
    ) -> None:
        fields = {"id": head.identity, "object": kind, "created": head.created, "model": head.model}
        self._prefix = b"data: " + orjson.dumps(fields)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._continuous = include_usage and continuous_usage
        self._prompt_tokens = head.prompt_tokens

    def chunk(self, choice: Mapping[str, Any], output_tokens: int, extra: Mapping[str, Any] | None = None) -> bytes:
        """Returns the event of one choice.

        Args:
            choice: its JSON values.
            output_tokens: of the choice so far.
            extra: fields of the chunk itself.
        """
        suffix = self._counted(output_tokens) if self._continuous else self._suffix
        if extra:
            suffix = b"]," + orjson.dumps(extra)[1:-1] + suffix[1:]
        return self._prefix + orjson.dumps(choice) + suffix

    def usage(self, usage: Usage) -> bytes:
        """Returns the event with the usage of the request."""
        return self._prefix + b'],"usage":' + orjson.dumps(usage.as_openai()) + b"}\n\n"

    def done(self) -> bytes:
        """Returns the terminal event of a complete answer."""
        return DONE

    def error(self, error: TercetError) -> bytes:
        """Returns the error event, and the end of the stream."""
        return b"data: " + orjson.dumps(error_body(error)) + b"\n\n" + DONE

    def _counted(self, output_tokens: int) -> bytes:
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": self._prompt_tokens + output_tokens,
        }
        return b'],"usage":' + orjson.dumps(usage) + b"}\n\n"


class EventStream:
    """The response side of one stream. Headers go out with the first event; after the terminal event nothing does.

    Attributes:
        started: whether the headers are out.

    Args:
        send: the request's ASGI channel.
        short: a shorter way to the same client (see `tercet_frontend.shortcut`); None where there is none.
        heartbeat: seconds of silence at most; where nothing else is sent for so long, a comment is. 0 for no limit.
    """

    def __init__(self, send: Send, short: Send | None = None, *, heartbeat: float = 0.0) -> None:
        self._send = send
        self._short = send if short is None else short
        self.started = False
        self._ended = False
        # Two looks per span, so that an event costs no clock and no timer.
        self._interval = heartbeat / 2
        self._writes = 0
        self._seen = 0
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None

    def write(self, events: bytes) -> Awaitable[None]:
        """Sends events; waits while the client's connection is full."""
        self._writes += 1
        if not self.started:
            return self._begin(events)
        return self._short({"type": "http.response.body", "body": events, "more_body": True})

    async def finish(self, events: bytes) -> None:
        """Sends the last events and the end of the stream, unless it has ended.

        Cancelled while the connection is full, it has sent nothing and may be called again.
        """
        if self._ended:
            return
        self.close()
        await self._start()
        await self._send({"type": "http.response.body", "body": events, "more_body": False})
        self._ended = True

    def close(self) -> None:
        """Ends the heartbeat. Nothing that was written is taken back."""
        self._interval = 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None

    async def _begin(self, events: bytes) -> None:
        await self._start()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self._wait()

    async def _start(self) -> None:
        if not self.started:
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            self.started = True

    def _wait(self) -> None:
        if self._interval:
            self._seen = self._writes
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._look)

    def _look(self) -> None:
        if self._writes == self._seen and (self._beat is None or self._beat.done()):
            # If the connection is full, it waits as an event would; there is never more than one.
            self._beat = asyncio.get_running_loop().create_task(self._send_beat())
        self._wait()

    async def _send_beat(self) -> None:
        await self._short({"type": "http.response.body", "body": _BEAT, "more_body": True})
