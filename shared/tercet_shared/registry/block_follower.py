"""What cores have cached, read from Redis: snapshots first, then what happens after them, in bounded portions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tercet_shared.errors import ProtocolError
from tercet_shared.hashing import KEY_BYTES
from tercet_shared.registry.block_publisher import ENTRY_EVENTS, PIECE_KEYS
from tercet_shared.registry.blocks import STORED, BlockSnapshot, split_keys
from tercet_shared.registry.client import is_cluster
from tercet_shared.registry.interface import BlockBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_shared.registry.client import RedisClient
    from tercet_shared.registry.interface import BlockSink
    from tercet_shared.registry.layout import Keys

_STREAMS = 128
"""Streams that one command reads."""

_ENTRIES = 4
"""Entries of each that it reads: with `ENTRY_EVENTS` that bounds what one answer may hold (35 MB, if all cores had
replaced their whole caches at once)."""

MAX_EVENTS = 262_144
"""Events and keys of snapshots that one call of `follow` hands over, about; the rest comes with the next."""


@dataclass(slots=True)
class _Followed:
    """How far one core is followed; ``number`` is None when a snapshot is needed."""

    life: int = 0
    number: int | None = None
    incarnation: str = ""


class BlockFollower:
    """Hands the block events of many cores to a sink. One call at a time.

    Attributes:
        gaps: how often events were missing, so that a snapshot had to be read.
    """

    def __init__(self, client: RedisClient, keys: Keys, sink: BlockSink) -> None:
        self.gaps = 0
        self._client = client
        self._keys = keys
        self._sink = sink
        self._followed: dict[str, _Followed] = {}
        self._first = 0  # whose turn it is to be read first
        self._wrong: ProtocolError | None = None  # the latest of this round

    def known(self, core_id: str, life: int) -> None:
        """Follows a core from now on; a core that has begun a new life is followed anew."""
        followed = self._followed.setdefault(core_id, _Followed(life))
        if followed.life != life:
            followed.life, followed.number = life, None

    def forget(self, core_id: str) -> None:
        """Follows a core no longer."""
        if self._followed.pop(core_id, None) is not None:
            self._sink.forget(core_id)

    async def follow(self) -> bool:
        """Hands over what has happened since the last call; returns whether there is more already.

        Raises:
            RedisError, OSError: Redis cannot be reached, or refuses.
            ProtocolError: what it has of a core makes no sense; it was followed as far as possible, and so were others.
        """
        self._wrong = None
        more = await self._follow()
        if self._wrong is not None:
            raise self._wrong
        return more

    async def _follow(self) -> bool:
        left = MAX_EVENTS
        ids = list(self._followed)
        self._first = self._first % len(ids) if ids else 0
        ids = ids[self._first :] + ids[: self._first]
        for start in range(0, len(ids), _STREAMS):
            part = ids[start : start + _STREAMS]
            for core_id in part:
                if (followed := self._followed.get(core_id)) is not None and followed.number is None and left > 0:
                    try:
                        left -= await self._load(core_id, followed)
                    except ProtocolError as error:
                        self._wrong = error
            while part and left > 0:
                part, count = await self._read(part)
                left -= count
            if left <= 0:
                self._first += start + 1  # the others first, the next time
                return True
        return False

    # ---------------------------------------------------------------------------------------- snapshots

    async def _load(self, core_id: str, followed: _Followed) -> int:
        """Reads a core's snapshot, if it can be had now; returns the number of its keys."""
        name = self._keys.snapshot(core_id)
        raw = await self._client.hget(name, "head")
        if raw is None:
            return 0
        try:
            head = json.loads(raw)
            life, number, incarnation = int(head["life"]), int(head["number"]), str(head["incarnation"])
            pieces = [str(piece) for piece in head["pieces"]]
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            raise ProtocolError(f"The snapshot of core {core_id!r} in Redis makes no sense.") from None
        keys = bytearray()
        for piece in pieces:
            part = await self._client.hget(name, piece)
            if not isinstance(part, bytes):  # a later snapshot has taken its place
                return 0
            keys += part
        if self._followed.get(core_id) is not followed or life < followed.life:
            return 0
        for at, part in BlockSnapshot(number, bytes(keys)).parts(PIECE_KEYS):
            if followed.number is None:
                batch = BlockBatch(at, (), split_keys(part), snapshot=True)
            else:
                batch = BlockBatch(at + 1, (True,) * (len(part) // KEY_BYTES), split_keys(part))
            self._sink.blocks(core_id, incarnation, batch)
            followed.number = number
        followed.life, followed.incarnation = life, incarnation
        return len(keys) // KEY_BYTES

    # ---------------------------------------------------------------------------------------- events

    async def _read(self, ids: Sequence[str]) -> tuple[list[str], int]:
        """Reads some entries of each core; returns the cores that may have more, and the number of events."""
        cursors = {
            core_id: f"{followed.life}-{followed.number}"
            for core_id in ids
            if (followed := self._followed.get(core_id)) is not None and followed.number is not None
        }
        if not cursors:
            return [], 0
        more, count = [], 0
        for core_id, entries in (await self._entries(cursors)).items():
            followed = self._followed.get(core_id)
            if followed is None:
                continue
            for entry_id, fields in entries:
                if followed.number is None:
                    break
                try:
                    count += self._take(core_id, followed, entry_id, fields)
                except ProtocolError as error:
                    self._lose(core_id, followed)
                    self._wrong = error
            if len(entries) == _ENTRIES and followed.number is not None:
                more.append(core_id)
        return more, count

    async def _entries(self, cursors: dict[str, str]) -> dict[str, list[tuple[bytes, dict[bytes, bytes]]]]:
        if is_cluster(self._client):  # a command may not read streams that are in different places
            pipeline = self._client.pipeline(transaction=False)
            for core_id, cursor in cursors.items():
                pipeline.xrange(self._keys.blocks(core_id), min=f"({cursor}", count=_ENTRIES)
            return dict(zip(cursors, await pipeline.execute(), strict=True))
        names = {self._keys.blocks(core_id): cursor for core_id, cursor in cursors.items()}
        answer: Any = await self._client.xread(names, count=_ENTRIES)  # type: ignore[arg-type]  # a dict is invariant
        ids = {self._keys.blocks(core_id).encode(): core_id for core_id in cursors}
        return {ids[name]: entries for name, entries in streams_of(answer)}

    def _take(self, core_id: str, followed: _Followed, entry_id: bytes, fields: dict[bytes, bytes]) -> int:
        """Hands over one entry, or notes that a snapshot is needed; returns the number of events."""
        life_text, _, last_text = entry_id.partition(b"-")
        life, last = int(life_text), int(last_text)
        changes, keys = fields.get(b"changes", b""), fields.get(b"keys", b"")
        if len(keys) != len(changes) * KEY_BYTES or len(changes) > ENTRY_EVENTS:
            raise ProtocolError(f"Block events of core {core_id!r} in Redis make no sense.")
        after = last - len(changes)
        incarnation = fields.get(b"incarnation", b"").decode(errors="replace")
        if life != followed.life:
            self._lose(core_id, followed)
            followed.life = max(life, followed.life)
            return 0
        if b"reset" in fields and (followed.number is None or after > followed.number):
            self._sink.blocks(core_id, incarnation, BlockBatch(after, (), (), snapshot=True))
            followed.number, followed.incarnation = after, incarnation
        if followed.number is None or after > followed.number:
            self._lose(core_id, followed)
            return 0
        skip = followed.number - after
        if skip >= len(changes):
            return 0
        batch = BlockBatch(
            followed.number + 1,
            [change == STORED for change in changes[skip:]],
            split_keys(keys[skip * KEY_BYTES :]),
        )
        self._sink.blocks(core_id, incarnation, batch)
        followed.number, followed.incarnation = last, incarnation
        return len(changes) - skip

    def _lose(self, core_id: str, followed: _Followed) -> None:
        """Events are missing: what is known of the core does not count until there is a snapshot."""
        self.gaps += 1
        number = followed.number or 0
        followed.number = None
        self._sink.blocks(core_id, followed.incarnation, BlockBatch(number, (), (), snapshot=True))


def streams_of(answer: Any) -> list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]:
    """Returns the entries by stream, whichever version of the protocol the answer came in."""
    if isinstance(answer, dict):
        return [(name, [entry for part in parts for entry in part]) for name, parts in answer.items()]
    return [(name, entries) for name, entries in answer or []]
