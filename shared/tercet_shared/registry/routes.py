"""Routes of requests on their way into Redis: queued, of each request the latest, and sent together."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

from tercet_shared.registry.layout import encode_route

if TYPE_CHECKING:
    from tercet_shared.registry.client import RedisClient
    from tercet_shared.registry.interface import RouteRecord
    from tercet_shared.registry.layout import Keys

MAX_QUEUED = 16_384
"""Routes that wait to be written; the oldest beyond are dropped."""

_BATCH = 256


class RouteWriter:
    """Writes routes down. `note` never waits; somebody calls `flush`, one call at a time.

    Args:
        client: of Redis.
        keys: names of its keys.
        ttl: seconds that a route is kept after it was last written.
        max_queued: see `MAX_QUEUED`.

    Attributes:
        dropped: routes that were never written.
    """

    def __init__(self, client: RedisClient, keys: Keys, *, ttl: float, max_queued: int = MAX_QUEUED) -> None:
        self.dropped = 0
        self._client = client
        self._keys = keys
        self._ttl_ms = int(ttl * 1e3)
        self._max_queued = max_queued
        self._queue: OrderedDict[str, RouteRecord] = OrderedDict()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    def note(self, request_id: str, route: RouteRecord) -> None:
        """Queues a route; it takes the place of an earlier one of its request."""
        self._queue[request_id] = route
        if len(self._queue) > self._max_queued:
            self._queue.popitem(last=False)
            self.dropped += 1
        self._filled.set()

    def queued(self, request_id: str) -> RouteRecord | None:
        """Returns a route that waits to be written."""
        return self._queue.get(request_id)

    async def wait(self) -> None:
        """Returns when there is something to write."""
        while not self._queue:
            self._filled.clear()
            await self._filled.wait()

    async def flush(self) -> None:
        """Writes a bounded number of routes.

        Raises:
            RedisError, OSError: Redis cannot be reached, or refuses; the routes wait on, as far as there is room.
        """
        batch = dict(islice(self._queue.items(), _BATCH))
        pipeline = self._client.pipeline(transaction=False)
        for request_id, route in batch.items():
            pipeline.set(self._keys.route(request_id), encode_route(route), px=self._ttl_ms)
        await pipeline.execute()
        for request_id, route in batch.items():
            if self._queue.get(request_id) is route:  # else a later one came meanwhile
                del self._queue[request_id]
