"""Which blocks get a key when, who may use them, and what takes the key away."""

from __future__ import annotations

import pytest

from tercet_core.scheduling.scheduler import Scheduler
from tests.unit.core.support import Bench, answer, apply, failure, make_limits, make_request, next_plan

PROMPT = list(range(1, 13))  # three blocks of four


def _keys(scheduler: Scheduler) -> int:
    return scheduler.reset_prefix_cache()


@pytest.mark.parametrize(
    ("length", "computed", "cached"), [(3, 0, 0), (4, 3, 4), (5, 4, 4), (8, 7, 8), (9, 8, 8), (12, 11, 12)]
)
def test_a_match_leaves_one_token_to_compute_whose_kv_is_not_written(length: int, computed: int, cached: int) -> None:
    """The bench's worker checks that nothing is written to blocks that are shared."""
    bench = Bench(make_limits())
    bench.submit(make_request(0, PROMPT, max_tokens=2))
    bench.drain()
    client = bench.submit(make_request(1, PROMPT[:length], max_tokens=1))
    bench.plan()
    plan = bench.sent[-1].plan
    assert (plan.computed.tolist(), plan.num_tokens.tolist()) == ([computed], [length - computed])
    assert plan.new.cached.tolist() == [cached]
    assert len(plan.block_ids) == -(-length // 4)
    bench.drain()
    assert client.request.cached_tokens == computed


def test_many_read_the_same_whole_prompt_while_it_is_decoded_behind() -> None:
    bench = Bench(make_limits(max_slots=4))
    bench.submit(make_request(0, PROMPT, max_tokens=9))
    bench.turn(1)
    for handle in range(1, 4):
        bench.submit(make_request(handle, PROMPT, max_tokens=9))
    bench.plan()
    assert bench.sent[-1].plan.computed.tolist() == [12, 11, 11, 11]
    assert bench.sent[-1].plan.num_tokens.tolist() == [1, 1, 1, 1]
    table = bench.scheduler.table
    assert len({tuple(table.blocks[slot, :3].tolist()) for slot in table.order.tolist()}) == 1
    bench.drain(2)


def test_output_is_matched_too() -> None:
    bench = Bench(make_limits())
    first = bench.submit(make_request(0, PROMPT[:3], max_tokens=10))
    bench.drain(3)
    bench.submit(make_request(1, PROMPT[:3] + first.heard, max_tokens=1))
    bench.plan()
    assert bench.sent[-1].plan.computed.tolist() == [12]
    bench.drain()


def test_a_block_gets_its_key_only_when_the_step_that_filled_it_is_applied() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.submit(make_request(0, PROMPT))
    first = next_plan(scheduler)
    scheduler.submit(make_request(1, PROMPT))
    second = next_plan(scheduler)
    assert second.computed.tolist() == [12, 0], "the other's blocks are planned, not computed"
    apply(scheduler, answer(first))
    scheduler.submit(make_request(2, PROMPT))
    assert next_plan(scheduler).computed.tolist()[-1] == 11


def test_a_placeholder_is_never_hashed() -> None:
    """The block with the sampled token is full once that token's KV has landed, a step later."""
    scheduler = Scheduler(make_limits())
    scheduler.submit(make_request(0, [1, 2, 3], max_tokens=9))
    plans = [next_plan(scheduler) for _ in range(3)]  # computed: 3, 4, 5
    apply(scheduler, answer(plans[0]))
    assert int(scheduler.table.hashed[0]) == 0, "four tokens are known, three are computed by an applied step"
    apply(scheduler, answer(plans[1]))
    assert int(scheduler.table.hashed[0]) == 1


def test_a_chunked_prompt_is_keyed_chunk_by_chunk() -> None:
    scheduler = Scheduler(make_limits(max_batched_tokens=6))
    scheduler.submit(make_request(0, PROMPT))
    first, second = next_plan(scheduler), next_plan(scheduler)
    apply(scheduler, answer(first))
    assert int(scheduler.table.hashed[0]) == 1
    apply(scheduler, answer(second))
    assert int(scheduler.table.hashed[0]) == 3


def test_the_second_block_with_a_key_stays_private() -> None:
    scheduler = Scheduler(make_limits())
    twins = [make_request(handle, PROMPT, max_tokens=9) for handle in range(2)]
    for twin in twins:
        scheduler.submit(twin)
    apply(scheduler, answer(next_plan(scheduler)))
    assert scheduler.table.hashed[:2].tolist() == [3, 3]
    first, second = (scheduler.table.blocks[twin.slot, :3].tolist() for twin in twins)
    assert not set(first) & set(second), "tables never swap entries"
    scheduler.end([twins[1]])
    assert scheduler.pool.cached == 0, "unkeyed blocks are free at once"
    scheduler.end([twins[0]])
    assert scheduler.pool.cached == 3


def test_tenants_do_not_share() -> None:
    bench = Bench(make_limits())
    bench.submit(make_request(0, PROMPT, max_tokens=1, salt="one"))
    bench.drain()
    bench.submit(make_request(1, PROMPT, max_tokens=1, salt="two"))
    bench.plan()
    assert bench.sent[-1].plan.computed.tolist() == [0]
    bench.drain()


def test_without_caching_nothing_is_keyed_and_the_tokens_are_the_same() -> None:
    heard = []
    for caching in (0, 1):
        bench = Bench(make_limits(prefix_caching=caching))
        for handle in range(4):
            bench.submit(make_request(handle, PROMPT[: 6 + handle], max_tokens=5))
            bench.drain(2)
        assert (bench.scheduler.pool.cached > 0) == bool(caching)
        assert (bench.scheduler.counters.cached_tokens > 0) == bool(caching)
        heard.append([client.heard for client in bench.clients])
    assert heard[0] == heard[1]


def test_a_failed_step_leaves_nothing_of_its_rows_findable() -> None:
    scheduler = Scheduler(make_limits(max_batched_tokens=6))
    scheduler.submit(make_request(0, PROMPT))
    first, second = next_plan(scheduler), next_plan(scheduler)
    apply(scheduler, answer(first))
    apply(scheduler, failure(second))
    assert scheduler.pool.cached == 0
    assert scheduler.pool.available == 32
    assert _keys(scheduler) == 0


def test_a_failed_step_spares_the_prefix_that_its_rows_only_read() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.submit(make_request(0, PROMPT, max_tokens=1))
    apply(scheduler, answer(next_plan(scheduler)))
    scheduler.submit(make_request(1, PROMPT))
    plan = next_plan(scheduler)
    assert plan.computed.tolist() == [11]
    apply(scheduler, failure(plan))
    assert _keys(scheduler) == 3


@pytest.mark.parametrize("chunk", [False, True])
def test_a_row_that_is_not_finite_leaves_nothing_findable(chunk: bool) -> None:
    scheduler = Scheduler(make_limits(max_batched_tokens=8 if chunk else 32))
    scheduler.submit(make_request(0, PROMPT))
    first, second = next_plan(scheduler), next_plan(scheduler)
    assert first.samples.tolist() == [not chunk]
    apply(scheduler, answer(first, [], not_finite=[0]))
    assert apply(scheduler, answer(second)) == []
    assert scheduler.pool.available == 32
    assert _keys(scheduler) == 0


def test_resetting_while_requests_run_only_forgets() -> None:
    bench = Bench(make_limits())
    bench.submit(make_request(0, PROMPT, max_tokens=20))
    bench.turn(2)
    bench.turn(2)
    bench.reset_prefix_cache()
    assert bench.scheduler.pool.cached == 0
    bench.submit(make_request(1, PROMPT, max_tokens=3))
    bench.plan()
    assert bench.sent[-1].plan.computed.tolist()[-1] == 0
    bench.drain(2)
    assert all(client.heard == client.expected for client in bench.clients)


def test_a_finished_request_leaves_its_whole_landed_blocks_only() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.submit(make_request(0, PROMPT[:7], max_tokens=2))
    apply(scheduler, answer(next_plan(scheduler)))
    apply(scheduler, answer(next_plan(scheduler)))  # token 8 has landed, token 9 is known only
    assert (scheduler.pool.cached, scheduler.pool.available) == (2, 32)


@pytest.mark.parametrize(("blocks", "admitted"), [(4, False), (5, True)])
def test_a_held_prefix_takes_no_room(blocks: int, admitted: bool) -> None:
    """The second needs no block of its own; the first has two to come: for its 13th token, and one in reserve."""
    bench = Bench(make_limits(num_blocks=blocks))
    bench.submit(make_request(0, PROMPT, max_tokens=4))
    bench.turn(1)
    second = bench.submit(make_request(1, PROMPT, max_tokens=4))
    bench.turn(1)
    assert (second.request.slot is not None) == admitted
    bench.drain(1)


def test_an_idle_prefix_takes_the_room_that_it_lies_in() -> None:
    """Three cached blocks and two free ones: what is matched is not there for others any more."""
    bench = Bench(make_limits(num_blocks=5))
    bench.submit(make_request(0, PROMPT, max_tokens=1))
    bench.drain()
    assert bench.scheduler.pool.cached == 3
    first = bench.submit(make_request(1, PROMPT, max_tokens=2))
    second = bench.submit(make_request(2, [9] * 8, max_tokens=2))
    bench.plan()
    assert first.request.cached_tokens == 11
    assert second.request.slot is None, "of five blocks, three are the first's, one is kept back for it, one is left"
    bench.drain(1)
