"""Stores of responses: what both kinds promise, and what each does when it is full or cannot be reached."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tercet_frontend.conversations import MemoryResponses, RedisResponses, ResponseStore, StoredResponse
from tercet_frontend.server import _store
from tercet_shared.config import FrontendSettings, parse
from tercet_shared.errors import ConfigurationError, UnavailableError
from tests.fakes.deaf import Deaf

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fakes.redis_server import RedisServer


class Clock:
    """Time that tests turn forward."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def in_redis(url: str, **options: Any) -> AsyncIterator[RedisResponses]:
    store = RedisResponses(url, **options)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, redis: RedisServer) -> AsyncIterator[ResponseStore]:
    if request.param == "memory":
        yield MemoryResponses(max_record_bytes=100)
    else:
        async with in_redis(redis.url, max_record_bytes=100) as responses:
            yield responses


async def test_records_belong_to_their_tenant(store: ResponseStore) -> None:
    await store.check()
    assert await store.put("me", "resp_1", b"mine")
    assert await store.put("", "resp_1", b"nobody's")
    assert await store.get("me", "resp_1") == b"mine"
    assert await store.get("", "resp_1") == b"nobody's"
    assert await store.get("you", "resp_1") is None
    assert await store.get("me", "resp_2") is None
    assert not await store.delete("you", "resp_1")
    assert await store.delete("me", "resp_1")
    assert not await store.delete("me", "resp_1")
    assert await store.get("me", "resp_1") is None
    assert await store.get("", "resp_1") == b"nobody's"


async def test_records_may_be_replaced_but_not_too_large(store: ResponseStore) -> None:
    assert await store.put("me", "resp_1", b"old")
    assert await store.put("me", "resp_1", b"n" * 100)
    assert not await store.put("me", "resp_1", b"n" * 101)
    assert await store.get("me", "resp_1") == b"n" * 100


def test_a_record_is_what_was_stored() -> None:
    stored = StoredResponse({"id": "r", "output": [{"type": "message", "n": 3}]}, [{"b": "ü"}], [{"a": None}])
    assert StoredResponse.decode(stored.encode()) == stored
    assert stored.conversation() == [{"a": None}, {"b": "ü"}, {"type": "message", "n": 3}]


async def test_memory_forgets_in_time() -> None:
    clock = Clock()
    store = MemoryResponses(ttl=10, clock=clock)
    await store.put("me", "one", b"1")
    clock.now += 5
    await store.put("me", "two", b"22")
    clock.now += 4.9
    assert await store.get("me", "one") == b"1"
    clock.now += 0.2
    assert await store.get("me", "one") is None
    assert await store.get("me", "two") == b"22"
    assert (store.count, store.size) == (1, 2)
    clock.now += 10
    assert not await store.delete("me", "two")
    assert (store.count, store.size) == (0, 0)


async def test_memory_is_bounded_in_count() -> None:
    store = MemoryResponses(max_count=4)
    for name in ("a", "b", "c"):
        await store.put("busy", name, b"x")
    await store.put("quiet", "q", b"x" * 50)
    await store.put("busy", "d", b"x")
    # Whoever holds the most records gives up the oldest.
    assert await store.get("busy", "a") is None
    assert await store.get("quiet", "q") is not None
    assert store.count == 4


async def test_memory_is_bounded_in_bytes() -> None:
    store = MemoryResponses(max_bytes=100, max_record_bytes=1000)
    assert not await store.put("me", "huge", b"x" * 101)
    for number in range(10):
        await store.put("many", str(number), b"x")
    await store.put("large", "one", b"x" * 60)
    await store.put("large", "two", b"x" * 60)
    assert await store.get("large", "one") is None
    assert await store.get("large", "two") is not None
    assert (store.count, store.size) == (11, 70)


async def test_memory_gives_up_what_is_over_before_what_is_not() -> None:
    clock = Clock()
    store = MemoryResponses(max_count=3, ttl=10, clock=clock)
    await store.put("gone", "old", b"x")
    clock.now += 11
    for name in ("a", "b", "c"):
        await store.put("me", name, b"x")
    assert [await store.get("me", name) for name in ("a", "b", "c")] == [b"x"] * 3
    await store.close()
    assert (store.count, store.size) == (0, 0)


async def test_redis_keeps_records_for_a_while_and_shares_them(redis: RedisServer) -> None:
    async with in_redis(redis.url, ttl=0.05) as short, in_redis(redis.url, ttl=60) as long:
        await long.put("me", "kept", b"1")
        await short.put("me", "gone", b"2")
        assert await short.get("me", "kept") == b"1"
        async with asyncio.timeout(60):
            while await long.get("me", "gone") is not None:
                pass
        assert await long.get("me", "kept") == b"1"


async def test_redis_that_is_gone_and_comes_back(redis: RedisServer) -> None:
    clock = Clock()
    async with in_redis(redis.url, clock=clock) as store:
        await store.put("me", "one", b"1")
        await redis.stop()
        for call in (store.check(), store.put("me", "one", b"1"), store.get("me", "one"), store.delete("me", "one")):
            with pytest.raises(UnavailableError):
                await call
        await redis.start()
        with pytest.raises(UnavailableError):
            await store.check()  # shortly after a failure it is not tried
        clock.now += 1.1
        await store.check()
        assert await store.get("me", "one") is None
        assert await store.put("me", "one", b"2")
        assert await store.get("me", "one") == b"2"


async def test_redis_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        reached.set()

    def asked(*_: object) -> None:
        raise AssertionError("it is tried again at once")

    connections: list[asyncio.StreamWriter] = []
    reached = asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as directory:
        server = await asyncio.start_unix_server(silent, f"{directory}/redis.sock")
        async with in_redis(f"unix://{directory}/redis.sock", timeout=0.05, clock=Clock()) as store:
            with pytest.raises(UnavailableError):
                await store.get("me", "one")
            monkeypatch.setattr(store._redis, "ping", asked)
            with pytest.raises(UnavailableError):
                await store.check()
        await asyncio.wait_for(reached.wait(), 60)
        for writer in connections:
            writer.close()
            await writer.wait_closed()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://secret@host", "redis://host:port/0"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RedisResponses(url)
    assert "secret" not in caught.value.message


async def test_settings_choose_the_store(redis: RedisServer) -> None:
    memory = _store(parse(FrontendSettings, ["model", "--response-ttl=5"]))
    assert isinstance(memory, MemoryResponses)
    shared = _store(parse(FrontendSettings, ["model", f"--redis-url={redis.url}"]))
    assert isinstance(shared, RedisResponses)
    await shared.check()
    await shared.close()
    with pytest.raises(ConfigurationError):
        _store(parse(FrontendSettings, ["model", "--redis-url=nowhere"]))


@pytest.mark.parametrize("answer", [b"1", OSError("gone")], ids=["answers", "fails"])
async def test_who_gives_up_is_not_answered(redis: RedisServer, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    async with in_redis(redis.url) as store:
        get = Deaf(answer)
        monkeypatch.setattr(store._redis, "get", get)
        call = asyncio.create_task(store.get("me", "one"))
        await get.called.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
