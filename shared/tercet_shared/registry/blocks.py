"""Block events as they travel, in Redis as on the streams: packed bytes, and numbers that show what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tercet_shared.hashing import KEY_BYTES, BlockKey

if TYPE_CHECKING:
    from collections.abc import Iterator

STORED, REMOVED = 0, 1
"""Values of a change."""


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """A run of events.

    Attributes:
        after: number of the event before the first.
        changes: uint8[n], `STORED` or `REMOVED`.
        keys: 16 bytes each, n of them.
        reset: nothing was cached before them; what was known is void, and numbers before them do not matter.
    """

    after: int
    changes: bytes
    keys: bytes
    reset: bool = False

    @property
    def last(self) -> int:
        """Number of the last event; `after` where there is none."""
        return self.after + len(self.changes)

    def __bool__(self) -> bool:
        return self.reset or bool(self.changes)


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """All keys that are cached after event ``number``, 16 bytes each."""

    number: int
    keys: bytes

    def parts(self, size: int) -> Iterator[tuple[int, bytes]]:
        """Yields the keys in parts of ``size`` at most, as one snapshot and events after it.

        The first part replaces what was known; the others are as if their keys had been stored afterwards, the last
        of them by event ``number``. (No key is older than the event that stored it, so the numbers suffice.)

        Returns:
            Pairs of the number after which the part counts (of the first: which it includes), and its keys.
        """
        width = size * KEY_BYTES
        rest = max(len(self.keys) - width, 0) // KEY_BYTES
        at = self.number - rest
        yield at, self.keys[:width]
        for start in range(width, len(self.keys), width):
            part = self.keys[start : start + width]
            yield at, part
            at += len(part) // KEY_BYTES


class BlockLog(Protocol):
    """Where a core's events are. Methods return at once."""

    @property
    def latest(self) -> int:
        """Number of the latest event."""

    def since(self, number: int, limit: int) -> BlockChanges | None:
        """Returns at most ``limit`` events after ``number``, or None where some are not kept: take a snapshot then."""

    def snapshot(self) -> BlockSnapshot:
        """Returns all keys that are cached now."""


def split_keys(keys: bytes) -> list[BlockKey]:
    """Returns packed keys one by one."""
    return [BlockKey(keys[i : i + KEY_BYTES]) for i in range(0, len(keys), KEY_BYTES)]
