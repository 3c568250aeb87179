"""Planning for a worker with pipeline stages: those that decode take turns in the steps that are computed at once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.core.support import Bench, Client, answer, apply, make_limits, make_request, next_plan
from tests.unit.core.test_scheduler_properties import small_limits


def decoding(bench: Bench) -> list[Client]:
    """Those that have computed all but their last token, which may still be in flight."""
    twins = [client.twin for client in bench.clients if client.twin in bench.reference.running]
    found = [twin for twin in twins if twin.known + twin.placeholders < twin.limit]
    found = [twin for twin in found if twin.known + twin.placeholders - twin.computed == 1]
    return [bench.clients[twin.handle] for twin in found]


def plan_and_check(bench: Bench, stages: int) -> bool:
    """Plans a step and holds it to the rules; the bench holds it to everything else."""
    before = decoding(bench)
    planned = bench.plan()
    if not planned:
        assert bench.sent or not (bench.reference.running or bench.reference.waiting), "nothing would go on"
        return False
    flight = list(bench.sent)
    drawing = [
        {id(client) for client, samples in zip(sent.clients, sent.plan.samples, strict=True) if samples}
        for sent in flight
    ]
    mine = {id(client) for client in flight[-1].clients}
    for earlier in drawing[-stages:-1]:
        assert not mine & earlier, "a request in two of the steps that are computed at once"
    again = [client for client in before if id(client) in mine and client.twin.in_flight]
    assert len(again) <= -(-len(before) // stages)
    return True


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**64 - 1), st.integers(2, 4))
def test_any_arrivals_are_divided_and_everybody_finishes(seed: int, stages: int) -> None:
    draw = random.Random(seed)
    limits = replace(small_limits(draw), stages=stages)
    bench = Bench(limits, policy=draw.choice(["priority", "fcfs", "fair"]))
    depth = stages + draw.choice([1, 1, 2])
    to_come = draw.randint(1, 12)
    while to_come or bench.sent:
        if to_come and (draw.random() < 0.3 or not bench.sent):
            to_come -= 1
            prompt = [draw.randrange(11) for _ in range(draw.randint(1, min(9, limits.max_model_len - 1)))]
            longest = limits.max_model_len - len(prompt)
            bench.submit(make_request(len(bench.clients), prompt, max_tokens=draw.randint(1, longest)))
        if draw.random() < 0.6:
            while len(bench.sent) < depth and plan_and_check(bench, stages):
                pass
        elif bench.sent:
            bench.deliver()
    bench.drain(depth)


@pytest.mark.parametrize(("stages", "requests"), [(2, 8), (2, 7), (3, 7), (4, 8), (4, 3)])
def test_in_the_long_run_everybody_draws_once_in_as_many_steps_as_there_are_stages(stages: int, requests: int) -> None:
    bench = Bench(make_limits(max_slots=8, num_blocks=128, stages=stages))
    for handle in range(requests):
        bench.submit(make_request(handle, [1, 2, handle], max_tokens=40))
    steps: list[set[int]] = []
    while len(steps) < 12 * stages:
        while len(bench.sent) <= stages and plan_and_check(bench, stages):
            steps.append({client.request.handle for client in bench.sent[-1].clients})
        bench.deliver()
    steady = steps[2 * stages :]
    most = -(-requests // stages)
    busy = min(requests, stages)
    for first in range(0, len(steady) - stages, 1):
        window = steady[first : first + busy]
        assert max(map(len, window)) <= most
        assert sum(map(len, window)) == len(set().union(*window)) == requests
    bench.drain(stages + 1)


def test_one_alone_is_planned_when_its_token_is_there() -> None:
    bench = Bench(make_limits(stages=2))
    bench.submit(make_request(0, [1, 2, 3], max_tokens=3))
    for _ in range(3):
        assert bench.plan()
        assert not bench.plan(), "it cannot be computed twice at once"
        bench.deliver()
    assert not bench.clients[0].open


def test_the_longest_waiting_come_first() -> None:
    bench = Bench(make_limits(max_slots=8, stages=2))
    scheduler = bench.scheduler
    requests = [make_request(handle, [1, 2, handle], max_tokens=9) for handle in range(5)]
    for request in requests:
        scheduler.submit(request)
    prefill = next_plan(scheduler)
    assert scheduler.plan() is None
    apply(scheduler, answer(prefill))
    first, second = next_plan(scheduler), next_plan(scheduler)
    assert [len(plan.slots) for plan in (first, second)] == [3, 2]
    third = next_plan(scheduler)
    assert third.slots.tolist() == first.slots.tolist()
    apply(scheduler, answer(first))
    apply(scheduler, answer(second))
    # All could draw now but those of the third, and the second ones have waited longest.
    fourth = next_plan(scheduler)
    assert fourth.slots.tolist() == second.slots.tolist()


def test_chunks_follow_one_another_beside_those_that_decode() -> None:
    bench = Bench(make_limits(max_batched_tokens=8, max_model_len=64, num_blocks=64, stages=3))
    bench.submit(make_request(0, [1, 2, 3], max_tokens=9))
    bench.turn(1)
    bench.submit(make_request(1, [4] * 30, max_tokens=2))
    assert [bench.plan() for _ in range(4)] == [True] * 4
    rows = [
        dict(zip([c.request.handle for c in s.clients], s.plan.num_tokens.tolist(), strict=True)) for s in bench.sent
    ]
    assert rows == [{0: 1, 1: 7}, {1: 8}, {1: 8}, {0: 1, 1: 7}]
    bench.drain(4)


def test_without_stages_a_request_is_in_every_step() -> None:
    bench = Bench(make_limits())
    bench.submit(make_request(0, [1, 2, 3], max_tokens=5))
    assert [bench.plan() for _ in range(4)] == [True] * 4
    bench.drain(4)


def test_who_ends_while_it_was_set_aside_does_not_come_back() -> None:
    bench = Bench(make_limits(num_blocks=8, max_slots=4))
    for handle in range(3):
        bench.submit(make_request(handle, [handle + 1] * 9, max_tokens=12))
    while not bench.reference.preemptions:
        assert bench.plan()
    preempted = next(client for client in bench.clients if client.twin in bench.reference.waiting)
    assert preempted.twin.in_flight
    bench.set_aside()
    sent = bench.sent[0]
    bench.deliver(not_finite=[sent.clients.index(preempted)])
    assert not preempted.open
    assert bench.scheduler.num_waiting == len(bench.reference.aside)
    bench.drain()
