"""Percentiles of what was recorded in the last minute, in a few kilobytes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW_S: Final = 60
"""Seconds that are remembered; each has counts of its own, which the same second of the next minute replaces."""

_LEAST = 1e-5
_PER_OCTAVE = 8
_BUCKETS = 200  # up to 2^25 * 10 µs, which is 5.6 minutes


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of the last minute, in the unit that was recorded; zeros where there was nothing.

    Attributes:
        p50: half of the values are at most this.
        p90: nine in ten.
        p99: 99 in a hundred.
        count: values.
    """

    p50: float
    p90: float
    p99: float
    count: int


class RecentValues:
    """Positive values with the second in which they came. Percentiles are right to within 5 %.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = [-1] * WINDOW_S
        self._counts = [[0] * _BUCKETS for _ in range(WINDOW_S)]

    def record(self, value: float) -> None:
        """Adds a value."""
        second = int(self._clock())
        slot = second % WINDOW_S
        if self._seconds[slot] != second:
            self._seconds[slot] = second
            self._counts[slot] = [0] * _BUCKETS
        bucket = int(math.log2(value / _LEAST) * _PER_OCTAVE) if value > _LEAST else 0
        self._counts[slot][min(bucket, _BUCKETS - 1)] += 1

    def percentiles(self) -> Percentiles:
        """Returns the percentiles of the last minute."""
        oldest = int(self._clock()) - WINDOW_S
        recent = [counts for second, counts in zip(self._seconds, self._counts, strict=True) if second > oldest]
        totals = [sum(column) for column in zip(*recent, strict=True)] if recent else []
        count = sum(totals)
        if not count:
            return Percentiles(0.0, 0.0, 0.0, 0)
        p50, p90, p99 = (_value(totals, math.ceil(count * share)) for share in (0.5, 0.9, 0.99))
        return Percentiles(p50, p90, p99, count)


def _value(totals: list[int], rank: int) -> float:
    below = 0
    for bucket, number in enumerate(totals):
        below += number
        if below >= rank:
            return float(_LEAST * 2 ** ((bucket + 0.5) / _PER_OCTAVE))
    raise AssertionError("the rank is at most the count")
