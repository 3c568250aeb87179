"""The block pool on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_core.kv_cache.block_pool import BlockPool
from tercet_shared.hashing import chain, root_key

if TYPE_CHECKING:
    from tercet_shared.wire.step import I32, BlockId

ROOT = root_key("model")
KEYS = chain(ROOT, np.arange(64, dtype=np.int32), 4)


def _keyed(pool: BlockPool, count: int, *, start: int = 0) -> I32:
    """Returns ``count`` blocks that hold a chain of keys."""
    blocks = pool.take(count)
    for i, block in enumerate(blocks.tolist()):
        assert pool.publish(block, KEYS[start + i])
    return blocks


def _states(pool: BlockPool) -> tuple[int, int, int]:
    pool.check_integrity()
    return pool.available - pool.cached, pool.cached, pool.referenced


def test_a_block_is_free_then_referenced_then_cached_then_free() -> None:
    pool = BlockPool(4)
    assert _states(pool) == (4, 0, 0)
    blocks = _keyed(pool, 3)
    assert _states(pool) == (1, 0, 3)
    pool.release(blocks)
    assert _states(pool) == (1, 3, 0)
    assert pool.clear_keys() == 3
    assert _states(pool) == (4, 0, 0)


def test_an_unkeyed_block_is_free_at_once() -> None:
    pool = BlockPool(4)
    pool.release(pool.take(2))
    assert _states(pool) == (4, 0, 0)


def test_a_shared_block_is_counted_once_and_stays_until_its_last_holder_goes() -> None:
    pool = BlockPool(4)
    blocks = _keyed(pool, 2)
    pool.share(pool.match(KEYS[:2]))
    assert _states(pool) == (2, 0, 2)
    pool.release(blocks)
    assert _states(pool) == (2, 0, 2)
    pool.release(blocks)
    assert _states(pool) == (2, 2, 0)


def test_a_match_is_the_longest_known_prefix() -> None:
    pool = BlockPool(8)
    blocks = _keyed(pool, 3)
    assert pool.match(KEYS[:5]) == blocks.tolist()
    assert pool.match(KEYS[1:3]) == blocks.tolist()[1:]
    assert pool.match(KEYS[4:]) == []
    pool.forget(blocks[1:2])
    assert pool.match(KEYS[:3]) == blocks.tolist()[:1]


def test_tails_are_evicted_before_heads() -> None:
    pool = BlockPool(4)
    pool.release(_keyed(pool, 4))
    for left in (3, 2, 1, 0):
        pool.take(1)
        assert len(pool.match(KEYS[:4])) == left


def test_evicted_blocks_follow_each_other() -> None:
    """Though tails go first: what reads them reads a stream."""
    pool = BlockPool(8)
    pool.release(_keyed(pool, 8))
    assert pool.take(5).tolist() == [3, 4, 5, 6, 7]


def test_the_least_recently_used_chain_goes_first() -> None:
    pool = BlockPool(4)
    pool.release(_keyed(pool, 2))
    pool.release(_keyed(pool, 2, start=8))
    first = pool.match(KEYS[:2])
    pool.share(first)
    pool.release(np.array(first, np.int32))  # used again, so the other is older now
    pool.take(2)
    assert len(pool.match(KEYS[:2])) == 2
    assert pool.match(KEYS[8:10]) == []


def test_free_blocks_are_given_out_before_cached_ones() -> None:
    pool = BlockPool(4)
    pool.release(_keyed(pool, 2))
    pool.take(2)
    assert len(pool.match(KEYS[:2])) == 2


def test_a_key_belongs_to_the_first_block_that_has_it() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2).tolist()
    assert pool.publish(first, KEYS[0])
    assert not pool.publish(second, KEYS[0])
    assert pool.lookup(KEYS[0]) == first
    pool.release(np.array([second], np.int32))
    assert _states(pool) == (3, 0, 1)


def test_forgetting_a_cached_block_frees_it_and_a_held_one_only_hides_it() -> None:
    pool = BlockPool(4)
    blocks = _keyed(pool, 2)
    pool.release(blocks[1:])
    pool.forget(blocks)
    assert _states(pool) == (3, 0, 1)
    assert pool.match(KEYS[:2]) == []
    pool.release(blocks[:1])
    assert _states(pool) == (4, 0, 0)


def test_clearing_keeps_references() -> None:
    pool = BlockPool(4)
    held = _keyed(pool, 1)
    pool.release(_keyed(pool, 2, start=4))
    assert pool.clear_keys() == 3
    assert _states(pool) == (3, 0, 1)
    pool.release(held)
    assert _states(pool) == (4, 0, 0)
    assert pool.clear_keys() == 0


def test_without_caching_no_block_gets_a_key() -> None:
    pool = BlockPool(2, caching=False)
    (block,) = pool.take(1).tolist()
    assert not pool.publish(block, KEYS[0])
    pool.release(np.array([block], np.int32))
    assert _states(pool) == (2, 0, 0)


def test_more_than_there_is_cannot_be_taken() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 available"):
        pool.take(3)
    assert _states(pool) == (2, 0, 0)
    assert pool.take(0).tolist() == []
    assert sorted(pool.take(2).tolist()) == [0, 1]


def test_idle_among_counts_what_sharing_would_take_out_of_the_available_ones() -> None:
    pool = BlockPool(4)
    blocks = _keyed(pool, 3)
    pool.release(blocks[1:])
    matched = pool.match(KEYS[:3])
    before = pool.available
    assert pool.idle_among(matched) == 2
    pool.share(matched)
    assert before - pool.available == 2
    assert pool.idle_among([]) == 0


@pytest.mark.parametrize("fault", ["reference", "lost", "twice", "key"])
def test_the_integrity_check_sees_a_fault(fault: str) -> None:
    pool = BlockPool(4)
    blocks = _keyed(pool, 2)
    pool.release(blocks[:1])
    pool.check_integrity()
    if fault == "reference":
        pool._references[int(blocks[1])] = 0
    elif fault == "lost":
        pool._height -= 1
    elif fault == "twice":
        pool._stack[0] = pool._stack[1]
    else:
        pool._keyed[int(blocks[1])] = False
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_the_reference_check_compares_with_the_holders() -> None:
    pool = BlockPool(2)
    pool.take(1)
    counted = np.zeros(2, np.int32)
    with pytest.raises(AssertionError, match="counted wrongly"):
        pool.check_references(counted)


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "release", "share", "forget", "clear"]), st.integers(0, 8)), max_size=60
    )
)
def test_every_block_is_always_in_one_state(events: list[tuple[str, int]]) -> None:
    """Holders are lists of blocks that begin with a shared chain, as request tables do."""
    pool = BlockPool(8)
    tables: list[list[BlockId]] = []
    for kind, number in events:
        if kind == "take" and number <= pool.available:
            blocks = pool.take(number)
            for i, block in enumerate(blocks.tolist()):
                pool.publish(block, KEYS[i])
            tables.append(blocks.tolist())
        elif kind == "share":
            matched = pool.match(KEYS[:number])
            pool.share(matched)
            tables.append(matched)
        elif kind == "release" and tables:
            pool.release(np.array(tables.pop(number % len(tables)), np.int32))
        elif kind == "forget" and tables:
            pool.forget(np.array(tables[number % len(tables)], np.int32))
        elif kind == "clear":
            pool.clear_keys()
        counted = np.zeros(8, np.int32)
        for table in tables:
            np.add.at(counted, table, 1)
        pool.check_references(counted)
        assert sum(_states(pool)) == 8
    for table in tables:
        pool.release(np.array(table, np.int32))
    assert pool.available == 8
