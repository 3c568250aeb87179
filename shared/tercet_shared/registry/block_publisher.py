"""A core's block events on their way into Redis: a stream that is bounded, and a snapshot from which it leads on."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from tercet_shared.hashing import KEY_BYTES
from tercet_shared.registry.blocks import BlockChanges

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_shared.registry.blocks import BlockLog
    from tercet_shared.registry.client import RedisClient
    from tercet_shared.registry.layout import Keys

ENTRY_EVENTS = 4_096
"""Events of one entry of the stream: 68 KiB."""

PIECE_KEYS = 16_384
"""Keys of one piece of a snapshot: 256 KiB."""

SNAPSHOT_EVENTS = 65_536
"""Events after which the next snapshot is written. The stream holds at most about twice as many: those since the
snapshot before the latest, so that who reads one of the two finds what comes after it."""

SNAPSHOT_AGE = 120.0
"""Seconds after which it is, if there were any events: then what Redis has lost on the way is known again."""

LIFETIME = 60.0
"""Seconds that stream and snapshot outlive their core."""


class BlockPublisher:
    """Writes the events of one core. One call at a time.

    Args:
        client: of Redis.
        keys: names of its keys.
        core_id: whose events.
        log: where they come from.
        incarnation: returns the present one; it is asked together with the log, so that events and it agree.
        life: of the core; see `tercet_shared.registry.layout`.
        snapshot_events: see `SNAPSHOT_EVENTS`.
        snapshot_age: see `SNAPSHOT_AGE`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        client: RedisClient,
        keys: Keys,
        core_id: str,
        log: BlockLog,
        incarnation: Callable[[], str],
        life: int,
        *,
        snapshot_events: int = SNAPSHOT_EVENTS,
        snapshot_age: float = SNAPSHOT_AGE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._stream = keys.blocks(core_id)
        self._snapshot = keys.snapshot(core_id)
        self._log = log
        self._incarnation = incarnation
        self._life = life
        self._snapshot_events = snapshot_events
        self._snapshot_age = snapshot_age
        self._clock = clock
        self._number: int | None = None  # of the last event that Redis has; None: it has nothing
        self._lost = False  # perhaps, since `publish` began
        self._streaming = False  # whether the stream exists
        self._snapshots = (0, 0)  # numbers of the latest snapshot and of the one before it
        self._pieces: list[str] = []  # of the latest snapshot
        self._taken_at = 0.0
        self._touched_at = 0.0

    def reset(self) -> None:
        """Begins anew with the next `publish`, because Redis may have lost something; perhaps while one runs."""
        self._number = None
        self._lost = True

    async def publish(self) -> None:
        """Writes what has happened since the last time.

        Raises:
            RedisError, OSError: Redis cannot be reached, or refuses; the next call begins anew.
        """
        number, self._number = self._number, None  # until all went well
        self._lost = False
        if number is None:
            number = await self._begin()
        while True:
            changes = self._log.since(number, ENTRY_EVENTS)
            if changes is None:
                number = await self._begin()
                break
            if not changes:
                break
            if not await self._add(changes):
                number = await self._begin()
                break
            number = changes.last
        news = number - self._snapshots[0]
        if news >= self._snapshot_events or (news and self._clock() - self._taken_at >= self._snapshot_age):
            await self._take_snapshot()
            await self._client.xtrim(self._stream, minid=f"{self._life}-{self._snapshots[1] + 1}", approximate=False)
        if self._clock() - self._touched_at >= LIFETIME / 4 and not await self._touch():
            return  # something is gone: anew the next time
        if not self._lost:
            self._number = number

    async def remove(self) -> None:
        """Takes everything away. Raises as `publish` does."""
        self._number = None
        for key in (self._stream, self._snapshot):  # one by one: they may be in different places
            await self._client.delete(key)

    async def _begin(self) -> int:
        await self.remove()
        self._streaming, self._pieces = False, []
        number = await self._take_snapshot()
        self._snapshots = (number, number)
        # What came before is in no entry: one without events says so to those who have not come as far.
        await self._add(BlockChanges(number, b"", b""))
        await self._touch()
        return number

    async def _add(self, changes: BlockChanges) -> bool:
        """Appends one entry; returns False when the stream is gone."""
        fields: dict[bytes | str, bytes | str | int] = {
            "incarnation": self._incarnation(),
            "changes": changes.changes,
            "keys": changes.keys,
        }
        if changes.reset:
            fields["reset"] = 1
        added = await self._client.xadd(
            self._stream,
            fields,  # type: ignore[arg-type]  # a dict is invariant
            # An entry without events (all is gone) takes the number that says so.
            id=f"{self._life}-{changes.last}",
            nomkstream=self._streaming,
        )
        self._streaming = bool(added)
        return self._streaming

    async def _take_snapshot(self) -> int:
        """Writes the pieces first and then what names them, so that no reader meets a half of it."""
        snapshot, incarnation = self._log.snapshot(), self._incarnation()
        width = PIECE_KEYS * KEY_BYTES
        pieces: list[str] = []
        for start in range(0, len(snapshot.keys), width):
            name = f"{snapshot.number}:{len(pieces)}"
            await self._client.hset(self._snapshot, name, snapshot.keys[start : start + width])
            pieces.append(name)
        head = {"life": self._life, "number": snapshot.number, "incarnation": incarnation, "pieces": pieces}
        await self._client.hset(self._snapshot, "head", json.dumps(head))
        old = [name for name in self._pieces if name not in pieces]
        if old:
            await self._client.hdel(self._snapshot, *old)
        self._pieces = pieces
        self._snapshots = (snapshot.number, self._snapshots[0])
        self._taken_at = self._clock()
        return snapshot.number

    async def _touch(self) -> bool:
        """Lets stream and snapshot live on; returns False when one of them is gone."""
        self._touched_at = self._clock()
        kept = await self._client.pexpire(self._snapshot, int(LIFETIME * 1e3))
        if self._streaming:
            kept = await self._client.pexpire(self._stream, int(LIFETIME * 1e3)) and kept
        return bool(kept)
