"""The pool of KV blocks: who holds them, which hold a known prefix, which goes next.

A block is in exactly one state: *free* (on the stack), *cached* (nobody refers to it, but it holds a keyed prefix that
may be matched until it is evicted), or *referenced* (counted once however many requests share it). Free blocks are
given out first; then cached ones, least recently used first.

Order replaces fences: the worker executes steps strictly in plan order, so a released block may be given out in the
very next plan although a step in flight still writes it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from tercet_core.kv_cache.events import BlockEvents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_shared.hashing import BlockKey
    from tercet_shared.wire.step import I32, BlockId


class BlockPool:
    """Blocks 0 to ``num_blocks - 1``. Not thread-safe; every method returns at once."""

    def __init__(self, num_blocks: int, *, caching: bool = True, events: BlockEvents | None = None) -> None:
        """Starts with all blocks free; without ``caching`` no block ever gets a key.

        ``events`` hears of every key that is stored or removed; a new pool that replaces another goes on with its log.
        """
        self.num_blocks = num_blocks
        self.caching = caching
        self.events = BlockEvents() if events is None else events
        self._references = np.zeros(num_blocks, np.int32)
        self._keyed = np.zeros(num_blocks, np.bool_)
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # the top is at _height - 1
        self._height = num_blocks
        self._unreferenced: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently used first
        self._key_of: list[BlockKey | None] = [None] * num_blocks
        self._block_of: dict[BlockKey, BlockId] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` can give out: free ones and cached ones."""
        return self._height + len(self._unreferenced)

    @property
    def cached(self) -> int:
        """Blocks that hold a key and that nobody refers to."""
        return len(self._unreferenced)

    @property
    def referenced(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.available

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Returns the blocks that hold the longest known prefix of ``keys``, without taking them."""
        blocks: list[BlockId] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def lookup(self, key: BlockKey) -> BlockId | None:
        """Returns the block that holds ``key``, without taking it."""
        return self._block_of.get(key)

    def snapshot(self) -> tuple[int, list[BlockKey]]:
        """Returns the number of the latest event, and all keys that are held after it."""
        return self.events.latest, list(self._block_of)

    def idle_among(self, blocks: Sequence[BlockId]) -> int:
        """Returns how many of ``blocks`` nobody refers to, which `share` would take out of `available`."""
        return int(np.count_nonzero(self._references[blocks] == 0)) if blocks else 0

    def share(self, blocks: Sequence[BlockId]) -> None:
        """Adds a reference to each of ``blocks``, which `match` has just returned."""
        for block in blocks:
            if self._references[block] == 0:
                del self._unreferenced[block]
            self._references[block] += 1

    def take(self, count: int) -> I32:
        """Returns ``count`` blocks with one reference each, int32[count]; evicts cached ones when it must.

        Evicted ones are in ascending order: they were cached from the last to the first, and kernels read blocks that
        follow each other as one stream.

        The caller has checked ``count <= available``.
        """
        if count > self.available:
            raise AssertionError(f"{count} blocks asked for, {self.available} available")
        from_stack = min(count, self._height)
        taken = np.empty(count, np.int32)
        self._height -= from_stack
        taken[:from_stack] = self._stack[self._height : self._height + from_stack][::-1]
        for i in range(from_stack, count):
            block, _ = self._unreferenced.popitem(last=False)
            self._forget_key(block)
            taken[i] = block
        taken[from_stack:].sort()
        self._references[taken] = 1
        return taken

    def release(self, blocks: I32) -> None:
        """Gives back one reference to each of ``blocks`` (distinct, in the order of the request's table).

        The tail goes first, so that it is evicted before the head, without which it could not be matched.
        """
        blocks = blocks[::-1]
        self._references[blocks] -= 1
        idle = blocks[self._references[blocks] == 0]
        keyed = self._keyed[idle]
        for block in idle[keyed].tolist():
            self._unreferenced[block] = None
        self._push_free(idle[~keyed])

    def publish(self, block: BlockId, key: BlockKey) -> bool:
        """Gives a referenced block its key. Returns False, changing nothing, when another block has the key already."""
        if not self.caching or key in self._block_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        self._keyed[block] = True
        self.events.stored(key)
        return True

    def forget(self, blocks: I32) -> None:
        """Takes the keys of ``blocks`` away, because what they hold cannot be trusted."""
        for block in blocks[self._keyed[blocks]].tolist():
            self._forget_key(block)
            if block in self._unreferenced:
                del self._unreferenced[block]
                self._push_free(np.array([block], np.int32))

    def clear_keys(self) -> int:
        """Forgets all keys; references stay. Returns how many keys there were."""
        count = len(self._block_of)
        self.events.cleared()
        self._push_free(np.fromiter(self._unreferenced, np.int32, len(self._unreferenced)))
        self._unreferenced.clear()
        self._block_of.clear()
        self._keyed[:] = False
        self._key_of = [None] * self.num_blocks
        return count

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every block is in exactly one state and the keys are a bijection."""
        free = self._stack[: self._height]
        idle = np.fromiter(self._unreferenced, np.int32, len(self._unreferenced))
        states = np.zeros(self.num_blocks, np.int32)
        np.add.at(states, free, 1)
        np.add.at(states, idle, 1)
        states += self._references > 0
        if not (states == 1).all():
            raise AssertionError(f"blocks in no state or several: {np.flatnonzero(states != 1).tolist()[:8]}")
        if (self._references < 0).any():
            raise AssertionError("a block was released more often than taken")
        if self._keyed[free].any() or not self._keyed[idle].all():
            raise AssertionError("a free block has a key, or a cached block has none")
        if len(self._block_of) != int(np.count_nonzero(self._keyed)):
            raise AssertionError("keys and keyed blocks differ in number")
        for key, block in self._block_of.items():
            if self._key_of[block] != key:
                raise AssertionError(f"block {block} does not hold its key")

    def check_references(self, counted: I32) -> None:
        """Raises `AssertionError` unless ``counted`` [num_blocks], the holders found elsewhere, agrees."""
        wrong = np.flatnonzero(self._references != counted)
        if len(wrong):
            raise AssertionError(f"blocks whose references are counted wrongly: {wrong.tolist()[:8]}")

    def _push_free(self, blocks: I32) -> None:
        self._stack[self._height : self._height + len(blocks)] = blocks
        self._height += len(blocks)

    def _forget_key(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self.events.removed(key)
            self._key_of[block] = None
            self._keyed[block] = False
