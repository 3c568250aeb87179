"""The log of cached prefixes: numbered, bounded, and a snapshot for who has missed something."""

from __future__ import annotations

import numpy as np
import pytest

from tercet_core.kv_cache.block_pool import BlockPool
from tercet_core.kv_cache.events import BlockEvents
from tercet_core.kv_cache.published import PublishedBlocks
from tercet_core.scheduling.scheduler import Scheduler
from tercet_core.scheduling.state import Limits
from tercet_shared.hashing import BlockKey, chain, root_key
from tercet_shared.registry.blocks import STORED, split_keys
from tercet_shared.wire.step import BlockId


def _keys(count: int) -> list[BlockKey]:
    return chain(root_key("model"), np.arange(count * 4, dtype=np.int32), 4)


def _fill(pool: BlockPool, keys: list[BlockKey]) -> None:
    blocks = pool.take(len(keys))
    for block, key in zip(blocks.tolist(), keys, strict=True):
        pool.publish(BlockId(block), key)
    pool.release(blocks)


def _replay(pool: BlockPool, number: int, known: set[BlockKey]) -> tuple[int, set[BlockKey]]:
    """What a follower does that knew ``known`` after event ``number``."""
    changes = pool.events.since(number)
    if changes is None:
        number, keys = pool.snapshot()
        return number, set(keys)
    assert changes.after == number or changes.reset
    known = set() if changes.reset else set(known)
    for change, key in zip(changes.changes, split_keys(changes.keys), strict=True):
        (known.add if change == STORED else known.remove)(key)
    assert changes.last == pool.events.latest
    return changes.last, known


def test_a_follower_knows_what_the_pool_holds() -> None:
    pool = BlockPool(4)
    keys = _keys(6)
    number, known = _replay(pool, 0, set())
    for step in (keys[:3], keys[3:6]):  # the second evicts some of the first
        _fill(pool, step)
        number, known = _replay(pool, number, known)
        assert known == set(pool.snapshot()[1])
    pool.clear_keys()
    number, known = _replay(pool, number, known)
    assert known == set()
    _fill(pool, keys[:2])
    assert _replay(pool, number, known)[1] == set(keys[:2])


def test_who_falls_behind_is_told_so() -> None:
    events = BlockEvents(capacity=3)
    keys = _keys(8)
    for key in keys[:3]:
        events.stored(key)
    assert events.latest == 3
    assert events.since(0) is not None
    for key in keys[3:6]:
        events.stored(key)
    assert events.since(2) is None
    changes = events.since(3)
    assert changes is not None
    assert (changes.after, changes.last, split_keys(changes.keys)) == (3, 6, keys[3:6])
    assert not events.since(6)


def test_a_portion_is_as_long_as_asked_for() -> None:
    events = BlockEvents()
    keys = _keys(5)
    for key in keys:
        events.stored(key)
    events.removed(keys[0])
    changes = events.since(1, 3)
    assert changes is not None
    assert (changes.after, changes.last, split_keys(changes.keys)) == (1, 4, keys[1:4])


def test_clearing_makes_history_unneeded() -> None:
    pool = BlockPool(8, events=BlockEvents(capacity=3))
    _fill(pool, _keys(7))
    pool.clear_keys()
    changes = pool.events.since(0)
    assert changes is not None
    assert changes.reset
    assert changes.last == pool.events.latest == 8
    assert not changes.changes
    assert not pool.events.since(8)


@pytest.mark.parametrize("blocks", [8, 5])
def test_a_new_worker_goes_on_with_the_numbers(blocks: int) -> None:
    scheduler = Scheduler(Limits(max_slots=2, num_blocks=8, block_size=4, max_model_len=32, max_batched_tokens=16))
    published = PublishedBlocks(scheduler)
    _fill(scheduler.pool, _keys(4))
    number, known = _replay(scheduler.pool, 0, set())
    scheduler.restart(blocks)
    number, known = _replay(scheduler.pool, number, known)
    assert known == set()
    _fill(scheduler.pool, _keys(2))
    assert _replay(scheduler.pool, number, known)[1] == set(_keys(2))
    assert published.latest == scheduler.pool.events.latest
    assert published.snapshot().keys == b"".join(_keys(2))
