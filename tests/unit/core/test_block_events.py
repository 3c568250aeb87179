"""The log of cached prefixes: numbered, bounded, and a snapshot for who has missed something."""

from __future__ import annotations

import numpy as np
import pytest

from tercet_core.kv_cache.block_pool import BlockPool
from tercet_core.kv_cache.events import BlockEvents, Change
from tercet_core.scheduling.scheduler import Scheduler
from tercet_core.scheduling.state import Limits
from tercet_shared.hashing import BlockKey, chain, root_key
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
    events = pool.events.since(number)
    if events is None:
        number, keys = pool.snapshot()
        return number, set(keys)
    for event in events:
        assert event.number == number + 1 or event.change is Change.CLEARED
        number = event.number
        if event.change is Change.CLEARED:
            known = set()
        elif event.key is not None:
            (known.add if event.change is Change.STORED else known.remove)(event.key)
    return number, known


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
    pool = BlockPool(8, events=BlockEvents(capacity=3))
    _fill(pool, _keys(5))
    assert pool.events.latest == 5
    assert pool.events.since(1) is None
    events = pool.events.since(2)
    assert events is not None
    assert [event.number for event in events] == [3, 4, 5]
    assert pool.events.since(5) == []


def test_clearing_makes_history_unneeded() -> None:
    pool = BlockPool(8, events=BlockEvents(capacity=3))
    _fill(pool, _keys(5))
    pool.clear_keys()
    events = pool.events.since(0)
    assert events is not None
    assert [event.change for event in events] == [Change.CLEARED]
    assert events[0].number == pool.events.latest


@pytest.mark.parametrize("blocks", [8, 5])
def test_a_new_worker_goes_on_with_the_numbers(blocks: int) -> None:
    scheduler = Scheduler(Limits(max_slots=2, num_blocks=8, block_size=4, max_model_len=32, max_batched_tokens=16))
    _fill(scheduler.pool, _keys(4))
    number, known = _replay(scheduler.pool, 0, set())
    scheduler.restart(blocks)
    number, known = _replay(scheduler.pool, number, known)
    assert known == set()
    _fill(scheduler.pool, _keys(2))
    assert _replay(scheduler.pool, number, known)[1] == set(_keys(2))
