"""Requests that run in another front end are ended through Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from redis.asyncio.client import PubSub

from tercet_frontend.others import OtherFrontEnds
from tercet_frontend.running import RunningRequests
from tercet_shared.errors import UnavailableError
from tercet_shared.registry.client import close_client, redis_client
from tests.fakes.deaf import Deaf
from tests.fakes.redis_server import RedisServer, redis_server

TIMEOUT = 60.0


@pytest.fixture
async def redis() -> AsyncIterator[RedisServer]:
    async with redis_server() as server:
        yield server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers count however late they come."""
    monkeypatch.setattr("tercet_frontend.others.PATIENCE", 3_600.0)


@asynccontextmanager
async def front_end(redis: RedisServer, name: str, prefix: str = "t") -> AsyncIterator[OtherFrontEnds]:
    client = redis_client(redis.url, timeout=2.0)
    others = OtherFrontEnds(client, prefix, name, RunningRequests())
    run = asyncio.create_task(others.run())
    try:
        async with asyncio.timeout(TIMEOUT):
            await others.wait_until_listening()
        yield others
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await close_client(client)


async def test_all_that_run_it_end_it_and_nobody_else(redis: RedisServer) -> None:
    async with AsyncExitStack() as stack:
        ends = [await stack.enter_async_context(front_end(redis, f"f{number}")) for number in range(3)]
        elsewhere = await stack.enter_async_context(front_end(redis, "f1", prefix="another"))
        one, two, three = ends
        cancelled = [stack.enter_context(each._running.track("me", ["mine/1"])) for each in (two, three, elsewhere)]
        assert await one.cancel("you", "mine/1") == 0
        assert await one.cancel("me", "mine/2") == 0
        assert not any(each.done() for each in cancelled)
        assert await one.cancel("me", "mine/1") == 2
        assert [each.done() for each in cancelled] == [True, True, False]


async def test_it_is_known_at_once_that_nobody_has_it(redis: RedisServer) -> None:
    async with front_end(redis, "one") as one, front_end(redis, "two"):
        async with asyncio.timeout(TIMEOUT):
            assert await one.cancel("me", "nothing") == 0
            assert sum(await asyncio.gather(*(one.cancel("me", f"{number}") for number in range(50)))) == 0


async def test_one_that_does_not_answer_is_not_waited_for(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet_frontend.others.PATIENCE", 0.1)
    silent = redis_client(redis.url, timeout=2.0)
    async with front_end(redis, "one") as one, front_end(redis, "two") as two, silent.pubsub() as channel:
        await channel.subscribe("t:1:cancel")
        async with asyncio.timeout(TIMEOUT):
            with two._running.track("me", ["a"]):
                while await one.cancel("me", "a") != 1:
                    pass  # the other one was late as well
            assert await one.cancel("me", "b") == 0
    await close_client(silent)


async def test_redis_that_comes_back(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet_frontend.others._PAUSE", 0.05)
    async with front_end(redis, "one") as one, front_end(redis, "two") as two:
        await redis.stop()
        with pytest.raises(UnavailableError, match="cannot be asked"):
            await one.cancel("me", "a")
        one._listening.clear()
        two._listening.clear()
        await redis.start()
        async with asyncio.timeout(TIMEOUT):
            await one.wait_until_listening()
            await two.wait_until_listening()
        with two._running.track("me", ["a"]):
            assert await one.cancel("me", "a") == 1


async def test_what_makes_no_sense_is_passed_over(redis: RedisServer) -> None:
    client = redis_client(redis.url, timeout=2.0)
    async with front_end(redis, "one") as one, front_end(redis, "two") as two:
        for message in (b"", b"\xff", b"[]", b"{}", b'{"token": 1}', b'{"token": "a", "cancelled": "x"}'):
            for channel in ("t:1:cancel", "t:1:cancelled:one"):
                await client.publish(channel, message)
        with two._running.track("me", ["a"]):
            assert await one.cancel("me", "a") == 1
    await close_client(client)


async def test_a_question_whose_time_is_over_while_it_is_asked(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tercet_frontend.others.PATIENCE", 0.05)
    async with front_end(redis, "one") as one:
        monkeypatch.setattr(one._client, "publish", Deaf(2))
        async with asyncio.timeout(TIMEOUT):
            assert await one.cancel("me", "a") == 0


@pytest.mark.parametrize("answer", [None, OSError("gone")], ids=["answers", "fails"])
async def test_it_ends_when_it_is_to_end(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, answer: OSError | None
) -> None:
    monkeypatch.setattr("tercet_frontend.others._PAUSE", 3_600.0)
    subscribe = Deaf(answer)
    monkeypatch.setattr(PubSub, "subscribe", subscribe)
    client = redis_client(redis.url, timeout=2.0)
    run = asyncio.create_task(OtherFrontEnds(client, "t", "one", RunningRequests()).run())
    await subscribe.called.wait()
    run.cancel()
    async with asyncio.timeout(5.0):
        await asyncio.wait({run})
    assert run.cancelled()
    await close_client(client)
