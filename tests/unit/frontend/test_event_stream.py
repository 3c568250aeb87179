"""The response side of a stream: signs of life, and one terminal event however often it is interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from tercet_frontend.sse import EventStream

TIMEOUT = 60.0


class Client:
    """An ASGI send channel: full when a test says so, and strict about what comes when."""

    def __init__(self) -> None:
        self.room = asyncio.Event()
        self.room.set()
        self.sent: list[bytes] = []
        self.started = False
        self.ended = False
        self.change = asyncio.Event()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await self.room.wait()
        if message["type"] == "http.response.start":
            assert not self.started
            self.started = True
            return
        assert self.started
        assert not self.ended
        self.sent.append(message["body"])
        self.ended = not message["more_body"]
        self.change.set()

    async def wait_for(self, number: int) -> None:
        async with asyncio.timeout(TIMEOUT):
            while len(self.sent) < number:
                self.change.clear()
                await self.change.wait()


async def test_silence_is_filled_until_the_end() -> None:
    client = Client()
    events = EventStream(client.send, heartbeat=0.02)
    await events.write(b"first")
    await client.wait_for(4)
    await events.finish(b"last")
    assert client.sent[0] == b"first"
    assert client.sent[-1] == b"last"
    assert set(client.sent[1:-1]) == {b": \n\n"}
    assert events._timer is None


async def test_nothing_is_sent_before_the_headers() -> None:
    client = Client()
    events = EventStream(client.send, heartbeat=0.001)
    await asyncio.wait([asyncio.create_task(client.change.wait())], timeout=0.05)
    assert not client.started
    events.close()


async def test_a_stream_that_speaks_sends_no_comments() -> None:
    client = Client()
    events = EventStream(client.send, heartbeat=60.0)
    for _ in range(3):
        await events.write(b"x")
        events._look()  # half a span has passed, and something was written in it
    assert client.sent == [b"x"] * 3
    events._look()
    await client.wait_for(4)
    assert client.sent[-1] == b": \n\n"
    events.close()


async def test_while_the_client_takes_nothing_at_most_one_comment_waits() -> None:
    client = Client()
    events = EventStream(client.send, heartbeat=0.002)
    await events.write(b"x")
    client.room.clear()
    await asyncio.wait([asyncio.create_task(client.room.wait())], timeout=0.05)
    client.room.set()
    await events.finish(b"last")
    assert client.sent.count(b": \n\n") <= 2
    assert client.sent[-1] == b"last"


@pytest.mark.parametrize("started", [False, True])
async def test_a_finish_that_was_cancelled_can_be_repeated(started: bool) -> None:
    client = Client()
    events = EventStream(client.send)
    if started:
        await events.write(b"x")
    client.room.clear()
    finishing = asyncio.create_task(events.finish(b"done"))
    await asyncio.sleep(0)
    finishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finishing
    assert events.started is started
    client.room.set()
    await events.finish(b"error")
    await events.finish(b"again")
    assert client.sent == ([b"x"] if started else []) + [b"error"]


async def test_a_comment_that_waits_is_not_sent_after_the_end() -> None:
    client = Client()
    events = EventStream(client.send, heartbeat=60.0)
    await events.write(b"x")
    client.room.clear()
    events._look()
    await asyncio.sleep(0)  # the comment waits now
    assert events._beat is not None
    finishing = asyncio.create_task(events.finish(b"last"))
    await asyncio.sleep(0)
    client.room.set()
    await finishing
    for _ in range(5):
        await asyncio.sleep(0)
    assert client.sent == [b"x", b"last"]
