"""The keys of a prompt's blocks, hashed only as far as somebody asks, and not again where a memory has them.

A key takes nearly a microsecond, and most prompts either match nothing after some blocks or begin as many others did.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from tercet_shared.hashing import extend

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tercet_shared.hashing import BlockKey

STRETCH = 32
"""Blocks that are hashed, or remembered, at a time."""

MOST_STRETCHES = 2_048


class ChainMemory:
    """The keys of stretches of prompts, the latest used; about 4 KB each at blocks of 16 tokens.

    Args:
        most: stretches that are kept.
    """

    def __init__(self, most: int = MOST_STRETCHES) -> None:
        self._most = most
        self._kept: OrderedDict[tuple[BlockKey, bytes], list[BlockKey]] = OrderedDict()  # the latest used last

    def keys(self, parent: BlockKey, tokens: bytes, width: int) -> list[BlockKey]:
        """Returns the keys of the blocks that follow ``parent``; ``tokens`` are theirs, ``width`` bytes each."""
        name = (parent, tokens)
        keys = self._kept.get(name)
        if keys is not None:
            self._kept.move_to_end(name)
            return keys
        keys = self._kept[name] = extend(parent, tokens, width)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return keys


class PromptChain:
    """The chain of one prompt.

    Args:
        root: see `tercet_shared.hashing.root_key`.
        tokens: int32[n] of the prompt.
        block_size: tokens per block.
        blocks: of the prompt that may be asked for; they are whole.
        memory: may know some keys.

    Attributes:
        keys: of the blocks so far.
    """

    __slots__ = ("_blocks", "_memory", "_root", "_tokens", "_width", "keys")

    def __init__(
        self, root: BlockKey, tokens: npt.NDArray[np.int32], block_size: int, blocks: int, memory: ChainMemory
    ) -> None:
        self.keys: list[BlockKey] = []
        self._root = root
        self._tokens = tokens[: blocks * block_size].astype("<i4", copy=False).tobytes()
        self._width = 4 * block_size
        self._blocks = blocks
        self._memory = memory

    def grow(self) -> bool:
        """Adds some keys to `keys`; returns False when it has them all."""
        keys, width = self.keys, self._width
        begin = len(keys)
        end = min(begin + STRETCH, self._blocks)
        if end <= begin:
            return False
        parent = keys[-1] if keys else self._root
        tokens = self._tokens[begin * width : end * width]
        keys += self._memory.keys(parent, tokens, width) if end - begin == STRETCH else extend(parent, tokens, width)
        return True
