"""One tenant's flood does not hold up another's first token."""

from __future__ import annotations

from tercet_core.scheduling.fair_share import FairShareQueue
from tercet_core.scheduling.request import Request
from tercet_core.scheduling.scheduler import Scheduler
from tests.unit.core.support import Bench, answer, make_limits, make_request


def _request(arrival: int, tenant: str, prompt: int = 10, priority: int = 0) -> Request:
    request = make_request(arrival, [1] * prompt, priority=priority)
    request.arrival, request.tenant = arrival, tenant
    return request


def _admit(queue: FairShareQueue) -> Request:
    request = queue.pop()
    request.slot = 0  # type: ignore[assignment]  # any slot: the queue only looks whether there is one
    return request


def test_the_least_served_tenant_goes_first() -> None:
    queue = FairShareQueue(100)
    for arrival in range(6):
        queue.push(_request(arrival, "many", prompt=10))
    queue.push(_request(6, "few", prompt=35))
    order = [_admit(queue).tenant for _ in range(7)]
    # Equal counters go by arrival; then "few" is first, and pays for its long prompt.
    assert order == ["many", "few", "many", "many", "many", "many", "many"]


def test_output_counts_twice() -> None:
    queue = FairShareQueue(100)
    first = _request(0, "a", prompt=4)
    queue.push(first)
    queue.push(_request(1, "a", prompt=4))
    queue.push(_request(2, "b", prompt=5))
    queue.push(_request(3, "b", prompt=5))
    _admit(queue)
    queue.ended(first, output_tokens=3)  # a: 4 + 6
    assert [_admit(queue).tenant for _ in range(3)] == ["b", "b", "a"]


def test_idleness_earns_no_credit() -> None:
    queue = FairShareQueue(100)
    for arrival in range(4):
        queue.push(_request(arrival, "busy"))
    _admit(queue)
    _admit(queue)
    queue.push(_request(4, "late"))
    queue.push(_request(5, "late"))
    # "late" starts at the counter of "busy", 20; with equal counters the earlier arrival is next.
    assert [_admit(queue).tenant for _ in range(4)] == ["busy", "late", "busy", "late"]


def test_nobody_takes_all_slots() -> None:
    queue = FairShareQueue(8)
    for arrival in range(20):
        queue.push(_request(arrival, "flood"))
    held = [_admit(queue) for _ in range(7)]
    assert queue.peek() is None
    queue.push(_request(20, "other"))
    assert _admit(queue).tenant == "other"
    queue.ended(held[0], 1)
    assert _admit(queue).tenant == "flood"


def test_a_preempted_request_comes_back_although_its_tenant_is_at_the_limit() -> None:
    queue = FairShareQueue(8)
    for arrival in range(9):
        queue.push(_request(arrival, "flood"))
    held = [_admit(queue) for _ in range(7)]
    queue.push(held[3])
    assert queue.pop() is held[3]
    assert queue.peek() is None


def test_what_holds_a_slot_does_not_wait_behind_what_would_need_one() -> None:
    queue = FairShareQueue(8)
    held = []
    for arrival in range(7):
        queue.push(_request(arrival, "flood", priority=1))
        held.append(_admit(queue))
    queue.push(_request(7, "flood", priority=0))
    assert queue.peek() is None
    for request in (held[4], held[2]):  # the worker was lost
        queue.push(request)
    assert [_admit(queue), _admit(queue)] == [held[2], held[4]]
    queue.ended(held[0], 1)
    assert _admit(queue).arrival == 7


def test_after_a_restart_a_tenant_at_its_limit_goes_on() -> None:
    bench = Bench(make_limits(max_slots=1), policy="fair")
    bench.submit(make_request(0, [1, 2, 3], priority=1, tenant="a"))
    bench.turn(depth=1)
    bench.submit(make_request(1, [1, 2, 3], priority=0, tenant="a"))
    bench.restart()
    bench.drain()


def test_discarded_requests_do_not_pile_up_behind_a_head_that_stays() -> None:
    queue = FairShareQueue(8)
    queue.push(_request(0, "a"))
    for arrival in range(1, 2000):
        request = _request(arrival, "a")
        queue.push(request)
        assert queue.discard(request)
    assert len(queue._tenants["a"].fresh._heap) < 100
    last = _request(5000, "a")
    queue.push(last)
    assert list(queue) == [queue.pop(), last]
    assert queue.pop() is last


def test_a_tenant_that_has_nothing_left_is_forgotten() -> None:
    queue = FairShareQueue(8)
    waiting, running = _request(0, "a"), _request(1, "a")
    queue.push(running)
    _admit(queue)
    queue.push(waiting)
    assert queue.discard(waiting)
    assert not queue.discard(waiting)
    queue.ended(running, 5)
    assert queue._tenants == {}
    queue.push(_request(2, "a"))
    assert len(queue) == 1
    assert _admit(queue).arrival == 2


def test_a_newcomer_gets_its_first_token_while_a_thousand_prompts_of_another_wait() -> None:
    scheduler = Scheduler(make_limits(max_slots=8, num_blocks=256, max_batched_tokens=16), policy="fair")
    for handle in range(1000):
        request = make_request(handle, [handle % 40 + 1] * 8, max_tokens=20)
        request.tenant = "flood"
        scheduler.submit(request)
    for _ in range(30):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(answer(plan))
    newcomer = make_request(5000, [41] * 8, max_tokens=4)
    newcomer.tenant = "new"
    scheduler.submit(newcomer)
    steps = 0
    while newcomer.slot is None or scheduler.table.known[newcomer.slot] == newcomer.prompt_len:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(answer(plan))
        steps += 1
        assert steps <= 2
    scheduler.check_integrity()


def test_the_number_of_partial_prefills_is_bounded() -> None:
    scheduler = Scheduler(
        make_limits(max_batched_tokens=12, long_prefill_limit=4, max_partial_prefills=2, num_blocks=128)
    )
    for handle in range(4):
        scheduler.submit(make_request(handle, [handle + 1] * 20))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.num_tokens.tolist() == [4, 4], "a third prompt would be a third partial prefill"
    scheduler.apply(answer(plan))
    while scheduler.num_running < 3:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(answer(plan))
        order = scheduler.table.order
        partial = int((scheduler.table.known[order] - scheduler.table.computed[order] > 1).sum())
        assert partial <= 2
