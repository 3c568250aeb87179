"""The block pool of the reference scheduler: lists of blocks, and prefixes known by their tokens, so without a hash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

Key: TypeAlias = tuple[str, tuple[int, ...]]
"""The root, and all tokens up to the end of the block."""


@dataclass(eq=False)
class Block:
    """One block: how many tables contain it, and which prefix it holds."""

    references: int = 0
    key: Key | None = None


class ReferencePool:
    """Free blocks, cached blocks (least recently used first), and who holds which prefix."""

    def __init__(self, num_blocks: int, *, caching: bool) -> None:
        self.caching = caching
        self.free = [Block() for _ in range(num_blocks)]
        self.cached: list[Block] = []
        self.holders: dict[Key, Block] = {}

    @property
    def available(self) -> int:
        """Blocks that can be given out."""
        return len(self.free) + len(self.cached)

    def take(self, count: int) -> list[Block]:
        """Gives out free blocks, then the cached ones that were used least recently."""
        blocks = []
        for _ in range(count):
            block = self.free.pop() if self.free else self.cached.pop(0)
            self.forget(block)
            block.references = 1
            blocks.append(block)
        return blocks

    def share(self, block: Block) -> None:
        """Adds a holder to a block that has a key."""
        if block.references == 0:
            self.cached.remove(block)
        block.references += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Takes a holder from each block, the tail first."""
        for block in reversed(blocks):
            block.references -= 1
            if block.references == 0:
                (self.free if block.key is None else self.cached).append(block)

    def publish(self, block: Block, key: Key) -> None:
        """Makes a block findable, unless another holds the same prefix."""
        if self.caching and key not in self.holders:
            self.holders[key] = block
            block.key = key

    def forget(self, block: Block) -> None:
        """Makes a block unfindable."""
        if block.key is not None:
            del self.holders[block.key]
            block.key = None
            if block in self.cached:
                self.cached.remove(block)
                self.free.append(block)

    def clear(self) -> None:
        """Makes all blocks unfindable."""
        for block in list(self.holders.values()):
            self.forget(block)
