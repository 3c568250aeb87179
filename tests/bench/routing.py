"""Compares the routing policies on a fleet in model time: python -m tests.bench.routing [--cores 1000] [--requests N]

The real router, policies and prefix index choose among a thousand modelled cores (``routing_fleet.py``) for a trace
with shared prefixes (``routing_trace.py``), while cores join, leave, restart, lie and vanish. One row per policy:

    hit rate      prompt tokens that came from a core's cache, of all
    max, p99      load of the fullest core, and of the 99th percentile, by the mean of all cores; mean over the run
    TTFT          modelled time to the first token, in milliseconds
    answer        modelled time to the last token, mean, in milliseconds
    on liars      share of the requests that went to cores that lie about their load (1 % do, and are slower)
    decision      processor time of one choice, in microseconds, hashing the prompt included
    calibration   the same for hashing a prompt of 2,000 tokens, in the same run; on a busy machine both grow

The last line is a JSON object with the same figures. Times of decisions are those of this machine; everything else is
the same in every run with the same seed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from typing import TYPE_CHECKING

from tercet_frontend.routing import policy_names, routing_policy
from tercet_frontend.routing.prefix import Prefix
from tests.bench.routing_fleet import Shape, SimFleet
from tests.bench.routing_trace import make_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_frontend.routing import RoutingPolicy
    from tests.bench.routing_trace import Asked

COLUMNS = (
    ("hit_rate", "hit rate", "{:.3f}"),
    ("max_load", "max/mean", "{:.2f}"),
    ("p99_load", "p99/mean", "{:.2f}"),
    ("ttft_mean_ms", "TTFT mean", "{:.0f}"),
    ("ttft_p50_ms", "p50", "{:.0f}"),
    ("ttft_p99_ms", "p99", "{:.0f}"),
    ("answer_mean_ms", "answer", "{:.0f}"),
    ("on_liars", "on liars", "{:.4f}"),
    ("migrated", "migrated", "{}"),
    ("decision_us", "decision", "{:.0f}"),
    ("decision_p50_us", "p50", "{:.0f}"),
    ("decision_p99_us", "p99", "{:.0f}"),
    ("calibration_us", "calibration", "{:.0f}"),
)


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value below which ``share`` of ``values`` lie."""
    return sorted(values)[int(share * (len(values) - 1))]


def simulate(name: str, shape: Shape, trace: Sequence[Asked], seed: int = 0) -> dict[str, float]:
    """Returns what a policy makes of a trace."""

    def policy(number: int) -> RoutingPolicy:
        return Prefix(random.Random(seed + number)) if name == "prefix" else routing_policy(name)

    figures = SimFleet(shape, policy, seed).run(trace)
    return {
        "finished": figures.finished,
        "migrated": figures.migrated,
        "on_liars": figures.on_liars / len(figures.decisions),
        "hit_rate": figures.cached_tokens / figures.prompt_tokens,
        "max_load": statistics.fmean(figures.max_load),
        "p99_load": statistics.fmean(figures.p99_load),
        "ttft_mean_ms": statistics.fmean(figures.ttft),
        "ttft_p50_ms": percentile(figures.ttft, 0.5),
        "ttft_p99_ms": percentile(figures.ttft, 0.99),
        "answer_mean_ms": statistics.fmean(figures.answer),
        "decision_us": statistics.fmean(figures.decisions),
        "decision_p50_us": percentile(figures.decisions, 0.5),
        "decision_p99_us": percentile(figures.decisions, 0.99),
        "calibration_us": statistics.fmean(figures.calibrations),
        "calibrations": statistics.fmean(figures.decisions) / statistics.fmean(figures.calibrations),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=1_000)
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--rate", type=float, default=0.8, help="requests per second and core")
    parser.add_argument("--front-ends", type=int, default=2)
    parser.add_argument("--changes", type=int, default=10, help="cores that do each of the things that cores do")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", action="append", choices=policy_names(), help="only this one (may be repeated)")
    options = parser.parse_args()

    shape = Shape(cores=options.cores, front_ends=options.front_ends, changes=options.changes)
    trace = make_trace(options.requests, options.rate * options.cores, options.seed)
    print("".join(f"{title:>12}" for title in ("policy", *(title for _, title, _ in COLUMNS))), flush=True)
    results: dict[str, dict[str, float]] = {}
    for name in options.policy or ("prefix", "session", "least_loaded", "round_robin"):
        found = results[name] = simulate(name, shape, trace, options.seed)
        cells = (form.format(found[column]) for column, _, form in COLUMNS)
        print("".join(f"{cell:>12}" for cell in (name, *cells)), flush=True)
    print(json.dumps({"cores": options.cores, "requests": options.requests, "policies": results}))


if __name__ == "__main__":
    main()
