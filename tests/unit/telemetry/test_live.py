"""The last minute, as a page shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_frontend.access.occupancy import Occupancy
from tercet_frontend.cores.frames import CoreStats
from tercet_frontend.cores.stream import CoreState
from tercet_frontend.telemetry.live import RATE_S, LiveStats
from tercet_frontend.telemetry.percentiles import WINDOW_S, Percentiles, RecentValues


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@settings(max_examples=50)
@given(st.lists(st.floats(1e-4, 100), min_size=1, max_size=200))
def test_percentiles_are_right_to_within_5_percent(values: list[float]) -> None:
    recent = RecentValues(Clock())
    for value in values:
        recent.record(value)
    ranked = sorted(values)
    found = recent.percentiles()
    assert found.count == len(values)
    for share, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        exact = ranked[max(-int(-len(ranked) * share // 1), 1) - 1]
        assert value == pytest.approx(exact, rel=0.05)


def test_a_minute_later_they_are_forgotten() -> None:
    clock = Clock()
    recent = RecentValues(clock)
    recent.record(1.0)
    clock.now += WINDOW_S - 2
    recent.record(3.0)
    assert recent.percentiles().count == 2
    clock.now += 2
    assert recent.percentiles().count == 1
    assert recent.percentiles().p50 == pytest.approx(3.0, rel=0.05)
    clock.now += WINDOW_S
    assert recent.percentiles() == Percentiles(0, 0, 0, 0)


def test_what_is_out_of_range_is_in_the_outermost_bucket() -> None:
    recent = RecentValues(Clock())
    recent.record(0.0)
    recent.record(1e9)
    assert recent.percentiles().count == 2


def core(name: str, **stats: Any) -> Any:
    return SimpleNamespace(
        core_id=name,
        address=f"{name}:1",
        info=SimpleNamespace(model_name="m"),
        state=CoreState.READY,
        active=2,
        stats=CoreStats(num_blocks=100, **stats),
    )


def test_rates_are_between_snapshots() -> None:
    clock = Clock()
    occupancy = Occupancy()
    live = LiveStats(occupancy, clock)
    pool: Any = SimpleNamespace(streams=[core("a", output_tokens=100, prompt_tokens=10, free_blocks=75)])
    first = live.snapshot()
    assert (first.cores, first.output_tokens_per_s) == ((), 0)
    live.watch(pool)
    assert live.snapshot().output_tokens_per_s == 0, "nothing is known of before"
    clock.now += RATE_S
    assert live.snapshot().output_tokens_per_s == 0
    clock.now += RATE_S
    place = occupancy.enter()
    live.ended(failed=False)
    live.ended(failed=True)
    pool.streams[0] = core("a", output_tokens=600, prompt_tokens=30, free_blocks=75, running=3, cached_tokens=15)
    now = live.snapshot()
    assert (now.running, now.waiting) == (0, 1)
    assert now.requests_per_s == pytest.approx(2 / RATE_S)
    assert now.failed_per_s == pytest.approx(1 / RATE_S)
    (one,) = now.cores
    assert one.output_tokens_per_s == now.output_tokens_per_s == pytest.approx(500 / RATE_S)
    assert one.input_tokens_per_s == pytest.approx(20 / RATE_S)
    assert (one.kv_used, one.cached, one.running, one.own, one.state) == (0.25, 0.5, 3, 2, "ready")
    place.leave()


def test_a_core_that_starts_again_has_no_negative_rate() -> None:
    clock = Clock()
    live = LiveStats(Occupancy(), clock)
    pool: Any = SimpleNamespace(streams=[core("a", output_tokens=100)])
    live.watch(pool)
    live.snapshot()
    clock.now += RATE_S
    pool.streams[0] = core("a", output_tokens=5)
    assert live.snapshot().output_tokens_per_s == 0


def test_many_looks_take_no_more_memory_and_rates_stay_recent() -> None:
    clock = Clock()
    live = LiveStats(Occupancy(), clock)
    for _ in range(5_000):
        clock.now += 0.1
        live.ended(failed=False)
        live.snapshot()
    assert len(live._history) <= 2 * WINDOW_S
    assert live.snapshot().requests_per_s == pytest.approx(10, rel=0.15)
