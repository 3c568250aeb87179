"""Cores come, change, go, restart and vanish, and front ends see it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from tercet_shared.registry.interface import CoreLoad, CoreState, RouteRecord
from tercet_shared.registry.layout import MAX_CHANGES, StoredCore, core_fields
from tests.fakes.redis_server import RedisServer
from tests.integration.registry.conftest import KEYS, Core, found, joined, record, until, watching


async def test_a_core_joins_changes_and_leaves(server: RedisServer) -> None:
    core = Core(record("a"))
    async with watching(server.url) as view:
        async with joined(server.url, core) as member:
            await until(lambda: view.known("a") == core.own)
            await until(lambda: member.healthy)
            changes = view.changes
            core.own = replace(core.own, load=CoreLoad(running=9, free_blocks=1))
            await until(lambda: view.known("a") == core.own)
            assert view.changes == changes, "load is no change"
            core.own = replace(core.own, state=CoreState.DRAINING)
            member.changed()
            await until(lambda: view.known("a") == core.own)
            assert view.changes == changes + 1
            await until(lambda: view.mirrors_of(core))
        await until(lambda: not view.fleet.cores())
        assert view.mirrors.forgotten == ["a"]
        assert view.fleet.healthy
        async with Redis.from_url(server.url) as client:
            left = {key for key in await client.keys() if b"changes" not in key}
            assert not left, "a core that left leaves nothing behind"


async def test_a_core_that_vanishes_is_gone_when_its_time_is_over(server: RedisServer) -> None:
    stays, vanishes = Core(record("stays")), Core(record("vanishes"))
    vanishes.fill(KEYS[:3])
    async with watching(server.url) as view, joined(server.url, stays):
        async with joined(server.url, vanishes, leave=False):
            await until(lambda: view.mirrors_of(vanishes) and view.mirrors_of(stays))
        async with Redis.from_url(server.url) as client:  # as it would have said, had it not had to live with that
            await client.hset("test:1:core:vanishes", "ttl_ms", "500")
        await until(lambda: view.known("vanishes") is None)
        assert view.known("stays") is not None
        assert view.mirrors.forgotten == ["vanishes"]
        async with watching(server.url) as late:
            await until(lambda: late.known("stays"))
            assert late.known("vanishes") is None


async def test_a_core_that_restarts_takes_the_place_of_the_one_before(server: RedisServer) -> None:
    address = "10.0.0.1:8100"
    old = Core(record("old", address=address))
    new = Core(record("new", address=address, incarnation="second"))
    async with watching(server.url) as view:
        async with joined(server.url, old, ttl=1.0, leave=False):
            await until(lambda: view.known("old"))
        async with joined(server.url, new):
            await until(lambda: view.known("new"))
            assert set(view.fleet.cores()) == {address}
            await until(lambda: "old" in view.mirrors.forgotten)
            assert view.known("new") is not None


async def test_a_core_of_the_same_name_begins_a_new_life(server: RedisServer) -> None:
    first = Core(record("a"))
    first.fill(KEYS[:40])
    async with watching(server.url) as view:
        async with joined(server.url, first, leave=False):
            await until(lambda: view.mirrors_of(first))
        second = Core(record("a", incarnation="second"))
        second.fill(KEYS[40:43])
        async with joined(server.url, second):
            await until(lambda: view.mirrors_of(second))
            second.fill(KEYS[50:53])
            await until(lambda: view.mirrors_of(second))


async def test_a_new_worker_clears_what_was_cached(server: RedisServer) -> None:
    core = Core(record("a"))
    core.fill(KEYS[:40])
    async with watching(server.url) as view, joined(server.url, core) as member:
        await until(lambda: view.mirrors_of(core))
        core.restart("second")
        member.changed()
        await until(lambda: view.mirrors_of(core))
        core.fill(KEYS[:2])
        await until(lambda: view.mirrors_of(core))
        assert view.fleet.block_gaps == 0


async def test_a_late_front_end_reads_a_snapshot_in_pieces(server: RedisServer) -> None:
    core = Core(record("a"), blocks=50_000)
    core.fill(KEYS[:50_000])
    async with joined(server.url, core) as member:
        await until(lambda: member.healthy)
        core.fill(KEYS[50_000:50_010])
        async with watching(server.url) as view:
            await until(lambda: view.mirrors_of(core))
            assert view.mirrors.cores["a"].voids == 0


async def test_many_cores_are_one_picture(server: RedisServer) -> None:
    client = Redis.from_url(server.url)
    cores = [Core(record(f"core-{i}")) for i in range(5)]
    async with watching(server.url) as view, asyncio.TaskGroup() as group:
        stop = asyncio.Event()

        async def live(core: Core) -> None:
            async with joined(server.url, core):
                await stop.wait()

        for i, core in enumerate(cores):
            core.fill(KEYS[i * 10 : i * 10 + 7])
            group.create_task(live(core))
        await until(lambda: len(view.fleet.cores()) == 5 and all(view.mirrors_of(core) for core in cores))
        stop.set()
    assert await client.xlen("test:1:changes") <= MAX_CHANGES
    await client.aclose()


async def test_what_makes_no_sense_is_passed_over(server: RedisServer) -> None:
    core = Core(record("good"))
    async with Redis.from_url(server.url) as client, watching(server.url) as view, joined(server.url, core):
        await until(lambda: view.mirrors_of(core))
        await client.hset("test:1:core:bad", mapping={"address": "x", "served_names": "{"})
        await client.zadd("test:1:cores", {"bad": 1.0, "nobody": 2.0, b"\xff": 3.0})
        await client.set("test:1:route:r", "[]")
        await until(lambda: view.fleet.failures)
        core.fill(KEYS[:5])
        core.own = replace(core.own, load=CoreLoad(running=7))
        await until(lambda: view.mirrors_of(core) and view.known("good") == core.own)
        assert len(view.fleet.cores()) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"served_names": "[" * 100_000},
        {"ttl_ms": "9" * 400},
        {"ttl_ms": "0"},
        {"life": "9" * 30},
        {"life": "-1"},
        {"block_size": "0"},
        {"running": "-1"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_a_record_that_is_out_of_range_harms_nobody_else(server: RedisServer, wrong: dict[str, str]) -> None:
    core = Core(record("good"))
    own = core_fields(StoredCore(record("bad"), life=1, ttl=60.0))
    async with Redis.from_url(server.url) as client, watching(server.url) as view, joined(server.url, core):
        await client.hset("test:1:core:bad", mapping={**own, **wrong})  # type: ignore[arg-type]
        await client.hset("test:1:kv-snapshot:bad", "head", '{"life": 1, "number": 0, "incarnation": "", "pieces": []}')
        await client.zadd("test:1:cores", {"bad": time.time() * 1e3})
        await until(lambda: view.fleet.failures)
        core.fill(KEYS[:5])
        await until(lambda: view.mirrors_of(core))
        assert view.known("bad") is None


@pytest.mark.parametrize(
    "wrong", ["{", "[" * 100_000, '{"life": 1, "number": 1e999, "incarnation": "", "pieces": []}', "an entry"]
)
async def test_blocks_that_make_no_sense_harm_nobody_else(server: RedisServer, wrong: str) -> None:
    core = Core(record("good"))
    own = core_fields(StoredCore(record("a bad one"), life=1, ttl=60.0))
    async with Redis.from_url(server.url) as client:
        await client.hset("test:1:core:a bad one", mapping=own)  # type: ignore[arg-type]
        await client.zadd("test:1:cores", {"a bad one": time.time() * 1e3})
        head = wrong
        if wrong == "an entry":
            head = '{"life": 1, "number": 0, "incarnation": "", "pieces": []}'
            await client.xadd("test:1:kv:a bad one", {"changes": b"\0", "keys": b"short"}, id="1-1")
        await client.hset("test:1:kv-snapshot:a bad one", "head", head)
        async with watching(server.url) as view:
            await until(lambda: view.fleet.failures and view.known("a bad one"))
            async with joined(server.url, core):
                core.fill(KEYS[:5])
                await until(lambda: view.mirrors_of(core))


async def test_routes_are_written_and_found(server: RedisServer) -> None:
    route = RouteRecord(core_id="a", front_end="f", attempt=0, traceparent="00-1-2-01", state="running")
    async with watching(server.url) as view, watching(server.url) as other:
        await until(lambda: view.fleet.healthy and other.fleet.healthy)
        assert await other.fleet.find_route("r1") is None
        for i in range(600):
            view.fleet.note_route(f"r{i}", route)
        moved = replace(route, core_id="b", attempt=1)
        view.fleet.note_route("r1", moved)
        assert await view.fleet.find_route("r1") == moved, "before it is written, too"
        async with Redis.from_url(server.url) as client:
            await found(other.fleet, "r1", moved)
            await found(other.fleet, "r599", route)
            assert 0 < await client.pttl("test:1:route:r1") <= 3_600_000
        assert view.fleet.dropped_routes == 0
