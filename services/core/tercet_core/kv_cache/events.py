"""What happened to cached prefixes, for those who route by them: a bounded, numbered log."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tercet_shared.hashing import BlockKey


class Change(Enum):
    """What happened to a key."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One change. ``number`` grows by one with every event; ``key`` is None when all keys were cleared."""

    number: int
    change: Change
    key: BlockKey | None


class BlockEvents:
    """The latest events, at most ``capacity``. Who has missed some sees it by the numbers and takes a snapshot."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._log: deque[tuple[Change, BlockKey | None]] = deque(maxlen=capacity)
        self._count = 0

    @property
    def latest(self) -> int:
        """Number of the latest event; 0 before the first."""
        return self._count

    def stored(self, key: BlockKey) -> None:
        """A block holds ``key`` from now on."""
        self._count += 1
        self._log.append((Change.STORED, key))

    def removed(self, key: BlockKey) -> None:
        """No block holds ``key`` any more."""
        self._count += 1
        self._log.append((Change.REMOVED, key))

    def cleared(self) -> None:
        """No block holds any key any more."""
        self._count += 1
        self._log.clear()  # what came before has no meaning now
        self._log.append((Change.CLEARED, None))

    def since(self, number: int) -> list[BlockEvent] | None:
        """Returns the events after ``number``, or None when some of them are no longer kept: take a snapshot then."""
        first = self._count - len(self._log)
        if number < first and not (self._log and self._log[0][0] is Change.CLEARED):
            return None
        skip = max(number - first, 0)
        return [BlockEvent(first + i + 1, change, key) for i, (change, key) in enumerate(self._log) if i >= skip]
