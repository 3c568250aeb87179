"""The waiting queue's policies."""

from __future__ import annotations

import pytest

from tercet_core.scheduling.ordered_queue import OrderedQueue
from tercet_core.scheduling.queue import make_queue
from tercet_core.scheduling.request import Request
from tercet_shared.errors import ConfigurationError
from tests.unit.core.support import make_request


def _request(arrival: int, priority: int = 0) -> Request:
    request = make_request(arrival, priority=priority)
    request.arrival = arrival
    return request


@pytest.mark.parametrize(("policy", "order"), [("priority", [2, 0, 3, 1]), ("fcfs", [0, 1, 2, 3])])
def test_who_is_next(policy: str, order: list[int]) -> None:
    queue = make_queue(policy, 8)
    for arrival, priority in enumerate([1, 5, 0, 1]):
        queue.push(_request(arrival, priority))
    assert len(queue) == 4
    served = []
    while (request := queue.peek()) is not None:
        assert queue.pop() is request
        served.append(request.arrival)
    assert served == order
    with pytest.raises(IndexError):
        queue.pop()


def test_a_preempted_request_takes_the_place_of_its_arrival() -> None:
    queue = make_queue("priority", 8)
    early = _request(0)
    queue.push(early)
    queue.pop()
    queue.push(_request(1))
    queue.push(early)
    assert queue.pop() is early


def test_a_discarded_request_is_gone_and_may_come_again() -> None:
    queue = make_queue("priority", 8)
    one, two = _request(0), _request(1)
    queue.push(one)
    queue.push(two)
    assert queue.discard(one)
    assert not queue.discard(one)
    assert (len(queue), list(queue), queue.peek()) == (1, [two], two)
    queue.push(one)
    assert [queue.pop(), queue.pop()] == [one, two]
    assert queue.peek() is None


def test_discarded_requests_do_not_pile_up_behind_a_head_that_stays() -> None:
    queue = OrderedQueue(lambda request: (request.arrival,))
    queue.push(_request(0))
    for arrival in range(1, 2000):
        request = _request(arrival)
        queue.push(request)
        queue.discard(request)
    assert len(queue._heap) < 100
    last = _request(5000)
    queue.push(last)
    assert (queue.pop().arrival, queue.pop()) == (0, last)


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigurationError, match="'lottery'; there are priority, fcfs"):
        make_queue("lottery", 8)
