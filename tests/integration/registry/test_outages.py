"""Redis is away, slow, or comes back empty: the last picture stays, and all heals by itself."""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from tercet_shared.errors import UnavailableError
from tercet_shared.registry import block_publisher, routes
from tercet_shared.registry.block_publisher import BlockPublisher
from tercet_shared.registry.blocks import BlockChanges
from tercet_shared.registry.client import close_client, redis_client
from tercet_shared.registry.interface import CoreLoad, CoreState, RouteRecord
from tercet_shared.registry.layout import Keys
from tests.fakes.redis_server import RedisServer
from tests.integration.registry.conftest import KEYS, TIMEOUT, Core, joined, pass_time, record, until, watching

ROUTE = RouteRecord(core_id="a", front_end="f", attempt=0, traceparent="", state="running")


async def test_redis_stops_and_comes_back_empty(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tercet_shared.registry.redis")
    core = Core(record("a"))
    core.fill(KEYS[:9])
    async with watching(server.url) as view, joined(server.url, core) as member:
        await until(lambda: view.mirrors_of(core))
        picture = dict(view.fleet.cores())
        await server.stop()
        await until(lambda: view.fleet.failures and member.failures)
        assert not view.fleet.healthy
        assert not member.healthy
        for i in range(5):
            view.fleet.note_route(f"r{i}", ROUTE)
        assert await view.fleet.find_route("r4") == ROUTE
        with pytest.raises(UnavailableError):
            await view.fleet.find_route("unknown")
        core.fill(KEYS[9:12])
        core.own = replace(core.own, state=CoreState.DRAINING)
        assert view.fleet.cores() == picture
        await server.start()
        await until(lambda: view.fleet.healthy and member.healthy)
        await until(lambda: view.known("a") == core.own and view.mirrors_of(core))
        assert "Redis can be used again" in caplog.messages
        assert view.mirrors.forgotten == []
        async with watching(server.url) as late:
            await until(lambda: late.known("a") == core.own and late.mirrors_of(core))
            assert await late.fleet.find_route("r4") == ROUTE


async def test_a_slow_redis_is_an_outage_and_no_more(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(record("a"))
    core.fill(KEYS[:9])
    async with watching(server.url, patience_s=1.0) as view, joined(server.url, core, patience_s=1.0) as member:
        await until(lambda: view.mirrors_of(core))
        _, other = await asyncio.open_unix_connection(server.url.removeprefix("unix://"))
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: not view.fleet.healthy and not member.healthy)
            # The time of the core is over, and its record expires, which must not look as if it had vanished.
            pass_time(monkeypatch, 2 * 3_600.0)
            other.write(b"DEL test:1:core:a\r\n")
            assert view.known("a") is not None
        finally:
            other.close()
            server.process.send_signal(signal.SIGCONT)
        core.fill(KEYS[9:12])
        await until(lambda: view.fleet.healthy and member.healthy and view.mirrors_of(core))
        assert view.mirrors.forgotten == []


async def test_a_core_lives_while_its_blocks_take_their_time(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tercet_shared.registry.member.PATIENCE", 3_600.0)
    core, began = Core(record("a")), asyncio.Event()

    async def publish(_: BlockPublisher) -> None:
        began.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(BlockPublisher, "publish", publish)
    async with watching(server.url) as view, joined(server.url, core, ttl=20.0) as member:
        async with asyncio.timeout(TIMEOUT):
            await began.wait()
        core.own = replace(core.own, load=CoreLoad(running=7))
        await until(lambda: view.known("a") == core.own)
        core.own = replace(core.own, state=CoreState.DRAINING)
        member.changed()
        await until(lambda: view.known("a") == core.own)


async def test_what_redis_loses_while_blocks_are_written_is_written_again(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = Core(record("a"))
    core.fill(KEYS[:9])
    client = redis_client(server.url, timeout=TIMEOUT)
    publisher = BlockPublisher(client, Keys("test"), "a", core.published(), lambda: "first", 1)
    await publisher.publish()
    core.fill(KEYS[9:12])
    add = BlockPublisher._add

    async def lost_behind_it(self: BlockPublisher, changes: BlockChanges) -> bool:
        added = await add(self, changes)
        await client.flushall()
        self.reset()
        return added

    with monkeypatch.context() as patch:
        patch.setattr(BlockPublisher, "_add", lost_behind_it)
        await publisher.publish()
    await publisher.publish()
    assert await client.hget("test:1:kv-snapshot:a", "head") is not None
    await close_client(client)


async def test_a_core_that_starts_without_redis_registers_when_it_can(server: RedisServer) -> None:
    await server.stop()
    core = Core(record("a"))
    async with watching(server.url) as view, joined(server.url, core) as member:
        await until(lambda: view.fleet.failures and member.failures)
        assert view.fleet.cores() == {}
        await server.start()
        await until(lambda: view.known("a"))


async def test_routes_that_cannot_be_written_are_bounded(server: RedisServer) -> None:
    async with watching(server.url) as view:
        await until(lambda: view.fleet.healthy)
        await server.stop()
        await until(lambda: not view.fleet.healthy)
        for i in range(routes.MAX_QUEUED + 7):
            view.fleet.note_route(f"r{i}", ROUTE)
        assert view.fleet.dropped_routes == 7
        assert await view.fleet.find_route("r7") == ROUTE


@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_is_lost_a_mirror_becomes_what_the_core_has(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Random events with short logs, and losses of every kind in between."""
    chance = random.Random(seed)
    monkeypatch.setattr(block_publisher, "ENTRY_EVENTS", 5)
    monkeypatch.setattr(block_publisher, "LIFETIME", 0.4)  # so that losses are looked for often
    core = Core(record("a"), blocks=30)
    core.log._capacity = 12
    async with Redis.from_url(server.url) as client, watching(server.url) as view, joined(server.url, core) as member:
        member._blocks._snapshot_events = 17
        for _ in range(60):
            action = chance.random()
            if action < 0.7:
                core.fill(chance.sample(KEYS[:80], chance.randint(1, 30)))
            elif action < 0.78:
                core.restart(f"incarnation {chance.random()}")
            elif action < 0.84:
                await client.delete("test:1:kv:a")
            elif action < 0.9:
                await client.delete("test:1:kv-snapshot:a")
            elif action < 0.95:
                await client.delete("test:1:core:a")
            else:
                await client.flushall()
            if chance.random() < 0.4:
                await until(lambda: view.mirrors_of(core))
        await until(lambda: view.mirrors_of(core))
        assert await client.xlen("test:1:kv:a") <= 40, "the stream is bounded"
        async with watching(server.url) as late:
            await until(lambda: late.mirrors_of(core))
        await until(lambda: view.known("a") == core.own)
