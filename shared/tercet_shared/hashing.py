"""Keys of KV blocks: the same function in core and front end, so that both mean the same block.

A block's key is ``blake2b-128(parent key ‖ the block's token ids as little-endian int32)``. The parent of a prompt's
first block is the root, made of what the KV values depend on besides the tokens (model, adapter) and of the salt
that keeps tenants apart.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NewType

import numpy as np
import numpy.typing as npt

BlockKey = NewType("BlockKey", bytes)
"""16 bytes."""

KEY_BYTES = 16

_EMPTY = blake2b(digest_size=KEY_BYTES)
"""A digest of nothing. Copying it takes half the time of making one; only its copies are fed."""


def root_key(model_fingerprint: str, *, adapter: str = "", salt: str = "") -> BlockKey:
    """Returns the key that stands before a prompt's first block."""
    digest = blake2b(digest_size=KEY_BYTES, person=b"tercet-kv-root")
    for part in (model_fingerprint, adapter, salt):
        raw = part.encode()
        digest.update(len(raw).to_bytes(4, "little"))
        digest.update(raw)
    return BlockKey(digest.digest())


def block_key(parent: BlockKey, tokens: bytes) -> BlockKey:
    """Returns the key of the block that follows ``parent``; ``tokens`` are its ids, little-endian int32."""
    return BlockKey(blake2b(parent + tokens, digest_size=KEY_BYTES).digest())


def chain(
    root: BlockKey, tokens: npt.NDArray[np.int32], block_size: int, *, blocks: int | None = None
) -> list[BlockKey]:
    """Returns the keys of the whole blocks of ``tokens`` (int32, any length), at most ``blocks`` of them."""
    count = len(tokens) // block_size
    if blocks is not None:
        count = min(count, blocks)
    raw = np.ascontiguousarray(tokens[: count * block_size], dtype="<i4").tobytes()
    return extend(root, raw, block_size * 4)


def extend(parent: BlockKey, tokens: bytes, width: int) -> list[BlockKey]:
    """Returns the keys of the blocks that follow ``parent``: what `block_key` yields, one after the other, but faster.

    ``tokens`` are their ids, little-endian int32, ``width`` bytes for each block.
    """
    keys: list[BlockKey] = []
    key: bytes = parent
    for start in range(0, len(tokens), width):
        digest = _EMPTY.copy()
        digest.update(key + tokens[start : start + width])
        key = digest.digest()
        keys.append(key)  # type: ignore[arg-type]  # BlockKey() is a call, which takes a tenth of the time
    return keys
