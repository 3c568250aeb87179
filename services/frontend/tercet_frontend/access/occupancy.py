"""How many requests are in this process, how many of them wait, and how fast they are served."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from tercet_shared.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable

SHORTEST, LONGEST = 1.0, 60.0
"""Seconds between which ``Retry-After`` is."""

WINDOW = 30.0
"""Seconds over which the rate is taken at which requests leave."""

_SLOT = 1.0


class Place:
    """One request's place; it is left exactly once."""

    __slots__ = ("_occupancy", "_waiting")

    def __init__(self, occupancy: Occupancy) -> None:
        self._occupancy = occupancy
        self._waiting = True

    def began(self) -> None:
        """The request has its first token; calling it again does nothing."""
        if self._waiting:
            self._waiting = False
            self._occupancy.waiting -= 1

    def retry_after(self) -> float | None:
        """See `Occupancy.known_retry_after`."""
        return self._occupancy.known_retry_after()

    def leave(self) -> None:
        """The request is over."""
        served = not self._waiting
        self.began()
        self._occupancy.left(served=served)


class Occupancy:
    """The places of a front end.

    Attributes:
        running: requests that were let in and are not over.
        waiting: those of them that have no token yet.
        refused: requests that found no place.

    Args:
        max_requests: for `running`; 0 for no limit.
        max_waiting: for `waiting`; 0 for no limit.
        clock: seconds, monotonic.
    """

    def __init__(
        self, *, max_requests: int = 0, max_waiting: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.running = 0
        self.waiting = 0
        self.refused = 0
        self._max_requests = max_requests
        self._max_waiting = max_waiting
        self._clock = clock
        self._busy_since = 0.0
        self._left: deque[tuple[float, int]] = deque()  # by second: when it began, requests that left in it

    def enter(self) -> Place:
        """Returns a place.

        Raises:
            OverloadedError: there is none; it says after how many seconds there should be.
        """
        if self._max_requests and self.running >= self._max_requests:
            self._refuse(f"{self.running} requests are in progress, as many as this server takes at once")
        if self._max_waiting and self.waiting >= self._max_waiting:
            self._refuse(f"{self.waiting} requests wait already, as many as this server lets wait")
        if not self.running:
            self._busy_since = self._clock()
            self._left.clear()
        self.running += 1
        self.waiting += 1
        return Place(self)

    def left(self, *, served: bool) -> None:
        """A request is over. One that was refused says nothing about how fast others are served."""
        self.running -= 1
        if not served:
            return
        now = self._clock()
        if self._left and now - self._left[-1][0] < _SLOT:
            self._left[-1] = (self._left[-1][0], self._left[-1][1] + 1)
        else:
            self._left.append((now, 1))
        self._forget(now)

    def retry_after(self) -> float:
        """Returns the seconds in which those that wait now will have left at the rate of late, within bounds."""
        known = self.known_retry_after()
        return LONGEST if known is None else known

    def known_retry_after(self) -> float | None:
        """Returns the same, or None as long as nobody has left by whom the rate could be known."""
        now = self._clock()
        self._forget(now)
        left = sum(count for _, count in self._left)
        span = min(max(now - self._busy_since, _SLOT), WINDOW)
        if not left:
            return LONGEST if span >= WINDOW else None
        return min(max(max(self.waiting, 1) * span / left, SHORTEST), LONGEST)

    def _forget(self, now: float) -> None:
        while self._left and now - self._left[0][0] > WINDOW:
            self._left.popleft()

    def _refuse(self, what: str) -> None:
        self.refused += 1
        raise OverloadedError(f"The server is busy: {what}.", retry_after=self.retry_after())
