"""Cores and front ends of a fleet, as far as the registry is concerned, on a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tercet_core.kv_cache.block_pool import BlockPool
from tercet_core.kv_cache.events import BlockEvents
from tercet_core.kv_cache.published import PublishedBlocks
from tercet_shared.hashing import BlockKey, chain, root_key
from tercet_shared.registry import member, redis
from tercet_shared.registry.client import close_client, redis_client
from tercet_shared.registry.interface import CoreLoad, CoreRecord, CoreState, RouteRecord
from tercet_shared.registry.member import RedisMember
from tercet_shared.registry.redis import RedisFleet
from tercet_shared.wire.step import BlockId
from tests.fakes.block_mirror import Mirrors
from tests.fakes.redis_server import RedisServer, redis_server

TIMEOUT = 60.0
INTERVAL = 0.1
KEYS = chain(root_key("model"), np.arange(60_000 * 2, dtype=np.int32), 2)


def record(core_id: str, **changes: Any) -> CoreRecord:
    own = CoreRecord(
        core_id=core_id, address=f"{core_id}.example:8100", incarnation="first", served_names=("chat", "ü, model"),
        source="org/model", revision="main", model_fingerprint="m", tokenizer_fingerprint="t", block_size=16,
        state=CoreState.READY, load=CoreLoad(running=1, waiting=2, pending_tokens=3, free_blocks=4),
    )  # fmt: skip
    return replace(own, **changes)


@dataclass
class Core:
    """What registers; ``own`` may be replaced at any time, and the pool filled."""

    own: CoreRecord
    blocks: int = 64
    log: BlockEvents = field(default_factory=BlockEvents)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.blocks, events=self.log)

    def record(self) -> CoreRecord:
        return self.own

    def published(self) -> PublishedBlocks:
        holder: Any = SimpleNamespace(pool=self.pool)
        return PublishedBlocks(holder)

    def cached(self) -> set[BlockKey]:
        return set(self.pool.snapshot()[1])

    def fill(self, keys: list[BlockKey]) -> None:
        """Caches keys, perhaps in the place of others."""
        taken = self.pool.take(len(keys))
        for block, key in zip(taken.tolist(), keys, strict=True):
            self.pool.publish(BlockId(block), key)
        self.pool.release(taken)

    def restart(self, incarnation: str) -> None:
        self.own = replace(self.own, incarnation=incarnation)
        self.pool.clear_keys()


@asynccontextmanager
async def joined(
    url: str, core: Core, *, ttl: float = 3_600.0, leave: bool = True, patience_s: float = TIMEOUT
) -> AsyncIterator[RedisMember]:
    """A core in the fleet; without ``leave`` it vanishes at the end. ``patience_s``: until Redis counts as away."""
    client = redis_client(url, timeout=patience_s)
    own = RedisMember(client, "test", core, core.published(), interval=INTERVAL, ttl=ttl)
    task = asyncio.create_task(own.run())
    try:
        yield own
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if leave:
            await own.leave()
        await close_client(client)


@dataclass
class Watching:
    fleet: RedisFleet
    mirrors: Mirrors
    changes: int = 0

    def known(self, core_id: str) -> CoreRecord | None:
        found = [core for core in self.fleet.cores().values() if core is not None and core.core_id == core_id]
        return found[0] if found else None

    def mirrors_of(self, core: Core) -> bool:
        mirror = self.mirrors.cores.get(core.own.core_id)
        return (
            mirror is not None
            and mirror.keys == core.cached()
            and mirror.number == core.log.latest
            and mirror.incarnation == core.own.incarnation
        )


@asynccontextmanager
async def watching(url: str, *, patience_s: float = TIMEOUT) -> AsyncIterator[Watching]:
    """A front end's view of the fleet."""
    client = redis_client(url, timeout=patience_s)
    mirrors = Mirrors()
    fleet = RedisFleet(client, "test", sink=mirrors, interval=INTERVAL)
    view = Watching(fleet, mirrors)

    def changed() -> None:
        view.changes += 1

    fleet.watch(changed)
    task = asyncio.create_task(fleet.run())
    try:
        yield view
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), "the fleet has ended by itself"
        await close_client(client)


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Lets the clock of the running loop jump."""
    loop = asyncio.get_running_loop()
    later = loop.time() - time.monotonic() + seconds
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + later)


async def until(condition: Callable[[], object]) -> None:
    """Waits for what comes from another side, for which there is no event here."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def found(fleet: RedisFleet, request_id: str, route: RouteRecord) -> None:
    """Waits until a route has been written."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            if await fleet.find_route(request_id) == route:
                return
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives Redis all the time that it takes on a busy machine."""
    monkeypatch.setattr(member, "PATIENCE", TIMEOUT)
    monkeypatch.setattr(member, "_GOODBYE", TIMEOUT)
    monkeypatch.setattr(redis, "PATIENCE", TIMEOUT)


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    async with redis_server() as running:
        yield running
