"""Prefixes that cores will have cached soon, because requests with them were sent there.

Between a request and the events that tell of its blocks lie its prefill and the events' way. A burst of requests with
one system prompt would scatter meanwhile. So a placement's blocks count at once, for between one and two lifetimes,
after which the index knows better. As the key of a block stands for all blocks before it too, only one in `EVERY` is
noted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_shared.hashing import BlockKey

EVERY = 8
"""Of a chain's blocks, the last of so many is noted; what is less at its end is not."""

LIFETIME_MS = 20_000.0
MOST_KEYS = 32_768


class ExpectedBlocks:
    """Sets of core numbers by block key, in two generations of which the older one is dropped as a whole.

    At most ``2 * most`` keys and those of one prompt, about 250 bytes each at a thousand cores. Too many end a
    generation before its time.
    """

    __slots__ = ("_most", "_old", "_turn_at", "_young")

    def __init__(self, most: int = MOST_KEYS) -> None:
        self._young: dict[BlockKey, int] = {}  # since the latest turn, bit sets by key
        self._old: dict[BlockKey, int] = {}  # of the generation before
        self._most = most
        self._turn_at = 0.0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def cores(self, keys: Sequence[BlockKey], end: int) -> int:
        """Returns the cores that will have the first ``end`` blocks of a chain, a multiple of `EVERY`.

        ``keys`` are the chain's so far; where they do not reach so far, there is none.
        """
        if end > len(keys):
            return 0
        key = keys[end - 1]
        return self._young.get(key, 0) | self._old.get(key, 0)

    def add(self, keys: Sequence[BlockKey], begin: int, bit: int, now: float) -> None:
        """The core with ``bit`` will have the chain ``keys`` beyond block ``begin``; ``now`` is in milliseconds."""
        young = self._young
        for position in range(begin - begin % EVERY + EVERY - 1, len(keys), EVERY):
            key = keys[position]
            young[key] = young.get(key, 0) | bit
        if len(young) >= self._most:
            self._turn(now)

    def expire(self, now: float) -> bool:
        """Forgets what is too old; to be called before reading. Returns whether a generation ended."""
        if now < self._turn_at:
            return False
        if now >= self._turn_at + LIFETIME_MS:
            self._young = {}
        self._turn(now)
        return True

    def remove(self, key: BlockKey, bit: int) -> None:
        """The core with ``bit`` has just evicted ``key``."""
        for generation in (self._young, self._old):
            cores = generation.get(key)
            if cores is not None:
                generation[key] = cores & ~bit

    def clear(self) -> None:
        """Forgets everything."""
        self._young, self._old = {}, {}

    def _turn(self, now: float) -> None:
        self._old, self._young = self._young, {}
        self._turn_at = now + LIFETIME_MS
