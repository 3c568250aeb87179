"""Places, and when there will be one."""

from __future__ import annotations

import pytest

from tercet_frontend.access.occupancy import Occupancy
from tercet_shared.errors import OverloadedError
from tests.unit.frontend.access.conftest import Clock


def test_requests_in_progress(clock: Clock) -> None:
    occupancy = Occupancy(max_requests=2, clock=clock)
    places = [occupancy.enter(), occupancy.enter()]
    places[0].began()
    with pytest.raises(OverloadedError, match="2 requests are in progress"):
        occupancy.enter()
    assert (occupancy.running, occupancy.waiting, occupancy.refused) == (2, 1, 1)
    places[0].leave()
    occupancy.enter().leave()
    places[1].leave()
    assert (occupancy.running, occupancy.waiting) == (0, 0)


def test_requests_that_wait(clock: Clock) -> None:
    occupancy = Occupancy(max_waiting=2, clock=clock)
    first, second = occupancy.enter(), occupancy.enter()
    with pytest.raises(OverloadedError, match="2 requests wait"):
        occupancy.enter()
    first.began()
    first.began()
    occupancy.enter()
    with pytest.raises(OverloadedError):
        occupancy.enter()
    second.leave()
    occupancy.enter()
    assert (occupancy.running, occupancy.waiting) == (3, 2)


def test_no_limits() -> None:
    occupancy = Occupancy()
    for _ in range(10_000):
        occupancy.enter()
    assert occupancy.waiting == 10_000


def test_the_wait_follows_the_rate_at_which_requests_leave(clock: Clock) -> None:
    occupancy = Occupancy(clock=clock)
    places = [occupancy.enter() for _ in range(120)]
    assert occupancy.retry_after() == 60  # nothing has left yet
    for _ in range(10):  # 2 per second for 10 seconds
        clock.now += 1
        for _ in range(2):
            places[-1].began()
            places.pop().leave()
    assert occupancy.retry_after() == pytest.approx(100 / 2)
    for place in places:
        place.began()
    assert occupancy.retry_after() == 1  # nobody waits
    places += [occupancy.enter() for _ in range(60)]
    clock.now += 20  # the same number in three times as long
    assert occupancy.retry_after() == 60
    clock.now += 31  # long ago
    assert occupancy.retry_after() == 60


def test_an_idle_spell_does_not_count(clock: Clock) -> None:
    occupancy = Occupancy(clock=clock)
    occupancy.enter().leave()
    clock.now += 10_000
    places = [occupancy.enter() for _ in range(20)]
    clock.now += 1
    for place in places[:10]:
        place.began()
        place.leave()
    assert occupancy.retry_after() == pytest.approx(1)


def test_requests_that_were_refused_say_nothing_about_the_rate(clock: Clock) -> None:
    occupancy = Occupancy(clock=clock)
    for _ in range(10):
        occupancy.enter()
    clock.now += 1
    for _ in range(1_000):
        occupancy.enter().leave()
    assert occupancy.retry_after() == 60
