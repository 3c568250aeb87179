"""How many KV blocks the worker offers."""

from __future__ import annotations

from dataclasses import dataclass

from tercet_shared.errors import ConfigurationError

_MIB = 1024 * 1024
_LEAST_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class KvRequest:
    """What the settings, the model and the machine say.

    Attributes:
        bytes_per_block: keys and values of one block in all layers.
        block_size: tokens per block.
        slots: requests that run at once.
        max_model_len: tokens that one request may have, by the settings or else by the model.
        max_model_len_given: whether the settings state it.
        memory: ``--kv-cache-memory`` in bytes, or None.
        num_blocks: ``--num-kv-blocks``, or None; it wins over ``memory``.
        available: bytes that the process may still take.
        share: part of them that is taken where neither ``memory`` nor ``num_blocks`` is given.
    """

    bytes_per_block: int
    block_size: int
    slots: int
    max_model_len: int
    max_model_len_given: bool
    memory: int | None
    num_blocks: int | None
    available: int
    share: float = 0.25


@dataclass(frozen=True, slots=True)
class KvSize:
    """What comes of it: the pool, and the length of the longest request that it can hold."""

    num_blocks: int
    max_model_len: int


def size_kv_cache(request: KvRequest) -> KvSize:
    """Returns the size of the cache; a pool that was not asked for shortens ``max_model_len`` rather than to fail.

    Raises:
        ConfigurationError: what was asked for does not fit into memory, or the pool cannot hold what was asked for.
    """
    per_block = request.bytes_per_block
    given = request.num_blocks is not None or request.memory is not None
    if request.num_blocks is not None:
        blocks = request.num_blocks
    elif request.memory is not None:
        blocks = request.memory // per_block
    else:
        useful = request.slots * -(-request.max_model_len // request.block_size)
        blocks = min(int(request.available * request.share) // per_block, useful)
        # A single short request may need fewer than two blocks; the pool still has two.
        blocks = max(blocks, _LEAST_BLOCKS) if request.available >= _LEAST_BLOCKS * per_block else blocks
    if blocks < _LEAST_BLOCKS:
        raise ConfigurationError(
            f"A KV cache of {_LEAST_BLOCKS} blocks needs {_megabytes(_LEAST_BLOCKS * per_block)}; "
            f"{_megabytes(request.memory if request.memory is not None else request.available)} are too little."
        )
    if blocks * per_block > request.available:
        raise ConfigurationError(
            f"A KV cache of {blocks} blocks needs {_megabytes(blocks * per_block)}, "
            f"and only {_megabytes(request.available)} are available."
        )
    held = blocks * request.block_size
    if held < request.max_model_len and given and request.max_model_len_given:
        raise ConfigurationError(
            f"A KV cache of {blocks} blocks holds {held} tokens, less than one request of the --max-model-len of "
            f"{request.max_model_len}."
        )
    return KvSize(blocks, min(request.max_model_len, held))


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / _MIB:.1f} MiB"
