"""The block events of one stream: where its front end stands in the log, and what it is to hear next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_core.streams.outbox import FRAME_BYTES
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.hashing import KEY_BYTES
from tercet_shared.registry.blocks import STORED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tercet_shared.registry.blocks import BlockLog

MAX_EVENTS = FRAME_BYTES // (KEY_BYTES + 1)
"""Events of one message."""

INTERVAL = 0.1
"""Least seconds between two messages to one front end: a busy core has events in nearly every step."""


class BlockFeed:
    """A cursor into a core's log. The first thing that a front end hears is a snapshot."""

    def __init__(self, log: BlockLog) -> None:
        self._log = log
        self._number: int | None = None
        self._next = 0.0

    def take(self, now: float) -> list[pb.BlockEvents]:
        """Returns what has happened since the last call, in order, if it is time for that; ``now`` in seconds."""
        if self._number == self._log.latest or now < self._next:
            return []
        self._next = now + INTERVAL
        return list(self._news())

    def _news(self) -> Iterator[pb.BlockEvents]:
        if self._number is None:
            yield from self._snapshot()
            return
        while changes := self._log.since(self._number, MAX_EVENTS):
            if changes.reset:  # the numbers in between do not matter any more
                yield pb.BlockEvents(first=changes.after, snapshot=True)
            if changes.changes:
                yield pb.BlockEvents(first=changes.after + 1, changes=changes.changes, keys=changes.keys)
            self._number = changes.last
        if changes is None:
            yield from self._snapshot()

    def _snapshot(self) -> Iterator[pb.BlockEvents]:
        snapshot = self._log.snapshot()
        for i, (at, keys) in enumerate(snapshot.parts(MAX_EVENTS)):
            if i == 0:
                yield pb.BlockEvents(first=at, keys=keys, snapshot=True)
            else:
                count = len(keys) // KEY_BYTES
                yield pb.BlockEvents(first=at + 1, changes=bytes([STORED]) * count, keys=keys)
        self._number = snapshot.number
