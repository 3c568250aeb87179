"""One connection, with a transport that does what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tercet_frontend.access.connection import ConnectionLimits, limited_protocol
from tercet_shared.errors import TercetError

GET = b"GET / HTTP/1.1\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written until a test says that the client has taken it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.1", 5)})
        self.written = b""
        self.buffered = 0
        self.aborted = False
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Connection:
    """A protocol on such a transport; its application answers when it is told to."""

    def __init__(self, **limits: Any) -> None:
        self.transport = Transport()
        self.refused: list[tuple[str, int]] = []
        self.sends: asyncio.Queue[Callable[[Any], Any]] = asyncio.Queue()
        self.answer = asyncio.Event()
        config = uvicorn.Config(self._app, interface="asgi3", lifespan="off", log_config=None)
        config.load()
        kind: Any = limited_protocol(ConnectionLimits(**limits), self._refused)
        self.protocol = kind(config=config, server_state=ServerState(), app_state={})
        self.protocol.connection_made(self.transport)

    def _refused(self, client: str, status: int, _error: TercetError) -> None:
        self.refused.append((client, status))

    async def _app(self, _scope: Any, _receive: Any, send: Any) -> None:
        await self.answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def answered(self) -> None:
        self.answer.set()
        await asyncio.gather(*self.protocol.tasks)

    def end(self) -> None:
        self.protocol.connection_lost(None)
        assert not any(
            timer is not None and not timer.cancelled() for timer in (self.protocol._receiving, self.protocol._sending)
        )


async def test_a_client_that_takes_nothing_is_cut() -> None:
    connection = Connection(client_timeout=60.0)
    connection.protocol.data_received(GET)
    connection.transport.buffered = 100_000
    connection.protocol.pause_writing()
    assert connection.protocol._sending is not None
    connection.protocol._sending.cancel()
    connection.protocol._not_taken()  # as if the time had passed
    assert connection.transport.aborted
    connection.end()
    await connection.answered()  # into nothing


async def test_a_client_that_takes_a_little_has_as_much_time_again() -> None:
    connection = Connection(client_timeout=60.0)
    connection.protocol.data_received(GET)
    connection.transport.buffered = 100_000
    connection.protocol.pause_writing()
    for left in (99_999, 50_000):
        connection.protocol._sending.cancel()
        connection.transport.buffered = left
        connection.protocol._not_taken()
        assert not connection.transport.aborted
        assert connection.protocol._sending is not None
    connection.protocol._sending.cancel()
    connection.protocol._not_taken()  # nothing more this time
    assert connection.transport.aborted
    connection.end()
    await connection.answered()  # into nothing


async def test_a_client_that_is_sent_more_than_it_has_taken_has_as_much_time_again() -> None:
    connection = Connection(client_timeout=60.0)
    connection.protocol.data_received(GET)
    connection.transport.buffered = 70_000
    connection.protocol.pause_writing()
    first = connection.protocol._sending
    connection.transport.buffered = 10_000
    connection.protocol.resume_writing()
    connection.transport.buffered = 200_000  # the next event is a large one
    connection.protocol.pause_writing()
    assert first.cancelled()
    connection.protocol._sending.cancel()
    connection.transport.buffered = 199_000
    connection.protocol._not_taken()
    assert not connection.transport.aborted
    connection.end()
    await connection.answered()  # into nothing


@pytest.mark.parametrize(("left", "resumes"), [(0, False), (10_000, True)])
async def test_a_client_that_has_taken_enough_is_left_alone(left: int, resumes: bool) -> None:
    connection = Connection(client_timeout=60.0)
    connection.protocol.data_received(GET)
    connection.transport.buffered = 100_000
    connection.protocol.pause_writing()
    connection.transport.buffered = left
    if resumes:
        connection.protocol.resume_writing()
    connection.protocol._sending.cancel()
    connection.protocol._not_taken()
    assert not connection.transport.aborted
    assert connection.protocol._sending is None
    connection.protocol.resume_writing()
    await connection.answered()
    connection.end()


async def test_the_end_of_an_answer_that_stays_in_the_buffer() -> None:
    connection = Connection(client_timeout=60.0)
    connection.protocol.data_received(GET)
    connection.transport.buffered = 100  # too little for the transport to say that it is full
    await connection.answered()
    connection.protocol._sending.cancel()
    connection.protocol._not_taken()
    assert connection.transport.aborted
    connection.end()


async def test_a_request_in_one_piece_sets_no_timer() -> None:
    connection = Connection()
    first = connection.protocol._receiving  # for a first request that never comes
    assert first is not None
    connection.protocol.data_received(GET)
    assert first.cancelled()
    assert connection.protocol._receiving is None
    await connection.answered()
    for _ in range(3):
        connection.protocol.data_received(GET)
        assert (connection.protocol._receiving, connection.protocol._sending) == (None, None)
        await connection.answered()
    connection.end()


async def test_the_rest_of_a_body_that_nobody_reads() -> None:
    connection = Connection(receive_timeout=60.0, linger=2.0)
    connection.protocol.data_received(POST + b"he")
    long = connection.protocol._receiving
    assert long is not None
    await connection.answered()
    assert long.cancelled()
    short = connection.protocol._receiving
    assert short.when() - connection.protocol.loop.time() < 3
    connection.protocol.data_received(b"l")
    assert connection.protocol._receiving is short  # what drips in gains no time
    connection.protocol.data_received(b"lo")
    assert short.cancelled()
    connection.protocol.data_received(GET)
    await connection.answered()
    assert connection.transport.written.count(b"200 OK") == 2
    connection.end()


async def test_the_head_of_a_second_request_has_its_time_while_the_first_is_answered() -> None:
    connection = Connection(receive_timeout=60.0, linger=2.0)
    connection.protocol.data_received(GET + b"GET / HT")
    timer = connection.protocol._receiving
    assert timer is not None
    await connection.answered()
    assert connection.protocol._receiving is timer
    timer.cancel()
    connection.protocol._not_received()
    assert b"408 Request Timeout" in connection.transport.written
    assert connection.refused == [("192.0.2.1", 408)]
    connection.end()


async def test_while_a_request_is_answered_nothing_is_written_between() -> None:
    connection = Connection(receive_timeout=60.0)
    connection.protocol.data_received(GET + b"GET / HT")
    connection.protocol._receiving.cancel()
    connection.protocol._not_received()
    assert connection.transport.written == b""
    assert connection.protocol._receiving is not None  # it is looked at again
    connection.protocol.data_received(b"\0\r\n")
    assert connection.transport.written == b""
    await connection.answered()
    assert connection.transport.written.count(b"HTTP/1.1") == 1
    assert connection.transport.closed
    connection.end()


async def test_what_comes_after_a_refusal_is_thrown_away() -> None:
    connection = Connection(max_fields=2)
    connection.protocol.data_received(b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 4)
    assert connection.transport.written.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    connection.protocol.data_received(b"A: b\r\n\r\n" + GET)
    assert connection.transport.written.count(b"HTTP/1.1") == 1
    assert not connection.transport.closed
    connection.protocol._receiving.cancel()
    connection.protocol._close()
    assert connection.transport.closed
    connection.end()


async def test_upgrades_are_answered_as_ordinary_requests() -> None:
    connection = Connection()
    connection.protocol.data_received(b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
    await connection.answered()
    assert b"200 OK" in connection.transport.written
    connection.end()
