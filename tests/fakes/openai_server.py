"""A server with OpenAI's streams and no model, over real HTTP: tests say how it answers, and see what it was asked.

async with FakeServer() as server:                    # six tokens for whoever asks for six
    ... POST to server.url ...
    server.bodies                                     # what was asked

server.answer = lambda _body: Answer(status=503, events=())
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

DONE = "[DONE]"


@dataclass
class Answer:
    """How one request is answered.

    Attributes:
        events: data of each event; where the status is not 200, the body instead.
        framing: ``chunked``, ``length`` or ``close`` (the body ends where the connection does).
        cut: whether the connection is closed after the events, without the end of the body.
        gate: waited for before anything is sent.
        hold: waited for before the last event.
    """

    events: tuple[str, ...]
    status: int = 200
    framing: str = "chunked"
    cut: bool = False
    gate: asyncio.Event | None = None
    hold: asyncio.Event | None = None


def tokens(count: int, *, chat: bool = False, usage: bool = True, prompt: int = 3, cached: int = 0) -> tuple[str, ...]:
    """Returns the events of ``count`` tokens, one each."""
    piece: dict[str, Any] = {"delta": {"content": "x"}} if chat else {"text": "x"}
    last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    events: list[dict[str, Any]] = []
    if chat:
        events.append({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    events += [{"choices": [piece], "usage": None} for _ in range(count)]
    events.append({"choices": [{**last, "finish_reason": "length"}]})
    if usage:
        numbers = {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        events.append({"choices": [], "usage": numbers})
    return (*(json.dumps(event) for event in events), DONE)


@dataclass
class FakeServer:
    """See the module.

    Attributes:
        answer: makes the answer to the body of a request.
        bodies: of all requests.
        heads: of all requests.
        running: requests that are being answered.
        most: the most that were, at once.
        connections: accepted so far.
    """

    answer: Callable[[dict[str, Any]], Answer] = lambda body: Answer(
        tokens(body["max_tokens"], chat="messages" in body)
    )
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    running: int = 0
    most: int = 0
    connections: int = 0
    _server: asyncio.Server | None = None
    _asked: asyncio.Event = field(default_factory=asyncio.Event)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.close_connections()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        """Where it listens."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def asked(self, count: int) -> None:
        """Returns when so many requests have come."""
        async with asyncio.timeout(60):
            while len(self.bodies) < count:
                self._asked.clear()
                await self._asked.wait()

    def close_connections(self) -> None:
        """Closes all connections, as a server does with idle ones."""
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._one(reader, writer):
                pass
        self._writers.discard(writer)
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answers one request; returns whether the connection goes on."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        if head.startswith(b"GET /v1/models"):
            _write(writer, Answer((json.dumps({"data": [{"id": "m"}]}),), status=200, framing="length"))
            return True
        size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"Content-Length" in line)
        body = json.loads(await reader.readexactly(size))
        self.bodies.append(body)
        self._asked.set()
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if not body.get("stream"):
                words = len(str(body.get("prompt") or body["messages"][0]["content"]).split())
                usage = json.dumps({"usage": {"prompt_tokens": 10 + 2 * words}})
                _write(writer, Answer((usage,), framing="length"))
                return True
            return await self._stream(writer, self.answer(body))
        finally:
            self.running -= 1

    async def _stream(self, writer: asyncio.StreamWriter, answer: Answer) -> bool:
        if answer.gate is not None:
            await answer.gate.wait()
        if answer.framing == "length" or answer.status != 200:
            _write(writer, answer)
            return True
        chunked = answer.framing == "chunked"
        kind = b"Transfer-Encoding: chunked\r\n" if chunked else b"Connection: close\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + kind + b"\r\n")
        for index, event in enumerate(answer.events):
            if answer.hold is not None and index == len(answer.events) - 1:
                await answer.hold.wait()
            data = f"data: {event}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)
            await writer.drain()
        if answer.cut or not chunked:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _write(writer: asyncio.StreamWriter, answer: Answer) -> None:
    events = "".join(f"data: {event}\n\n" for event in answer.events) if len(answer.events) > 1 else answer.events[0]
    body = events.encode()
    writer.write(b"HTTP/1.1 %d Status\r\nContent-Length: %d\r\n\r\n" % (answer.status, len(body)) + body)
