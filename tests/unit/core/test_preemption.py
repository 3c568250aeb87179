"""The pool is too small for everybody: who gives way, when they come back, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_core.scheduling.request import Ending
from tercet_core.scheduling.scheduler import Scheduler
from tests.unit.core.support import (
    Bench,
    answer,
    apply,
    failure,
    make_limits,
    make_request,
    next_plan,
    rows_of,
    run_until,
)


def _crowd(*priorities: int, blocks: int, **changes: int) -> Bench:
    """Returns a bench with one request of 3 + 20 tokens (6 blocks of 4) per priority."""
    bench = Bench(make_limits(num_blocks=blocks, max_slots=len(priorities), **changes))
    for handle, priority in enumerate(priorities):
        bench.submit(make_request(handle, [handle, 9, 9], max_tokens=20, priority=priority))
    return bench


def _preempted(bench: Bench) -> list[int]:
    return [twin.handle for twin in bench.reference.waiting if twin.has_slot]


@pytest.mark.parametrize(
    ("priorities", "victim"),
    [((0, 0, 0), 2), ((0, 1, 0), 1), ((1, 0, 1), 2), ((2, 1, 0), 0), ((1, 1, 0), 1)],
)
def test_the_lowest_priority_gives_way_and_among_those_the_latest_arrival(
    priorities: tuple[int, ...], victim: int
) -> None:
    bench = _crowd(*priorities, blocks=8)
    run_until(bench, lambda: bench.scheduler.counters.preemptions > 0)
    assert _preempted(bench) == [victim]
    bench.drain(1)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("caching", [0, 1])
@pytest.mark.parametrize("blocks", [6, 7, 9, 11])
def test_two_requests_that_together_exceed_the_pool_both_finish(depth: int, caching: int, blocks: int) -> None:
    bench = _crowd(0, 0, blocks=blocks, prefix_caching=caching)
    bench.drain(depth)
    assert [client.ending for client in bench.clients] == [Ending.LENGTH, Ending.LENGTH]
    # Each time somebody gives way, somebody has grown by a block; two requests have twelve to grow by.
    assert bench.scheduler.counters.preemptions <= 12
    assert bench.scheduler.counters.recomputed_tokens <= 12 * 22


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 24)), min_size=2, max_size=6),
    blocks=st.integers(9, 24),
    budget=st.sampled_from([2, 8, 64]),
    depth=st.integers(1, 4),
    caching=st.booleans(),
)
def test_preemption_does_not_thrash(
    lengths: list[tuple[int, int]], blocks: int, budget: int, depth: int, caching: bool
) -> None:
    """Between two preemptions somebody grows by a block for the first time, so their number is bounded by the blocks.

    Each costs at most the tokens that its victim knows. (Prompts share nothing here: a victim whose blocks are all
    shared gives nothing back, but then it costs next to nothing to resume as well.)
    """
    bench = Bench(make_limits(num_blocks=blocks, max_slots=6, max_batched_tokens=budget, prefix_caching=int(caching)))
    for handle, (prompt, output) in enumerate(lengths):
        bench.submit(make_request(handle, [handle] * prompt, max_tokens=output))
    bench.drain(depth)
    growth = sum(-(-(prompt + output) // 4) for prompt, output in lengths)
    longest = max(prompt + output for prompt, output in lengths)
    assert bench.scheduler.counters.preemptions <= growth
    assert bench.scheduler.counters.recomputed_tokens <= growth * longest


def test_what_the_victim_had_in_flight_counts_and_it_resumes_only_after() -> None:
    scheduler = Scheduler(make_limits(num_blocks=4, max_slots=2))
    older, later = make_request(0, [1, 1, 1], max_tokens=10), make_request(1, [2, 2, 2], max_tokens=10)
    scheduler.submit(older)
    scheduler.submit(later)
    flying = [next_plan(scheduler)]
    while not scheduler.counters.preemptions:  # both reach their ninth token, for which there are no two blocks
        flying.append(next_plan(scheduler))
    assert flying[-1].slots.tolist() == [older.slot]
    assert int(scheduler.table.placeholders[later.slot]) == len(flying) - 1
    assert int(scheduler.table.computed[later.slot]) == 0
    scheduler.end([older])  # the pool is empty, and still:
    for flight in flying[:-1]:
        assert scheduler.plan() is None, "later has steps in flight"
        (output,) = apply(scheduler, answer(flight, [3], [4]))
        assert rows_of(output) == [(1, [4])]
    plan = next_plan(scheduler)
    assert plan.new.token_ids.tolist() == [2, 2, 2, *[4] * (len(flying) - 1)]
    assert plan.new.epochs.tolist() == [0], "the slot has the same owner"
    assert plan.computed.tolist() == [0]


def test_an_end_token_in_flight_ends_a_request_that_was_preempted_meanwhile() -> None:
    scheduler = Scheduler(make_limits(num_blocks=4, max_slots=2))
    older, later = make_request(0, [1, 1, 1], max_tokens=10), make_request(1, [2, 2, 2], max_tokens=10, eos=(7,))
    scheduler.submit(older)
    scheduler.submit(later)
    flying = [next_plan(scheduler)]
    while not scheduler.counters.preemptions:
        flying.append(next_plan(scheduler))
    slot = later.slot
    (output,) = apply(scheduler, answer(flying[0], [3], [7]))
    assert [(end.row, end.ending) for end in output.ends] == [(1, Ending.STOP)]
    assert scheduler.num_waiting == 0
    for flight in flying[1:]:
        assert rows_of(apply(scheduler, answer(flight))[0]) == [(0, [0])]
    assert next_plan(scheduler).freed.tolist() == [slot]


def test_late_results_of_a_preempted_request_key_none_of_its_old_blocks() -> None:
    """Its blocks are another's by then; the worker has written them in plan order, so their content is the other's."""
    scheduler = Scheduler(make_limits(num_blocks=4, max_slots=2))
    older, later = make_request(0, [1, 1, 1], max_tokens=13), make_request(1, [2, 2, 2], max_tokens=13)
    scheduler.submit(older)
    scheduler.submit(later)
    flying = [next_plan(scheduler)]
    while not scheduler.counters.preemptions:
        flying.append(next_plan(scheduler))
    for flight in flying[:6]:
        apply(scheduler, answer(flight))
    table = scheduler.table
    assert int(table.known[later.slot]) == 9, "two whole blocks' worth of tokens has landed"
    assert int(table.hashed[later.slot]) == int(table.landed[later.slot]) == 0
    assert scheduler.reset_prefix_cache() == 2, "only the other one's two blocks have keys"


def test_blocks_freed_while_planning_are_given_out_in_the_same_plan() -> None:
    scheduler = Scheduler(make_limits(num_blocks=4, max_slots=2, prefix_caching=0))
    older, later = make_request(0, [1, 1, 1], max_tokens=10), make_request(1, [2, 2, 2], max_tokens=10)
    scheduler.submit(older)
    scheduler.submit(later)
    owned: set[int] = set()
    plan = next_plan(scheduler)
    while not scheduler.counters.preemptions:
        row = plan.slots.tolist().index(later.slot)
        owned |= set(plan.block_ids[plan.block_offsets[row] : plan.block_offsets[row + 1]].tolist())
        plan = next_plan(scheduler)
    assert set(plan.block_ids.tolist()) <= owned
    assert len(plan.block_ids) == 1


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    bench = Bench(make_limits(num_blocks=4, max_slots=3))
    older, later = (bench.submit(make_request(handle, [handle, 9, 9], max_tokens=10)) for handle in range(2))
    run_until(bench, lambda: len(older.heard) == len(later.heard) == 6)
    urgent = bench.submit(make_request(2, [5], max_tokens=1, priority=-1))
    bench.turn(1)
    assert _preempted(bench) == [1]
    assert bench.scheduler.pool.available == 1, "there is room for one block"
    assert urgent.request.slot is None
    bench.drain(1)


def test_a_victim_does_not_resume_into_the_last_block_of_the_others() -> None:
    """All its known tokens and one block for every running request must be there."""
    bench = _crowd(0, 0, blocks=8, prefix_caching=0)
    _, later = bench.clients
    resumed = 0
    while later.open:
        available, running = bench.scheduler.pool.available, bench.scheduler.num_running
        waited, needed = later.twin in bench.reference.waiting, -(-later.twin.known // 4)
        assert bench.plan()
        if waited and later.twin in bench.reference.running and bench.scheduler.counters.preemptions:
            resumed += 1
            assert available >= needed + running
        bench.deliver()
    assert resumed
    bench.drain(1)


def test_a_request_alone_that_outgrows_the_pool_ends_with_an_error_and_the_next_one_runs() -> None:
    """With nothing in flight nobody would ask again, so the next one must be in the same plan."""
    bench = Bench(make_limits(num_blocks=2, max_slots=2))
    big = bench.submit(make_request(0, [1, 2, 3], max_tokens=20))
    run_until(bench, lambda: len(big.heard) == 6)
    small = bench.submit(make_request(1, [5, 6, 7, 8, 9], max_tokens=2))
    bench.drain(1)
    assert (big.ending, small.ending) == (Ending.ERROR, Ending.LENGTH)
    assert big.heard == big.expected[:6], "nine tokens are known; the ninth has no place"


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_the_last_tokens_before_such_an_error_do_not_depend_on_the_depth(depth: int) -> None:
    """What is in flight may end the request, so it is awaited first."""
    bench = Bench(make_limits(num_blocks=2))
    endless = bench.submit(make_request(0, [1, 2, 3], max_tokens=20))
    bench.drain(depth)
    assert endless.ending is Ending.ERROR
    assert len(endless.heard) == 6
    other = make_request(1, [1, 2, 3], max_tokens=20, stops=(endless.expected[5],))
    ends = bench.submit(other)
    assert len(ends.expected) <= 6
    bench.drain(depth)
    assert ends.ending is Ending.STOP


def test_a_prompt_beyond_the_whole_pool_fails_at_once_and_holds_nobody_up() -> None:
    bench = Bench(make_limits(num_blocks=4))
    bench.submit(make_request(0, [1], max_tokens=12))
    bench.turn(1)
    giant = bench.submit(make_request(1, [2] * 17))
    small = bench.submit(make_request(2, [3], max_tokens=1))
    bench.turn(1)
    assert giant.ending is Ending.ERROR
    assert small.ending is Ending.LENGTH
    bench.drain()


def test_a_failed_step_ends_also_the_rows_that_were_preempted_since() -> None:
    scheduler = Scheduler(make_limits(num_blocks=4, max_slots=2))
    older, later = make_request(0, [1, 1, 1], max_tokens=10), make_request(1, [2, 2, 2], max_tokens=10)
    scheduler.submit(older)
    scheduler.submit(later)
    flying = [next_plan(scheduler)]
    while not scheduler.counters.preemptions:
        flying.append(next_plan(scheduler))
    (output,) = apply(scheduler, failure(flying[0]))
    assert output.handles.tolist() == [0, 1]
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.pool.available) == (0, 0, 4)
    for flight in flying[1:]:
        assert apply(scheduler, answer(flight)) == []


def test_aborting_a_preempted_request_frees_its_slot() -> None:
    bench = _crowd(0, 0, blocks=8)
    run_until(bench, lambda: bench.scheduler.counters.preemptions == 1, depth=2)
    bench.abort([bench.clients[1]])
    assert bench.scheduler.table.num_free == 1
    assert bench.scheduler.num_waiting == 0
    bench.drain()


def test_recomputed_tokens_count_what_was_in_flight_but_not_what_the_cache_kept() -> None:
    scheduler = Scheduler(make_limits(num_blocks=6, max_slots=2))
    older, later = make_request(0, [1, 1, 1], max_tokens=20), make_request(1, [2, 2, 2], max_tokens=20)
    scheduler.submit(older)
    scheduler.submit(later)
    flying = []
    while not scheduler.counters.preemptions:
        flying.append(next_plan(scheduler))
        if len(flying) == 3:
            apply(scheduler, answer(flying.pop(0)))
    # 12 tokens each filled three blocks; of the victim's, two have landed as a whole and keep their keys.
    scheduler.end([older])
    for flight in flying:
        apply(scheduler, answer(flight))
    plan = next_plan(scheduler)
    (computed,) = plan.computed.tolist()
    assert computed == 8
    assert scheduler.counters.recomputed_tokens == 12 - computed


# --------------------------------------------------------------------------------------------- budget and chunks


def test_the_budget_is_shared_in_order_and_the_last_is_cut() -> None:
    scheduler = Scheduler(make_limits(max_batched_tokens=10))
    for handle, length in enumerate([4, 4, 4, 4]):
        scheduler.submit(make_request(handle, [handle] * length))
    plan = next_plan(scheduler)
    assert (plan.num_tokens.tolist(), plan.samples.tolist()) == ([4, 4, 2], [True, True, False])
    plan = next_plan(scheduler)
    assert (plan.num_tokens.tolist(), plan.samples.tolist()) == ([1, 1, 2, 4], [True, True, True, True])


def test_a_long_prefill_is_chunked_by_its_limit_while_others_go_on() -> None:
    bench = Bench(make_limits(max_batched_tokens=16, long_prefill_limit=5))
    bench.submit(make_request(0, [1], max_tokens=12))
    bench.turn(1)
    bench.submit(make_request(1, [2] * 13, max_tokens=2))
    shares = []
    for _ in range(4):
        bench.plan()
        shares.append(bench.sent[-1].plan.num_tokens.tolist())
        bench.deliver()
    assert shares == [[1, 5], [1, 5], [1, 3], [1, 1]]
    bench.drain()


def test_a_slot_is_awaited_in_order() -> None:
    bench = Bench(make_limits(max_slots=1))
    for handle, priority in enumerate([1, 1, 0]):
        bench.submit(make_request(handle, [handle], max_tokens=3, priority=priority))
        bench.plan()
    order: list[int] = []
    while bench.turn(1):
        order += [c.request.handle for c in bench.clients if not c.open and c.request.handle not in order]
    assert order == [0, 2, 1]
    bench.drain()


def test_plan_columns_are_int32_and_bool() -> None:
    scheduler = Scheduler(make_limits(max_batched_tokens=6))
    for handle in range(3):
        scheduler.submit(make_request(handle, [handle] * 3, max_tokens=20))
    plan = next_plan(scheduler)
    apply(scheduler, answer(plan))
    scheduler.propose(next(r for r in scheduler.table.requests if r is not None), np.array([1, 2], np.int64))
    for step in (plan, next_plan(scheduler)):
        for name in ("freed", "slots", "num_tokens", "computed", "block_offsets", "block_ids", "draft_offsets",
                     "draft_ids", "appended_offsets", "appended_ids", "gated"):  # fmt: skip
            assert getattr(step, name).dtype == np.int32, name
        assert step.samples.dtype == np.bool_


@pytest.mark.parametrize(("policy", "late"), [("priority", True), ("fair", False)])
def test_those_that_hold_all_slots_do_not_wait_behind_one_that_has_none(policy: str, late: bool) -> None:
    scheduler = Scheduler(make_limits(max_slots=2), policy=policy)
    first, second = (make_request(handle, [handle, 1], max_tokens=2, priority=1) for handle in range(2))
    other = make_request(2, [2, 1], max_tokens=2, priority=0 if late else 1)
    other.tenant = "other"
    scheduler.submit(first)
    next_plan(scheduler)
    scheduler.submit(second)
    if late:
        next_plan(scheduler)
    scheduler.submit(other)
    if not late:
        next_plan(scheduler)  # the second arrived first; now its tenant was served more than the other
    scheduler.restart(scheduler.limits.num_blocks)
    assert other.slot is None

    plan = scheduler.plan()
    assert plan is not None, "nobody runs, and all wait"
    assert sorted(plan.slots.tolist()) == [0, 1]
    ends = 0
    while plan is not None:
        ends += sum(len(output.ends) for output in apply(scheduler, answer(plan)))
        plan = scheduler.plan()
    assert ends == 3
