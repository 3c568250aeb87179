"""A bare HTTP/1.1 client: what it spends per token would be taken for the server's time.

One parser in C per connection, callbacks instead of a coroutine that is woken up for every piece, connections that are
kept. Source: RFC 9112.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast
from urllib.parse import urlsplit

import httptools

from tercet_shared.errors import ConfigurationError, TercetError, bounded

if TYPE_CHECKING:
    from collections.abc import Mapping

clock = time.perf_counter
"""Seconds; every time of the bench is of this clock."""


class RequestFailedError(TercetError):
    """A request that got no whole answer.

    Attributes:
        kind: a few words that are the same for failures of the same kind, to be counted by.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(bounded(message, 500))
        self.kind = kind


class Answer(Protocol):
    """What becomes of an answer. Called in the order in which it comes; what they raise ends the request with it."""

    def head(self, status: int) -> None:
        """Takes the status."""

    def body(self, data: bytes, now: float) -> None:
        """Takes a piece of the body, and the time at which it came."""

    def end(self) -> None:
        """Takes the end of a whole answer."""


@dataclass
class Whole:
    """An answer that is read as a whole."""

    status: int = 0
    parts: list[bytes] = field(default_factory=list)

    def head(self, status: int) -> None:
        """Takes the status."""
        self.status = status

    def body(self, data: bytes, now: float) -> None:  # noqa: ARG002  # see Answer
        """Takes a piece of the body."""
        self.parts.append(data)

    def end(self) -> None:
        """Nothing is left to do."""

    @property
    def data(self) -> bytes:
        """The body so far."""
        return b"".join(self.parts)


class _Connection(asyncio.Protocol):
    """One connection, on which one request at a time is answered. The names of its callbacks are httptools'."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._until_close = True
        self.answered = False
        """Whether anything of the present answer has come."""
        self.usable = False
        """Whether it can take another request."""

    async def exchange(self, request: bytes, answer: Answer) -> None:
        """Sends a request and returns when its answer has come.

        Raises:
            RequestFailedError: it did not; also what ``answer`` raises.
        """
        self._answer, self._done = answer, asyncio.get_running_loop().create_future()
        self.answered, self.usable = False, False
        try:
            self._transport.write(request)
            await self._done
        finally:
            self._answer = None
            if not self.usable:
                self._transport.abort()

    def close(self) -> None:
        """Closes it."""
        self._transport.close()

    # ------------------------------------------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.usable = True

    def data_received(self, data: bytes) -> None:
        self._now = clock()
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # What a callback raised; httptools wraps it.
            self._fail(error.__context__ if isinstance(error.__context__, Exception) else error)
        except httptools.HttpParserError as error:
            self._fail(RequestFailedError("not HTTP", f"The server does not answer in HTTP/1.1: {error}."))

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._done is None or self._done.done():
            return
        if exc is None and self._until_close and self.answered:
            self._finish(self._done)  # an answer without a length ends where the connection does
            return
        reason = f": {exc}" if exc is not None else ""
        self._fail(RequestFailedError("disconnected", f"The server closed the connection before the end{reason}."))

    # ------------------------------------------------------------------------------------------------ httptools

    def on_message_begin(self) -> None:
        self._until_close = True

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: ARG002  # httptools' signature
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.head(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.body(data, self._now)

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self.usable = bool(self._parser.should_keep_alive())
            self._finish(self._done)

    def _finish(self, done: asyncio.Future[None]) -> None:
        try:
            if self._answer is not None:
                self._answer.end()
        except RequestFailedError as error:
            self._fail(error)
        else:
            done.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class HttpClient:
    """Connections to one server.

    Args:
        url: ``http://host:port`` or ``https://…``, with a path if need be; ``/v1`` at its end may be left out.
        headers: of every request.
        timeout: seconds that one request may take, its connection included.

    Raises:
        ConfigurationError: that is no such URL.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, timeout: float = 600.0) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigurationError(
                f"--url (TERCET_URL): {bounded(url, 200)!r} is not like http://host:port.", param="url"
            )
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = host, port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        lines = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*"} | dict(headers or {})
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: deque[_Connection] = deque()

    async def get(self, path: str, answer: Answer) -> None:
        """Asks for a path; see `post`."""
        await self._send(f"GET {self._base}{path} HTTP/1.1\r\n{self._headers}\r\n".encode("latin-1"), answer)

    async def post(self, path: str, body: bytes, answer: Answer) -> None:
        """Sends a JSON body and returns when ``answer`` has had everything.

        Raises:
            RequestFailedError: no connection, a broken one, or none of it in time; also what ``answer`` raises.
        """
        head = (
            f"POST {self._base}{path} HTTP/1.1\r\n{self._headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        await self._send(head.encode("latin-1") + body, answer)

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _send(self, request: bytes, answer: Answer) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                connection = self._idle_connection()
                if connection is not None:
                    try:
                        await self._exchange(connection, request, answer)
                    except RequestFailedError as error:
                        # It was closed while it was idle, as servers may: that is not a failure of this request.
                        if error.kind != "disconnected" or connection.answered:
                            raise
                    else:
                        return
                await self._exchange(await self._connect(), request, answer)
        except TimeoutError:
            raise RequestFailedError("timeout", f"No whole answer came within {self._timeout:g} seconds.") from None

    async def _exchange(self, connection: _Connection, request: bytes, answer: Answer) -> None:
        await connection.exchange(request, answer)
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()

    def _idle_connection(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            reason = error.strerror or str(error)
            raise RequestFailedError(
                "no connection", f"No connection to {self._host}:{self._port}: {bounded(reason, 200)}."
            ) from None
        return connection
