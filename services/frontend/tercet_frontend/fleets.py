"""From settings to the registry: cores that were named, cores that are found in Redis, or both."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tercet_frontend.cores.connection import checked_address
from tercet_shared.errors import ConfigurationError
from tercet_shared.registry.client import close_client, redis_client
from tercet_shared.registry.redis import RedisFleet
from tercet_shared.registry.static import StaticFleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from tercet_shared.config import FrontendSettings
    from tercet_shared.registry.interface import BlockBatch, BlockSink, CoreRecord, Fleet, RouteRecord

TIMEOUT = 2.0
"""Seconds for a connection to Redis and for an answer: nothing on the way of a request waits for it."""


@asynccontextmanager
async def open_fleet(
    settings: FrontendSettings, sink: BlockSink | None
) -> AsyncIterator[tuple[Fleet, BlockSink | None]]:
    """Yields the registry, and who is to be told of block events that come over the cores' own streams.

    Block events come one way for each core: through Redis for those that are found there, over the stream for those
    that were named.

    Args:
        settings: of the front end.
        sink: wants to know what cores have cached; None: nobody does.

    Raises:
        ConfigurationError: there are no cores, or one is named twice or has no address.
    """
    addresses = settings.core
    if len(set(addresses)) != len(addresses):
        raise ConfigurationError("A core is given twice (--core).", param="core")
    for address in addresses:
        checked_address(address)
    static = StaticFleet(addresses)
    if not finds_cores(settings):
        if not addresses:
            raise ConfigurationError("No core is given (--core), and no Redis to find one in.", param="core")
        yield static, sink
        return
    client = redis_client(str(settings.redis_url), timeout=TIMEOUT)
    try:
        redis = RedisFleet(client, settings.redis_prefix, sink=sink)
        if not addresses:
            yield redis, None
        else:
            yield JoinedFleet(static, redis), None if sink is None else UnregisteredSink(sink, redis)
    finally:
        await close_client(client)


def finds_cores(settings: FrontendSettings) -> bool:
    """Returns whether cores are looked for in Redis."""
    return settings.redis_url is not None and settings.discover_cores


class JoinedFleet:
    """A `Fleet` of cores that were named and of cores that register. What is written down goes to the registry.

    Args:
        named: those that were named.
        registry: those that register; where both have an address, its record counts.
    """

    def __init__(self, named: Fleet, registry: Fleet) -> None:
        self._named = named
        self._registry = registry

    async def run(self) -> None:
        """See `Fleet`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._named.run())
            group.create_task(self._registry.run())

    def cores(self) -> Mapping[str, CoreRecord | None]:
        """See `Fleet`."""
        return {**self._named.cores(), **self._registry.cores()}

    def watch(self, changed: Callable[[], None]) -> None:
        """See `Fleet`."""
        self._named.watch(changed)
        self._registry.watch(changed)

    def note_route(self, request_id: str, route: RouteRecord) -> None:
        """See `Fleet`."""
        self._registry.note_route(request_id, route)

    async def find_route(self, request_id: str) -> RouteRecord | None:
        """See `Fleet`."""
        return await self._registry.find_route(request_id)

    @property
    def healthy(self) -> bool:
        """See `Fleet`."""
        return self._registry.healthy


class UnregisteredSink:
    """A `BlockSink` that passes on what is said of cores which the registry does not have.

    Args:
        sink: hears it.
        registry: tells of its own cores by itself.
    """

    def __init__(self, sink: BlockSink, registry: Fleet) -> None:
        self._sink = sink
        self._registry = registry
        self._registered: frozenset[str] = frozenset()
        registry.watch(self._look)

    def blocks(self, core_id: str, incarnation: str, batch: BlockBatch) -> None:
        """See `BlockSink`."""
        if core_id not in self._registered:
            self._sink.blocks(core_id, incarnation, batch)

    def forget(self, core_id: str) -> None:
        """See `BlockSink`."""
        if core_id not in self._registered:
            self._sink.forget(core_id)

    def _look(self) -> None:
        records = self._registry.cores().values()
        self._registered = frozenset(record.core_id for record in records if record is not None)
