"""Placeholders, token limits, epochs and drafts: what happens between a plan and its late result."""

from __future__ import annotations

import numpy as np
import pytest

from tercet_core.scheduling.request import Ending
from tercet_core.scheduling.scheduler import Scheduler
from tercet_shared.errors import ContextLengthError, InvalidRequestError, ProtocolError
from tercet_shared.wire.step import StepResult
from tests.unit.core.support import Bench, answer, apply, failure, make_limits, make_request, next_plan, rows_of


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_row_is_not_planned_once_what_is_in_flight_reaches_its_limit(depth: int) -> None:
    bench = Bench(make_limits())
    client = bench.submit(make_request(0, [1, 2, 3], max_tokens=4))
    bench.drain(depth)
    assert len(client.heard) == 4
    assert bench.scheduler.counters.steps == 4, "no row was wasted"
    assert bench.scheduler.counters.discarded_tokens == 0


def test_the_model_length_limits_like_max_tokens() -> None:
    bench = Bench(make_limits(max_model_len=8))
    client = bench.submit(make_request(0, [1, 2, 3], max_tokens=5))
    bench.drain(depth=3)
    assert (len(client.heard), client.ending) == (5, Ending.LENGTH)
    assert bench.scheduler.counters.steps == 5


def test_a_stop_token_wastes_only_the_row_that_was_planned_already() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.submit(make_request(0, max_tokens=10, stops=(9,)))
    first, second = next_plan(scheduler), next_plan(scheduler)
    (output,) = apply(scheduler, answer(first, [9]))
    assert [(end.ending, end.stop_id) for end in output.ends] == [(Ending.STOP, 9)]
    assert apply(scheduler, answer(second, [4])) == []
    assert scheduler.counters.output_tokens == 1
    assert scheduler.pool.available == 32
    assert scheduler.plan() is None


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_placeholders_count_what_is_in_flight_and_are_never_negative(depth: int) -> None:
    scheduler = Scheduler(make_limits())
    request = make_request(0, max_tokens=20)
    scheduler.submit(request)
    plans = []
    for flying in range(1, depth + 1):
        plans.append(next_plan(scheduler))
        assert int(scheduler.table.placeholders[request.slot]) == flying
    for flying in range(depth - 1, -1, -1):
        apply(scheduler, answer(plans.pop(0)))
        assert int(scheduler.table.placeholders[request.slot]) == flying


def test_a_late_result_does_not_reach_the_next_owner_of_the_slot() -> None:
    scheduler = Scheduler(make_limits(max_slots=1))
    first, second = make_request(1, max_tokens=9), make_request(2, [5, 6], max_tokens=9)
    scheduler.submit(first)
    stale = next_plan(scheduler)
    scheduler.end([first])
    scheduler.submit(second)
    plan = next_plan(scheduler)
    assert plan.freed.tolist() == plan.slots.tolist() == stale.slots.tolist(), "freed, and given away in the same plan"
    assert plan.new.epochs.tolist() != [0]
    assert apply(scheduler, answer(stale, [3])) == []
    assert int(scheduler.table.known[second.slot]) == 2
    assert int(scheduler.table.placeholders[second.slot]) == 1
    (output,) = apply(scheduler, answer(plan, [4]))
    assert rows_of(output) == [(2, [4])]
    assert scheduler.counters.discarded_tokens == 1


def test_freed_slots_are_told_once_with_the_next_plan() -> None:
    scheduler = Scheduler(make_limits())
    one, two = make_request(1), make_request(2)
    scheduler.submit(one)
    scheduler.submit(two)
    plan = next_plan(scheduler)
    slot = one.slot
    scheduler.end([one])
    after = next_plan(scheduler)
    assert after.freed.tolist() == [slot]
    apply(scheduler, answer(plan))
    assert next_plan(scheduler).freed.tolist() == []


def test_ending_twice_or_at_once_twice_is_harmless() -> None:
    scheduler = Scheduler(make_limits(max_slots=1))
    running, waiting = make_request(1), make_request(2)
    scheduler.submit(running)
    scheduler.submit(waiting)
    next_plan(scheduler)
    scheduler.end([running, waiting, running, waiting])
    scheduler.end([running])
    scheduler.check_integrity()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.table.num_free) == (0, 0, 1)


def test_end_all_returns_everybody_once() -> None:
    bench = Bench(make_limits(num_blocks=6, max_slots=3))
    for handle in range(5):
        bench.submit(make_request(handle, [handle] * 7, max_tokens=12))
    while not bench.scheduler.counters.preemptions:
        assert bench.turn(2)
    left = bench.scheduler.end_all()
    assert sorted(request.handle for request in left) == [c.request.handle for c in bench.clients if c.open]
    bench.scheduler.check_integrity()
    assert bench.scheduler.pool.referenced == 0
    assert bench.scheduler.num_waiting == 0


# --------------------------------------------------------------------------------------------------------- drafts


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rejected_drafts_are_rolled_back(accepted: int, depth: int) -> None:
    bench = Bench(make_limits())
    client = bench.submit(make_request(0, max_tokens=20))
    bench.turn(1)
    bench.propose(client, accepted, 3 - accepted)
    for _ in range(depth):
        bench.plan()
    bench.deliver()
    assert len(client.heard) == 1 + accepted + 1
    bench.drain(depth)


def test_drafts_are_taken_only_with_nothing_in_flight_and_only_up_to_the_limit() -> None:
    scheduler = Scheduler(make_limits())
    request = make_request(0, max_tokens=4)
    scheduler.submit(request)
    plan = next_plan(scheduler)
    scheduler.propose(request, np.array([1, 2], np.int32))
    apply(scheduler, answer(plan))
    assert int(scheduler.table.drafts[request.slot]) == 0
    scheduler.propose(request, np.array([1, 2, 3, 4, 5], np.int32))
    plan = next_plan(scheduler)
    assert plan.draft_ids.tolist() == [1, 2], "of three tokens that may follow, the last needs no draft"
    assert plan.draft_offsets.tolist() == [0, 2]
    (output,) = apply(scheduler, answer(plan, [1, 2, 8]))
    assert rows_of(output) == [(0, [1, 2, 8])]
    assert output.ends[0].ending is Ending.LENGTH


def test_a_later_proposal_replaces_the_earlier_one() -> None:
    scheduler = Scheduler(make_limits())
    request = make_request(0, max_tokens=9)
    scheduler.submit(request)
    apply(scheduler, answer(next_plan(scheduler)))
    scheduler.propose(request, np.array([1, 2], np.int32))
    scheduler.propose(request, np.array([], np.int32))
    plan = next_plan(scheduler)
    assert (plan.num_tokens.tolist(), len(plan.draft_ids), len(plan.draft_offsets)) == ([1], 0, 0)


def test_accepted_drafts_are_cut_at_a_stop_token() -> None:
    scheduler = Scheduler(make_limits())
    request = make_request(0, max_tokens=20, eos=(7,))
    scheduler.submit(request)
    apply(scheduler, answer(next_plan(scheduler)))
    scheduler.propose(request, np.array([5, 7, 6], np.int32))
    (output,) = apply(scheduler, answer(next_plan(scheduler), [5, 7, 6, 6]))
    assert rows_of(output) == [(0, [5, 7])]
    assert output.ends[0].stop_id == 7
    assert scheduler.counters.output_tokens == 3


def test_drafts_that_do_not_fit_the_budget_leave_it_to_the_rows_behind() -> None:
    scheduler = Scheduler(make_limits(max_batched_tokens=4))
    greedy, modest = make_request(1, [1], max_tokens=30), make_request(2, [2], max_tokens=30)
    scheduler.submit(greedy)
    scheduler.submit(modest)
    apply(scheduler, answer(next_plan(scheduler)))
    scheduler.submit(make_request(3, [3], max_tokens=30))
    scheduler.propose(greedy, np.array([1, 2, 3, 4], np.int32))
    plan = next_plan(scheduler)
    assert plan.num_tokens.tolist() == [1, 1, 1]
    assert plan.slots.tolist()[:2] == [greedy.slot, modest.slot]
    assert len(plan.draft_ids) == 0


def test_drafts_give_way_before_anybody_is_preempted() -> None:
    bench = Bench(make_limits(num_blocks=4, max_slots=2))
    for handle in range(2):
        bench.submit(make_request(handle, [handle, 9, 9], max_tokens=5))
    bench.turn(1)
    bench.turn(1)
    for client in bench.clients:
        bench.propose(client, 0, 8)  # 13 tokens each: four blocks, of which each has two
    bench.plan()
    assert bench.scheduler.counters.preemptions == 0
    assert len(bench.sent[-1].plan.draft_ids) <= 8
    bench.drain()
    assert all(client.heard == client.expected for client in bench.clients)


def test_a_request_alone_does_not_fail_for_its_drafts() -> None:
    bench = Bench(make_limits(num_blocks=2))
    probe = make_request(0, [1, 2, 3], max_tokens=30)
    client = bench.submit(probe)
    bench.turn(1)
    client.expected = client.expected[:2]
    bench.propose(client, 0, 0)
    bench.scheduler.propose(probe, np.arange(10, 20, dtype=np.int32))
    bench.reference.propose(client.twin, list(range(10, 20)))
    assert bench.plan(), "the token itself has room"
    assert len(bench.sent[-1].plan.draft_ids) == 0
    assert client.open


def test_blocks_granted_for_drafts_are_not_given_to_a_waiting_request() -> None:
    """Eight drafts take more blocks than the one that is kept back for each running request."""
    bench = Bench(make_limits(num_blocks=8, block_size=2))
    client = bench.submit(make_request(0, [1, 2], max_tokens=20))
    bench.turn(1)
    bench.propose(client, 8, 0)
    bench.submit(make_request(1, [4, 5, 6, 7, 8, 9], max_tokens=4))
    assert bench.plan()
    assert len(bench.sent[-1].plan.draft_ids) == 8
    bench.drain()


def test_a_preempted_request_keeps_its_accepted_drafts_and_an_ended_one_none() -> None:
    for abort in (False, True):
        bench = Bench(make_limits(num_blocks=6, max_slots=2))
        older, later = (bench.submit(make_request(h, [h, 9, 9], max_tokens=20)) for h in range(2))
        bench.turn(1)
        bench.propose(later, 2, 1)
        bench.plan()
        if abort:
            bench.abort([later])
        else:
            for bench_plans in range(16):
                if bench.scheduler.counters.preemptions or bench_plans == 15:
                    break
                bench.plan()
            assert bench.scheduler.counters.preemptions == 1
        heard = len(later.heard)
        bench.deliver()
        assert len(later.heard) - heard == (0 if abort else 3)
        bench.drain()
        assert older.heard == older.expected


# ------------------------------------------------------------------------------------------------ wrong results


def _one_in_flight() -> tuple[Scheduler, StepResult]:
    scheduler = Scheduler(make_limits(max_batched_tokens=8))
    scheduler.submit(make_request(0, [1, 2, 3]))
    scheduler.submit(make_request(1, [1] * 20))
    return scheduler, answer(next_plan(scheduler))  # row 0 samples, row 1 is a chunk


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step_id": 9}, "oldest step in flight"),
        ({"token_offsets": np.array([0, 1], np.int32)}, "wrong rows"),
        ({"not_finite": np.array([2], np.int32)}, "wrong rows"),
        ({"not_finite": np.array([-1], np.int32)}, "wrong rows"),
        ({"token_offsets": np.array([0, 0, 0], np.int32), "token_ids": np.zeros(0, np.int32)}, "number of tokens"),
        ({"token_offsets": np.array([0, 2, 2], np.int32), "token_ids": np.zeros(2, np.int32)}, "number of tokens"),
        ({"token_offsets": np.array([0, 0, 1], np.int32)}, "number of tokens"),
        ({"token_offsets": np.array([0, 1, 2], np.int32), "token_ids": np.zeros(2, np.int32)}, "number of tokens"),
        ({"not_finite": np.array([0], np.int32)}, "number of tokens"),
        ({"token_ids": np.array([50], np.int32)}, "outside the vocabulary"),
        ({"token_ids": np.array([-1], np.int32)}, "outside the vocabulary"),
    ],
)
def test_a_result_that_breaks_the_protocol_changes_nothing(changes: dict[str, object], words: str) -> None:
    scheduler, good = _one_in_flight()
    bad = StepResult(good.step_id, good.token_offsets, good.token_ids)
    for name, value in changes.items():
        setattr(bad, name, value)
    with pytest.raises(ProtocolError, match=words):
        scheduler.apply(bad)
    assert scheduler.in_flight == 1
    (output,) = apply(scheduler, good)
    assert rows_of(output) == [(0, [0])]


def test_a_result_without_a_step_in_flight_is_refused() -> None:
    scheduler, good = _one_in_flight()
    apply(scheduler, good)
    with pytest.raises(ProtocolError, match="in flight is none"):
        scheduler.apply(good)


def test_a_failed_step_ends_its_rows_and_nobody_else() -> None:
    scheduler = Scheduler(make_limits(max_slots=2))
    requests = [make_request(handle, [handle], front_end=handle % 2) for handle in range(3)]
    for request in requests:
        scheduler.submit(request)
    outputs = apply(scheduler, failure(next_plan(scheduler)))
    assert [(output.front_end, output.handles.tolist()) for output in outputs] == [(0, [0]), (1, [1])]
    for output in outputs:
        assert [end.ending for end in output.ends] == [Ending.ERROR]
        assert "out of memory" in str(output.ends[0].error)
    plan = next_plan(scheduler)
    (output,) = apply(scheduler, answer(plan, [4]))
    assert rows_of(output) == [(2, [4])]


@pytest.mark.parametrize("chunk", [False, True])
def test_a_row_that_is_not_finite_ends_alone(chunk: bool) -> None:
    """Also a chunk: its KV is wrong, so nothing that follows may be computed from it."""
    scheduler = Scheduler(make_limits(max_batched_tokens=8))
    bad, good = make_request(1, [1] * (12 if chunk else 3)), make_request(2, [2])
    if chunk:
        scheduler.submit(good)
        apply(scheduler, answer(next_plan(scheduler)))
        scheduler.submit(bad)
    else:
        scheduler.submit(bad)
        scheduler.submit(good)
    plan = next_plan(scheduler)
    row = plan.slots.tolist().index(bad.slot)
    tokens = [[] if i == row else [5] for i in range(2)]
    good_output, bad_output = apply(scheduler, answer(plan, *tokens, not_finite=[row]))
    assert rows_of(good_output) == [(2, [5])]
    assert rows_of(bad_output) == [(1, [])]
    assert "not finite" in str(bad_output.ends[0].error)
    assert scheduler.counters.not_finite_rows == 1
    assert scheduler.num_running == 1


# -------------------------------------------------------------------------------------------------- submission


@pytest.mark.parametrize(
    ("request_", "error", "param"),
    [
        (make_request(0, []), InvalidRequestError, "prompt"),
        (make_request(0, [1, 50]), InvalidRequestError, "prompt"),
        (make_request(0, [-1]), InvalidRequestError, "prompt"),
        (make_request(0, [1] * 64, max_tokens=1), ContextLengthError, "prompt"),
        (make_request(0, [1] * 60, max_tokens=5), ContextLengthError, "max_tokens"),
        (make_request(0, [1], max_tokens=2**31 - 1), ContextLengthError, "max_tokens"),
        (make_request(0, [1], resumed=[2, 3], max_tokens=2), InvalidRequestError, "max_tokens"),
        (make_request(0, [1], stops=(50,)), InvalidRequestError, "stop_token_ids"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(request_: object, error: type[Exception], param: str) -> None:
    scheduler = Scheduler(make_limits())
    with pytest.raises(error) as caught:
        scheduler.submit(request_)  # type: ignore[arg-type]  # parametrized
    assert caught.value.param == param  # type: ignore[attr-defined]  # a TercetError
    assert scheduler.num_waiting == 0


def test_the_longest_request_that_fits_is_served() -> None:
    bench = Bench(make_limits(max_model_len=16))
    client = bench.submit(make_request(0, [1] * 15, max_tokens=1))
    bench.drain()
    assert (len(client.heard), client.ending) == (1, Ending.LENGTH)


def test_a_resumed_request_counts_its_limit_from_the_original_prompt() -> None:
    bench = Bench(make_limits())
    whole = bench.submit(make_request(0, [1, 2, 3], max_tokens=9))
    bench.drain()
    rest = bench.submit(make_request(1, [1, 2, 3], resumed=whole.heard[:4], max_tokens=9, attempt=1))
    assert bench.plan()
    new = bench.sent[-1].plan.new
    assert (new.prompt_lens.tolist(), len(new.token_ids), new.min_len.tolist()) == ([3], 7, [3])
    bench.drain()
    assert rest.heard == whole.heard[4:]


@pytest.mark.parametrize("position", [0, 7, 8, 20])
def test_a_stop_id_ends_a_request_wherever_it_stands_in_its_list(position: int) -> None:
    ids = tuple(range(10, 31))
    scheduler = Scheduler(make_limits())
    scheduler.submit(make_request(0, eos=ids[:3], stops=ids[3:]))
    plans = [next_plan(scheduler), next_plan(scheduler)]
    (output,) = apply(scheduler, answer(plans[0], [9]))
    assert not output.ends
    (output,) = apply(scheduler, answer(plans[1], [ids[position]]))
    assert (output.ends[0].ending, output.ends[0].stop_id) == (Ending.STOP, ids[position])


def test_a_stop_token_at_the_limit_counts_as_stop() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.submit(make_request(0, max_tokens=1, stops=(5,)))
    (output,) = apply(scheduler, answer(next_plan(scheduler), [5]))
    assert output.ends[0].ending is Ending.STOP
