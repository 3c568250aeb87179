"""Block events on a stream: whatever happens in between, a mirror becomes what the core has cached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tercet_core.kv_cache.block_pool import BlockPool
from tercet_core.kv_cache.events import BlockEvents
from tercet_core.kv_cache.published import PublishedBlocks
from tercet_core.streams import block_feed
from tercet_core.streams.block_feed import INTERVAL, BlockFeed
from tercet_core.streams.outbox import FRAME_BYTES
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.hashing import chain, root_key
from tercet_shared.registry.blocks import split_keys
from tercet_shared.registry.interface import BlockBatch
from tercet_shared.wire.step import BlockId
from tests.fakes.block_mirror import Mirror

KEYS = chain(root_key("model"), np.arange(40 * 2, dtype=np.int32), 2)


def _published(pool: BlockPool) -> PublishedBlocks:
    holder: Any = SimpleNamespace(pool=pool)
    return PublishedBlocks(holder)


def _fill(pool: BlockPool, first: int, count: int) -> None:
    blocks = pool.take(count)
    for i, block in enumerate(blocks.tolist()):
        pool.publish(BlockId(block), KEYS[(first + i) % len(KEYS)])
    pool.release(blocks)


def _take(mirror: Mirror, messages: list[pb.BlockEvents]) -> None:
    for message in messages:
        stored = () if message.snapshot else [change == 0 for change in message.changes]
        mirror.take("", BlockBatch(message.first, stored, split_keys(message.keys), snapshot=message.snapshot))


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("fill"), st.integers(0, 39), st.integers(1, 12)),
            st.tuples(st.just("clear"), st.just(0), st.just(0)),
            st.tuples(st.just("send"), st.just(0), st.just(0)),
        ),
        max_size=40,
    ),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_a_mirror_is_right_after_every_message(actions: list[tuple[str, int, int]], capacity: int, size: int) -> None:
    pool = BlockPool(12, events=BlockEvents(capacity))
    feed, mirror, now = BlockFeed(_published(pool)), Mirror(), 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_feed, "MAX_EVENTS", size)
        for action, first, count in [*actions, ("send", 0, 0)]:
            if action == "fill":
                _fill(pool, first, count)
            elif action == "clear":
                pool.clear_keys()
            else:
                now += INTERVAL
                messages = feed.take(now)
                assert all(len(message.keys) <= 16 * size for message in messages)
                _take(mirror, messages)
                assert mirror.keys == set(pool.snapshot()[1])
                assert mirror.number == pool.events.latest
                assert mirror.voids == 0
                assert feed.take(now + INTERVAL) == []


def test_messages_are_bounded_and_come_at_intervals() -> None:
    keys = chain(root_key("model"), np.arange(150_000 * 2, dtype=np.int32), 2)
    pool = BlockPool(len(keys))
    blocks = pool.take(len(keys))
    for block, key in zip(blocks.tolist(), keys, strict=True):
        pool.publish(BlockId(block), key)
    feed, mirror = BlockFeed(_published(pool)), Mirror()
    messages = feed.take(10.0)
    assert len(messages) == 3
    assert all(message.ByteSize() <= FRAME_BYTES + 64 for message in messages)
    _take(mirror, messages)
    assert mirror.keys == set(keys)
    pool.clear_keys()
    assert feed.take(10.0 + INTERVAL / 2) == []
    _take(mirror, feed.take(10.0 + INTERVAL))
    assert mirror.keys == set()
