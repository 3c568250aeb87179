"""What happened to cached prefixes, for those who route by them: a bounded, numbered log."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from tercet_shared.hashing import KEY_BYTES
from tercet_shared.registry.blocks import BlockChanges

if TYPE_CHECKING:
    from tercet_shared.hashing import BlockKey

_REMOVED = b"-"
"""Stands before a key that was removed. The scheduler's part is one append; readers, who are rare, sort it out."""


class BlockEvents:
    """The latest events, at most ``capacity``.

    Who has missed some sees it by the numbers, which grow by one with every event, and takes a snapshot.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        self._log: deque[bytes] = deque(maxlen=capacity)
        self._count = 0
        self._cleared = 0  # number of the event after which nothing was cached: the latest of that kind, or none

    @property
    def latest(self) -> int:
        """Number of the latest event; 0 before the first."""
        return self._count

    def stored(self, key: BlockKey) -> None:
        """A block holds ``key`` from now on."""
        self._count += 1
        self._log.append(key)

    def removed(self, key: BlockKey) -> None:
        """No block holds ``key`` any more."""
        self._count += 1
        self._log.append(_REMOVED + key)

    def cleared(self) -> None:
        """No block holds any key any more; that is an event with a number too."""
        self._count += 1
        self._cleared = self._count
        self._log.clear()  # what came before has no meaning now

    def since(self, number: int, limit: int | None = None) -> BlockChanges | None:
        """Returns the events after ``number``, at most ``limit``; None when some are not kept: take a snapshot then."""
        before = self._count - len(self._log)
        reset = number < before
        if reset and before != self._cleared:
            return None
        after = max(number, before)
        count = self._count - after
        news = list(islice(reversed(self._log), count))
        news.reverse()
        del news[count if limit is None else limit :]
        return BlockChanges(
            after,
            bytes([len(key) - KEY_BYTES for key in news]),
            b"".join([key[-KEY_BYTES:] for key in news]),
            reset,
        )
