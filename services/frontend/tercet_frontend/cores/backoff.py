"""Waiting times between attempts."""

from __future__ import annotations

import random


class Backoff:
    """Doubling waits with jitter, so that many front ends do not return to a restarted core at the same moment.

    Args:
        first: seconds of the first wait, before jitter.
        limit: seconds of the longest wait.
        rng: source of the jitter.
    """

    def __init__(self, first: float, limit: float, rng: random.Random | None = None) -> None:
        self._first = first
        self._limit = limit
        self._next = first
        self._rng = rng or random.Random()  # noqa: S311  # jitter, not a secret

    def wait(self) -> float:
        """Returns the seconds to wait now: between half of the current step and all of it."""
        step, self._next = self._next, min(self._next * 2, self._limit)
        return step * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Starts over, after a success that lasted."""
        self._next = self._first

    def exhaust(self) -> None:
        """Goes to the longest wait: trying again soon cannot help."""
        self._next = self._limit
