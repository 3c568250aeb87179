"""The registry of front ends that find their cores in Redis; the cores' side is `tercet_shared.registry.member`.

Three loops, none of which a failure of Redis ends: the picture of the cores, what they have cached, and routes. While
Redis is away the picture stays as it was; when it is back, every core has its time to live to show itself again,
because cores have been cut off too, or Redis has begun empty.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tercet_shared.errors import ProtocolError, UnavailableError
from tercet_shared.registry.block_follower import BlockFollower, streams_of
from tercet_shared.registry.client import REDIS_FAILURES, raise_if_cancelled
from tercet_shared.registry.layout import Keys, StoredCore, core_of, decode_route
from tercet_shared.registry.routes import RouteWriter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from tercet_shared.registry.client import RedisClient
    from tercet_shared.registry.interface import BlockSink, CoreRecord, RouteRecord

_log = logging.getLogger(__name__)

ROUTE_TTL = 3_600.0
"""Seconds that a route is kept."""

PATIENCE = 5.0
"""Seconds for one round of a loop, beyond which Redis counts as away."""

_FETCH = 128
"""Records that are read with one pipeline, and that one round reads again although nothing was announced."""


_BLOCK = 0.5
"""Seconds that one command waits for announcements: less than the client's timeout."""


@dataclass(slots=True)
class _Known:
    """A core that was found: its record, its latest heartbeat, and when that was seen, by this process's clock."""

    stored: StoredCore
    beat: float
    seen: float
    read: float


class RedisFleet:
    """A `Fleet` in Redis.

    Args:
        client: of Redis, with a timeout of a second at least; the caller closes it.
        prefix: of all keys.
        sink: hears what cores have cached; None: nobody does, and it is not read.
        interval: seconds between looks at the heartbeats. Announced changes are seen at once.
        route_ttl: see `ROUTE_TTL`.

    Attributes:
        failures: rounds in which Redis could not be reached, refused, or held what makes no sense.
    """

    def __init__(
        self,
        client: RedisClient,
        prefix: str = "tercet",
        *,
        sink: BlockSink | None = None,
        interval: float = 1.0,
        route_ttl: float = ROUTE_TTL,
    ) -> None:
        self.failures = 0
        self._client = client
        self._keys = Keys(prefix)
        self._interval = interval
        self._known: dict[str, _Known] = {}
        self._absent: dict[str, float] = {}  # ids without a record, by the heartbeat that they had
        self._by_address: dict[str, CoreRecord | None] = {}
        self._watchers: list[Callable[[], None]] = []
        self._away: set[str] = {"cores"}  # loops whose latest round failed, or that have had none
        self._blocks = BlockFollower(client, self._keys, sink) if sink is not None else None
        self._routes = RouteWriter(client, self._keys, ttl=route_ttl)
        self._cursor: bytes | None = None  # of the announcements

    @property
    def healthy(self) -> bool:
        """Whether the latest word of Redis is current."""
        return not self._away

    @property
    def dropped_routes(self) -> int:
        """Routes that were never written."""
        return self._routes.dropped

    @property
    def block_gaps(self) -> int:
        """How often block events were missing, so that a snapshot had to be read."""
        return self._blocks.gaps if self._blocks is not None else 0

    def cores(self) -> Mapping[str, CoreRecord | None]:
        """See `Fleet`. Of cores that give the same address, the one that started last counts."""
        return self._by_address

    def watch(self, changed: Callable[[], None]) -> None:
        """See `Fleet`."""
        self._watchers.append(changed)

    def note_route(self, request_id: str, route: RouteRecord) -> None:
        """See `Fleet`."""
        self._routes.note(request_id, route)

    async def find_route(self, request_id: str) -> RouteRecord | None:
        """See `Fleet`."""
        if (queued := self._routes.queued(request_id)) is not None:
            return queued
        try:
            async with asyncio.timeout(PATIENCE):
                raw = await self._client.get(self._keys.route(request_id))
            raise_if_cancelled()
            return decode_route(raw) if isinstance(raw, bytes) else None
        except (*REDIS_FAILURES, ProtocolError):
            self.failures += 1
            raise UnavailableError("Redis cannot be reached.", retry_after=self._interval) from None

    async def run(self) -> None:
        """See `Fleet`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_cores())
            group.create_task(self._write_routes())
            if self._blocks is not None:
                group.create_task(self._follow_blocks(self._blocks))

    # ---------------------------------------------------------------------------------------- loops

    async def _watch_cores(self) -> None:
        while True:
            if await self._succeeds("cores", self._look):
                if not await self._succeeds("cores", self._listen):
                    await asyncio.sleep(self._interval)
            else:
                await asyncio.sleep(self._interval)

    async def _follow_blocks(self, blocks: BlockFollower) -> None:
        more = False

        async def follow() -> None:
            nonlocal more
            more = await blocks.follow()

        while True:
            more = False
            await self._succeeds("blocks", follow)
            # Events are written in batches, so there is nothing to be told of in between.
            await asyncio.sleep(0 if more else self._interval / 2)

    async def _write_routes(self) -> None:
        while True:
            await self._routes.wait()
            if not await self._succeeds("routes", self._routes.flush):
                await asyncio.sleep(self._interval)

    async def _succeeds(self, what: str, round_: Callable[[], Awaitable[None]]) -> bool:
        try:
            async with asyncio.timeout(PATIENCE):
                await round_()
        except (*REDIS_FAILURES, ProtocolError) as error:
            self.failures += 1
            if what not in self._away or self.failures == 1:
                _log.warning("Redis cannot be used (%s: %s); what is known stays", what, type(error).__name__)
            self._away.add(what)
            raise_if_cancelled()
            return False
        if what in self._away:
            self._away.remove(what)
            if not self._away and self.failures:
                _log.info("Redis can be used again")
        raise_if_cancelled()
        return True

    # ---------------------------------------------------------------------------------------- cores

    async def _look(self) -> None:
        """Reads all heartbeats, the records of cores that are new, and some that were read long ago."""
        if self._cursor is None or "cores" in self._away:
            latest: Any = await self._client.xrevrange(self._keys.changes, count=1)
            self._cursor = latest[0][0] if latest else b"0-0"
        beats: Any = await self._client.zrange(self._keys.cores, 0, -1, withscores=True)
        now = asyncio.get_running_loop().time()
        if "cores" in self._away:
            for core in self._known.values():
                core.seen = now
        new = []
        found = {raw.decode(errors="replace"): float(beat) for raw, beat in beats}
        for core_id, beat in found.items():
            known = self._known.get(core_id)
            if known is None:
                if self._absent.get(core_id) != beat:
                    new.append(core_id)
            elif known.beat != beat:
                known.beat, known.seen = beat, now
        self._absent = {core_id: beat for core_id, beat in self._absent.items() if found.get(core_id) == beat}
        gone = [core_id for core_id, core in self._known.items() if now - core.seen > core.stored.ttl]
        if gone:
            await self._client.zrem(self._keys.cores, *gone)
        due = sorted((core.read, core_id) for core_id, core in self._known.items() if core_id not in gone)
        missing = await self._read([*new, *(core_id for _, core_id in due[:_FETCH])], found)
        self._absent |= {core_id: found[core_id] for core_id in missing if core_id not in self._known}
        self._drop(gone)  # one that has no record, but is not gone for long enough, may come back: Redis may be new

    async def _listen(self) -> None:
        """Waits for announcements until the next look is due."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._interval
        while (left := until - clock()) > 0:
            cursor = {self._keys.changes: self._cursor}
            answer: Any = await self._client.xread(
                cursor,  # type: ignore[arg-type]  # a dict is invariant
                count=1_000,
                block=max(int(min(left, _BLOCK) * 1e3), 1),
            )
            announced: dict[str, bool] = {}  # the latest word of each: whether it has left
            for _, entries in streams_of(answer):
                for entry_id, fields in entries:
                    self._cursor = entry_id
                    announced[fields.get(b"core", b"").decode(errors="replace")] = fields.get(b"what") == b"down"
            if announced:
                gone = await self._read(list(announced))
                self._drop(core_id for core_id in gone if announced[core_id])

    async def _read(self, ids: list[str], beats: Mapping[str, float] | None = None) -> list[str]:
        """Reads the records of cores, whose heartbeats are known or not; returns those that have no record."""
        changed, missing = False, []
        for start in range(0, len(ids), _FETCH):
            part = ids[start : start + _FETCH]
            pipeline = self._client.pipeline(transaction=False)
            for core_id in part:
                pipeline.hgetall(self._keys.core(core_id))
            for core_id, fields in zip(part, await pipeline.execute(), strict=True):
                if fields:
                    changed |= self._take(core_id, fields, None if beats is None else beats.get(core_id))
                else:
                    missing.append(core_id)
        if ids:
            self._arrange()
        if changed:
            self._tell()
        return missing

    def _take(self, core_id: str, fields: dict[bytes, bytes], beat: float | None) -> bool:
        """Takes over a record; returns whether it differs in more than its load."""
        now = asyncio.get_running_loop().time()
        try:
            stored = core_of(core_id, fields)
        except ProtocolError as error:
            self.failures += 1
            _log.warning("%s", error.message)
            return False
        known = self._known.get(core_id)
        if known is None:
            self._known[core_id] = _Known(stored, -1.0 if beat is None else beat, now, now)
        else:
            before, known.stored, known.read = known.stored, stored, now
            if stored.same_but_load(before):
                return False
        if self._blocks is not None:
            self._blocks.known(core_id, stored.life)
        return True

    def _drop(self, ids: Iterable[str]) -> None:
        gone = [core_id for core_id in ids if self._known.pop(core_id, None) is not None]
        if not gone:
            return
        if self._blocks is not None:
            for core_id in gone:
                self._blocks.forget(core_id)
        _log.info("cores that are gone: %s", ", ".join(gone))
        self._arrange()
        self._tell()

    def _arrange(self) -> None:
        by_life = sorted(self._known.values(), key=lambda core: core.stored.life)
        self._by_address = {core.stored.record.address: core.stored.record for core in by_life}

    def _tell(self) -> None:
        for changed in self._watchers:
            changed()
