"""Files that may change while they are in use. Nothing polls: whoever uses one asks, and a second is long enough."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

INTERVAL = 1.0
"""Seconds between two looks."""

Signature = tuple[tuple[int, int, int] | None, ...]


class FileWatch:
    """Says when files have changed: another inode, size or time of change, also behind a link.

    Args:
        paths: of the files; one may be missing for a while.
        interval: seconds in which the files are looked at once.
        clock: seconds, monotonic.
    """

    def __init__(
        self, paths: Sequence[Path], *, interval: float = INTERVAL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._paths = paths
        self._interval = interval
        self._clock = clock
        self._looked = clock()
        self._seen = self._look()

    def changed(self) -> bool:
        """Returns whether they have changed since the last call that said so. Costs a clock, rarely a stat."""
        now = self._clock()
        if now - self._looked < self._interval:
            return False
        self._looked = now
        found = self._look()
        different = found != self._seen
        self._seen = found
        return different

    def note(self) -> None:
        """Takes the files as they are for known; for who is about to read them anyway."""
        self._seen = self._look()

    def _look(self) -> Signature:
        found: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                status = path.stat()
            except OSError:
                found.append(None)
            else:
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)
