"""The simulation of ``make bench-routing``, small: what the policies are for shows in its figures."""

from __future__ import annotations

import pytest

from tests.bench.routing import simulate
from tests.bench.routing_fleet import Shape
from tests.bench.routing_trace import make_trace

SHAPE = Shape(cores=40, changes=1)
TIMES = ("decision_us", "decision_p50_us", "decision_p99_us", "calibration_us", "calibrations")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    trace = make_trace(600, 32.0, seed=3)
    return {name: simulate(name, SHAPE, trace) for name in ("prefix", "session", "least_loaded", "round_robin")}


def test_every_request_ends_while_cores_come_go_lie_and_vanish(found: dict[str, dict[str, float]]) -> None:
    assert {name: figures["finished"] for name, figures in found.items()} == dict.fromkeys(found, 600)


def test_prefix_finds_what_is_cached_and_pays_with_little_balance(found: dict[str, dict[str, float]]) -> None:
    prefix, blind = found["prefix"], found["round_robin"]
    assert prefix["hit_rate"] > 2.0 * blind["hit_rate"]
    assert prefix["hit_rate"] > found["session"]["hit_rate"]
    assert prefix["p99_load"] < 3.0 * blind["p99_load"], "of cores with one request on average"
    for other in ("session", "least_loaded", "round_robin"):
        assert prefix["ttft_mean_ms"] < found[other]["ttft_mean_ms"]
        assert prefix["answer_mean_ms"] < found[other]["answer_mean_ms"]


def test_a_seed_gives_the_same_run(found: dict[str, dict[str, float]]) -> None:
    again = simulate("prefix", SHAPE, make_trace(600, 32.0, seed=3))
    for name in TIMES:
        again.pop(name)
    assert again == {name: value for name, value in found["prefix"].items() if name not in TIMES}
