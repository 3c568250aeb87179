"""A core's membership in Redis: its record, its heartbeat and its block events."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Protocol

from tercet_shared.registry.block_publisher import BlockPublisher
from tercet_shared.registry.client import REDIS_FAILURES, raise_if_cancelled
from tercet_shared.registry.layout import MAX_CHANGES, Keys, StoredCore, core_fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tercet_shared.registry.blocks import BlockLog
    from tercet_shared.registry.client import RedisClient
    from tercet_shared.registry.interface import CoreRecord

_log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds for all that one round has to say, beyond which it counts as failed."""


_GOODBYE = 1.0
"""Seconds for leaving: whoever stops a core waits for it."""

_FORGOTTEN = 86_400.0
"""Seconds without a heartbeat after which nobody looks for a core any more; more than clocks differ."""


class Registrant(Protocol):
    """What a core says of itself whenever it is asked, at once."""

    def record(self) -> CoreRecord:
        """Returns its record as it is now."""


class RedisMember:
    """Keeps one core registered, through failures and losses of Redis, until it leaves.

    Args:
        client: of Redis; the caller closes it.
        prefix: of all keys.
        itself: the core.
        blocks: its block events.
        interval: seconds between heartbeats.
        ttl: seconds after the last heartbeat until the core counts as gone.

    Attributes:
        failures: rounds in which Redis could not be reached or refused.
    """

    def __init__(
        self, client: RedisClient, prefix: str, itself: Registrant, blocks: BlockLog, *, interval: float, ttl: float
    ) -> None:
        self.failures = 0
        self._client = client
        self._keys = Keys(prefix)
        self._itself = itself
        self._interval = interval
        self._ttl = ttl
        self._core_id = itself.record().core_id
        self._life = time.time_ns() // 1_000_000
        self._blocks = BlockPublisher(
            client, self._keys, self._core_id, blocks, lambda: itself.record().incarnation, self._life
        )
        self._announced: StoredCore | None = None
        self._away = {"record"}  # what did not reach Redis the last time
        self._news = asyncio.Event()
        self._registered = asyncio.Event()  # for the first time

    @property
    def healthy(self) -> bool:
        """Whether Redis has what this core says."""
        return not self._away

    def changed(self) -> None:
        """Says that the record differs in more than its load: that is announced at once."""
        self._news.set()

    async def run(self) -> None:
        """Keeps the core registered until cancelled; failures of Redis never end it."""
        # Apart: a snapshot takes a while, which must not look as if the core had vanished.
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_record())
            group.create_task(self._keep_blocks())

    async def _keep_record(self) -> None:
        while True:
            self._news.clear()
            await self._succeeds("record", self._round)
            try:
                async with asyncio.timeout(self._interval / 2):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _keep_blocks(self) -> None:
        await self._registered.wait()  # which finds out whether Redis has anything
        while True:
            await self._succeeds("blocks", self._blocks.publish)
            await asyncio.sleep(self._interval / 2)

    async def _succeeds(self, what: str, round_: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                await round_()
        except REDIS_FAILURES as error:
            self._failed(what, error)
        else:
            if what in self._away:
                self._away.discard(what)
                if not self._away:
                    _log.info("core %s is registered", self._core_id)
        raise_if_cancelled()

    async def leave(self) -> None:
        """Takes the core out of the registry, if Redis can be reached; else its keys expire. `run` has ended."""
        try:
            async with asyncio.timeout(_GOODBYE):
                await self._client.delete(self._keys.core(self._core_id))
                await self._client.zrem(self._keys.cores, self._core_id)
                await self._announce("down")
                await self._blocks.remove()
        except REDIS_FAILURES as error:
            self._failed("record", error)

    async def _round(self) -> None:
        core = StoredCore(self._itself.record(), self._life, self._ttl)
        name = self._keys.core(self._core_id)
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hset(name, mapping=core_fields(core))  # type: ignore[arg-type]  # a dict is invariant
        pipeline.pexpire(name, int(self._ttl * 1e3))
        pipeline.zadd(self._keys.cores, {self._core_id: time.time_ns() // 1_000_000})
        created, *_ = await pipeline.execute()
        if created:  # its fields were not there: this is the first time, or Redis has lost them
            self._blocks.reset()
        if created or self._announced is None or not self._announced.same_but_load(core):
            self._announced = None
            # Cores that died while no front end was there to see it have left their ids behind.
            await self._client.zremrangebyscore(self._keys.cores, 0, (time.time() - _FORGOTTEN) * 1e3)
            await self._announce("up")
            self._announced = core
        self._registered.set()

    async def _announce(self, what: str) -> None:
        await self._client.xadd(
            self._keys.changes, {"core": self._core_id, "what": what}, maxlen=MAX_CHANGES, approximate=True
        )

    def _failed(self, what: str, error: Exception) -> None:
        self.failures += 1
        if not self._away or self.failures == 1:
            _log.warning("Redis cannot be reached (%s); core %s goes on without", type(error).__name__, self._core_id)
        self._away.add(what)
