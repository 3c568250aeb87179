"""Which core has which blocks cached, as far as the cores' events tell: a `BlockSink`, and how deep a prompt matches.

Cores are numbers and a set of cores is an integer, one bit per number; so one prompt is compared with all cores at
once, for as long as any of them goes on. A match is what it is in the core (`BlockPool.match`): it ends at the first
block that is not there. As cores evict tails before heads, a block that is there has all before it, mostly; so a whole
stretch is passed at its last block. Who has a hole before that is overrated once: the request fills it.

A number stands for what one core, in one incarnation, has said without a gap. When that is void (a gap, another
incarnation, a snapshot, the core is gone), the number is dead at once, and its keys are removed piece by piece.

Memory is bounded by pairs of key and core: about 140 bytes each where every core has keys of its own, and 35 where all
have the same. Past the limit only keys whose first byte is a multiple of 2, then of 4 and so on, are kept:
a block's key is as good as random, so every core and prompt loses the same share, and a match is found to end at most
some blocks early instead of not at all.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from tercet_frontend.routing.chains import STRETCH
from tercet_frontend.routing.expected import EVERY, ExpectedBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tercet_frontend.routing.chains import PromptChain
    from tercet_shared.hashing import BlockKey
    from tercet_shared.registry.interface import BlockBatch

Counts = npt.NDArray[np.uint16]

MOST_PAIRS = 1_048_576
MOST_PAIRS_OF_CORE = 1_048_576
"""Blocks that a core may say it has cached; more are not believed."""

_COARSEST = 128

_PIECE = 512
"""Keys that are cleaned up with every batch, besides twice as many as came."""

_SHARDS = 64
"""Tables among which keys are divided by their second byte: one large table would stop everything when it grows."""

_RESTING = 64
"""Numbers of cores that are gone, which are used again all at once."""


class Match(NamedTuple):
    """How far cores match a chain: those in ``cores[i]`` its first ``ends[i]`` blocks at least.

    Attributes:
        cores: bit sets, each a proper part of the one before; none where no core matches.
        ends: one for each, growing.
    """

    cores: list[int]
    ends: list[int]

    def add(self, cores: int, end: int) -> None:
        """Adds a set."""
        self.cores.append(cores)
        self.ends.append(end)

    def counts(self, width: int) -> Counts:
        """Returns in how many of the sets each number is, uint16[width + 1]: in the first so many.

        The last one is for nobody, and 0.
        """
        raw = b"".join([cores.to_bytes(width // 8, "little") for cores in self.cores])
        bits = np.unpackbits(np.frombuffer(raw, np.uint8).reshape(len(self.cores), -1), axis=1, bitorder="little")
        counts = np.zeros(width + 1, np.uint16)
        np.add.reduce(bits, axis=0, dtype=np.uint16, out=counts[:width])
        return counts


class _Known:
    """What one core has said: events up to ``latest``, without a gap since a snapshot or its first event."""

    __slots__ = ("bit", "incarnation", "keys", "latest", "number")

    def __init__(self, incarnation: str, number: int, latest: int) -> None:
        self.incarnation = incarnation
        self.number = number
        self.bit = 1 << number
        self.latest = latest
        self.keys: set[BlockKey] = set()


class PrefixIndex:
    """See the module. Not thread-safe; every method returns at once.

    Args:
        most_pairs: of key and core that are kept, but for what one batch may add.

    Attributes:
        width: bits of every set of cores, a multiple of 8.
        version: changes whenever `number_of` may answer differently.
        coarseness: one in so many keys is kept.
        pairs: of key and core that are kept, those that still are to be removed included.
    """

    def __init__(self, *, most_pairs: int = MOST_PAIRS) -> None:
        self.width = 64
        self.version = 0
        self.coarseness = 1
        self.pairs = 0
        self._most_pairs = most_pairs
        self._shards: list[dict[BlockKey, int]] = [{} for _ in range(_SHARDS)]  # sets of cores, by key
        self._known: dict[str, _Known | None] = {}  # None: void until a snapshot
        self._alive = 0
        self._doubted = 0  # numbers that were expected to store blocks and never did
        self._hoped: tuple[int, int] = (0, 0)
        self._expected = ExpectedBlocks()
        self._free: list[int] = list(range(self.width - 1, -1, -1))
        self._resting: list[int] = []  # numbers without keys, which may still be expected to have some
        self._leaving: deque[tuple[int, set[BlockKey]]] = deque()  # bits, and keys to be removed
        self._coarsening: deque[_Known] = deque()  # whose keys are to be thinned out

    # -- what cores say

    def blocks(self, core_id: str, incarnation: str, batch: BlockBatch) -> None:
        """See `BlockSink`. Events that were seen already are skipped, so several ways may bring them."""
        self._clean(len(batch.keys))
        known = self._known.get(core_id)
        if batch.snapshot:
            if known is not None and known.incarnation == incarnation and batch.first <= known.latest:
                return  # not newer than what is known
            self._void(core_id)
            if len(batch.keys) <= MOST_PAIRS_OF_CORE:
                self._store(self._begin(core_id, incarnation, batch.first), batch.keys)
            return
        if known is None or known.incarnation != incarnation:
            self._void(core_id)
            if batch.first != 1:
                return
            known = self._begin(core_id, incarnation, 0)  # nothing came before
        skip = known.latest + 1 - batch.first
        if skip < 0 or len(batch.stored) != len(batch.keys):
            self._void(core_id)
            return
        if skip >= len(batch.keys):
            return
        known.latest = batch.first + len(batch.keys) - 1
        self._apply(known, batch.stored[skip:], batch.keys[skip:])
        if len(known.keys) * self.coarseness > MOST_PAIRS_OF_CORE:
            self._void(core_id)

    def forget(self, core_id: str) -> None:
        """See `BlockSink`."""
        self._void(core_id)
        del self._known[core_id]
        self._clean(0)

    # -- what is asked

    def number_of(self, core_id: str, incarnation: str) -> int | None:
        """Returns the bit of a core in sets of cores; None where nothing is known of it."""
        known = self._known.get(core_id)
        return known.number if known is not None and known.incarnation == incarnation else None

    def match(self, chain: PromptChain, now: float) -> Match:
        """Returns how far the cores have a prompt cached or are expected to, from its first block on.

        Where all cores that are still in the running have the last block of some, they are taken to have them all (see
        the module). The chain is hashed as far as any core matches, and a little further. ``now`` is
        in milliseconds.
        """
        self._expire(now)
        trusted, coarse, expected = ~self._doubted, self.coarseness - 1, 0
        match = Match([], [])
        among, begin, end, position = self._alive, 0, 0, 0  # of the run in the making; and of the next block
        keys = chain.keys
        while among and (position < len(keys) or chain.grow()):
            if not coarse:
                passed = self._passed(keys, position, among, trusted)
                if passed:
                    position = end = position + passed
                    continue
            for key in keys[position : position + EVERY]:
                if not position % EVERY:
                    expected = self._expected.cores(keys, position + EVERY) & trusted
                position += 1
                if coarse and key[0] & coarse:
                    continue
                there = (self._having(key) | expected) & among
                if there != among:
                    if end > begin:
                        match.add(among, end)
                    among, begin = there, end
                    if not among:
                        break
                end = position
        if among and end > begin:
            match.add(among, end)
        return match

    def expect(self, number: int, keys: Sequence[BlockKey], begin: int, now: float) -> None:
        """The core with that number will have the chain ``keys`` cached soon; it has the first ``begin`` already."""
        bit = 1 << number
        self._hoped = (self._hoped[0] | bit, self._hoped[1])
        self._expected.add(keys, begin, bit, now)

    # -- within

    def _passed(self, keys: list[BlockKey], position: int, among: int, trusted: int) -> int:
        """Returns how many blocks from ``position`` on all of ``among`` have, as the last of them tells."""
        for step in (STRETCH, EVERY):
            end = position + step
            if end <= len(keys):
                there = self._having(keys[end - 1])
                if there & among == among or (there | self._expected.cores(keys, end) & trusted) & among == among:
                    return step
        return 0

    def _having(self, key: BlockKey) -> int:
        return self._shards[key[1] % _SHARDS].get(key, 0)

    def _begin(self, core_id: str, incarnation: str, latest: int) -> _Known:
        if not self._free:
            if len(self._resting) >= _RESTING:
                self._expected.clear()
                self._free, self._resting = self._resting, []
            else:
                self._free += range(2 * self.width - 1, self.width - 1, -1)
                self.width *= 2
        known = self._known[core_id] = _Known(incarnation, self._free.pop(), latest)
        self._alive |= known.bit
        self._doubted &= ~known.bit
        self.version += 1
        return known

    def _void(self, core_id: str) -> None:
        known = self._known.get(core_id)
        self._known[core_id] = None
        if known is not None:
            self._alive &= ~known.bit
            self._leaving.append((known.number, known.keys))
            self.version += 1

    def _store(self, known: _Known, keys: Iterable[BlockKey]) -> None:
        shards, bit, mine, coarse = self._shards, known.bit, known.keys, self.coarseness - 1
        before = len(mine)
        for key in keys:
            if not (coarse and key[0] & coarse):
                mine.add(key)
                cores = shards[key[1] % _SHARDS]
                others = cores.get(key)
                cores[key] = bit if others is None else others | bit  # shared by all keys that no other core has
        self.pairs += len(mine) - before
        self._doubted &= ~bit
        self._limit()

    def _apply(self, known: _Known, stored: Sequence[bool], keys: Sequence[BlockKey]) -> None:
        """Applies events in their order; runs of the same kind together."""
        begin, count = 0, len(keys)
        while begin < count:
            kind, end = stored[begin], begin + 1
            while end < count and stored[end] == kind:
                end += 1
            if kind:
                self._store(known, keys[begin:end])
            else:
                self._remove(known, keys[begin:end])
            begin = end

    def _remove(self, known: _Known, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            if key in known.keys:
                known.keys.remove(key)
                self._drop(key, known.bit)
            self._expected.remove(key, known.bit)

    def _drop(self, key: BlockKey, bit: int) -> None:
        cores = self._shards[key[1] % _SHARDS]
        left = cores[key] & ~bit
        if left:
            cores[key] = left
        else:
            del cores[key]
        self.pairs -= 1

    def _limit(self) -> None:
        if self.pairs > self._most_pairs and self.coarseness < _COARSEST and not self._coarsening:
            self.coarseness *= 2
            self._coarsening.extend(known for known in self._known.values() if known is not None)

    def _clean(self, keys: int) -> None:
        """Removes a piece of what need not be kept any more: the work is in proportion to the ``keys`` that came."""
        left = 2 * keys + _PIECE
        while left > 0 and self._leaving:
            number, leaving = self._leaving[0]
            for _ in range(min(left, len(leaving))):
                self._drop(leaving.pop(), 1 << number)
                left -= 1
            if not leaving:
                self._leaving.popleft()
                self._resting.append(number)
        while left > 0 and self._coarsening:
            known = self._coarsening.popleft()
            left -= len(known.keys)
            surplus = [key for key in known.keys if key[0] & (self.coarseness - 1)] if self._alive & known.bit else ()
            known.keys.difference_update(surplus)
            for key in surplus:
                self._drop(key, known.bit)
        if not self.pairs:
            self.coarseness = 1  # nothing is known that a finer grain would contradict

    def _expire(self, now: float) -> None:
        if self._expected.expire(now):
            hoped, before = self._hoped
            self._hoped = (0, hoped)
            for known in self._known.values():
                if known is not None and not known.keys and before & known.bit:
                    self._doubted |= known.bit
