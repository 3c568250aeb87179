"""Clients that do what no library would: raw bytes, slowly, or never reading."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from tests.contract.frontend.conftest import MODEL, TIMEOUT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES} | fields


def request(path: str = CHAT, payload: Any = None, *, headers: str = "") -> bytes:
    """Returns a whole request."""
    content = orjson.dumps(body() if payload is None else payload)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n{headers}\r\n"
    )
    return head.encode() + content


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return orjson.loads(self.body)


@dataclass
class Wire:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Answer:
        """Returns the next answer, which has a length."""
        async with asyncio.timeout(TIMEOUT):
            head = await self.reader.readuntil(b"\r\n\r\n")
            status, *fields = head.decode().split("\r\n")
            headers = dict(field.lower().split(": ", 1) for field in fields if field)
            content = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(int(status.split()[1]), headers, content)

    async def end(self) -> bytes:
        """Returns what comes until the other side closes; a reset counts as that."""
        async with asyncio.timeout(TIMEOUT):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""


@asynccontextmanager
async def wire(url: str, **options: Any) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), **options)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()
