"""From the samples of a run to figures: latencies in milliseconds, throughput per second."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tercet_tools.bench.answers import Sample
    from tercet_tools.bench.load import Run
    from tercet_tools.bench.settings import Milliseconds

LATENCIES: Final = ("ttft", "tpot", "itl", "e2e")
RATES: Final = ("requests_per_s", "output_tokens_per_s", "input_tokens_per_s")
QUANTILES: Final = {"p50": 50, "p90": 90, "p99": 99}

BUSY: Final = 0.8
"""Share of one processor from which the load generator itself may be what limits the figures."""
LATE_MS: Final = 10.0
"""Lateness of requests, at p99, from which the load generator did not keep up with the rate."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and quantiles of a latency in milliseconds; NaN where there was nothing to measure."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of_seconds(cls, values: Sequence[float]) -> Distribution:
        """Returns the distribution of ``values``, with linear interpolation between them."""
        if not values:
            return cls(*[math.nan] * 4)
        data = np.asarray(values, dtype=np.float64) * 1e3
        return cls(float(data.mean()), *(float(value) for value in np.percentile(data, list(QUANTILES.values()))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one load on one server gave, over one round or several.

    Attributes:
        latencies: by name: time to first token, time per output token after it, between events with content, end to
            end.
        completed: requests that got their whole answers.
        failed: those that did not, by kind.
        messages: a sentence for each kind.
        unfinished: those that were running when the run was interrupted.
        seconds: how long the rounds took together.
        input_tokens: of the completed requests.
        output_tokens: of the completed requests.
        cached_tokens: prompt tokens that came from a prefix cache.
        short: answers with fewer tokens than asked for.
        uncounted: answers without usage, whose tokens are events.
        events_per_token: 1 where every token comes by itself.
        good: completed requests within the limits of ``--goodput``; None where there are none.
        client_cpu_us_per_token: what the load generator itself spent.
        client_busy: share of one processor that it used.
        lateness_p99_ms: open loop: by how much requests were sent late.
    """

    latencies: dict[str, Distribution]
    completed: int
    failed: dict[str, int]
    messages: dict[str, str]
    unfinished: int
    seconds: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    short: int
    uncounted: int
    events_per_token: float
    good: int | None
    client_cpu_us_per_token: float
    client_busy: float
    lateness_p99_ms: float

    @classmethod
    def of(cls, runs: Sequence[Run], limits: Mapping[str, Milliseconds]) -> Figures:
        """Returns the figures of the rounds together."""
        samples = [sample for run in runs for sample in run.samples]
        failed: Counter[str] = sum((run.failures for run in runs), Counter())
        seconds = sum(run.elapsed for run in runs)
        cpu = sum(run.cpu for run in runs)
        output = sum(sample.output_tokens for sample in samples)
        late = [value for run in runs for value in run.lateness]
        return cls(
            latencies={
                "ttft": Distribution.of_seconds([sample.first for sample in samples]),
                "tpot": Distribution.of_seconds([value for sample in samples if (value := sample.tpot) is not None]),
                "itl": Distribution.of_seconds([gap for sample in samples for gap in sample.gaps]),
                "e2e": Distribution.of_seconds([sample.total for sample in samples]),
            },
            completed=len(samples),
            failed=dict(failed.most_common()),
            messages={kind: text for run in reversed(runs) for kind, text in run.messages.items()},
            unfinished=sum(run.begun - run.ended for run in runs),
            seconds=seconds,
            input_tokens=sum(sample.input_tokens or 0 for sample in samples),
            output_tokens=output,
            cached_tokens=sum(sample.cached_tokens for sample in samples),
            short=sum(sample.counted and sample.output_tokens < sample.wanted for sample in samples),
            uncounted=sum(not sample.counted for sample in samples),
            events_per_token=sum(sample.events for sample in samples) / output if output else math.nan,
            good=sum(_within(sample, limits) for sample in samples) if limits else None,
            client_cpu_us_per_token=cpu / output * 1e6 if output else math.nan,
            client_busy=cpu / seconds if seconds else 0.0,
            lateness_p99_ms=Distribution.of_seconds(late).p99 if late else 0.0,
        )

    @property
    def requests_per_s(self) -> float:
        """Completed requests per second."""
        return self.completed / self.seconds if self.seconds else math.nan

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds if self.seconds else math.nan

    @property
    def input_tokens_per_s(self) -> float:
        """Prompt tokens per second, cached ones included."""
        return self.input_tokens / self.seconds if self.seconds else math.nan

    @property
    def good_per_s(self) -> float | None:
        """Requests per second within the limits (goodput)."""
        return None if self.good is None or not self.seconds else self.good / self.seconds

    def flat(self) -> dict[str, float]:
        """Returns what is compared between servers, by name; ``ttft_p50_ms`` and so on."""
        values = {
            f"{name}_{part}_ms": float(getattr(distribution, part))
            for name, distribution in self.latencies.items()
            for part in ("mean", *QUANTILES)
        }
        values |= {name: float(getattr(self, name)) for name in RATES}
        if self.good_per_s is not None:
            values["good_requests_per_s"] = self.good_per_s
        return values

    def warnings(self) -> list[str]:
        """Returns what a reader of the figures must know, a sentence each."""
        found = [f"{count} requests failed ({kind}): {self._message(kind)}" for kind, count in self.failed.items()]
        if self.client_busy > BUSY and self.completed:
            found.append(
                f"The load generator itself used {self.client_busy:.0%} of one processor: latencies and throughput "
                "may be limited by it. Run several of them, each with a part of the load."
            )
        if self.lateness_p99_ms > LATE_MS:
            found.append(
                f"Requests were sent up to {self.lateness_p99_ms:.0f} ms (p99) after they were due; that is part of "
                "their latencies, and the fault of the load generator or of the machine it runs on."
            )
        if self.short:
            found.append(
                f"{self.short} answers had fewer tokens than asked for: the server does not go on after the end."
            )
        if self.uncounted:
            found.append(f"{self.uncounted} answers came without usage: events with content were counted as tokens.")
        return found

    def _message(self, kind: str) -> str:
        return self.messages[kind].removeprefix(f"{kind}: ")

    def as_json(self) -> dict[str, Any]:
        """Returns everything as JSON values."""
        values: dict[str, Any] = {
            "completed": self.completed,
            "failed": sum(self.failed.values()),
            "errors": {kind: {"count": n, "message": self.messages[kind]} for kind, n in self.failed.items()},
            "unfinished": self.unfinished,
            "seconds": self.seconds,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "short_answers": self.short,
            "answers_without_usage": self.uncounted,
            "events_per_token": self.events_per_token,
            "good_requests": self.good,
            "client_cpu_us_per_token": self.client_cpu_us_per_token,
            "client_busy": self.client_busy,
            "lateness_p99_ms": self.lateness_p99_ms,
            **self.flat(),
        }
        return {name: rounded(value) for name, value in values.items()}


def ratios(base: Sequence[Figures], other: Sequence[Figures]) -> dict[str, float]:
    """Returns ``base`` divided by ``other``: of each figure the median over rounds, so that a drift cancels."""
    rounds = [(a.flat(), b.flat()) for a, b in zip(base, other, strict=False)]
    found = {}
    for name in rounds[0][0] if rounds else ():
        values = [a[name] / b[name] for a, b in rounds if b[name] and not math.isnan(a[name] / b[name])]
        if values:
            found[name] = statistics.median(values)
    return found


def rounded(value: Any) -> Any:
    """Returns a value for JSON: four digits after the point, and null for what was not measured."""
    if not isinstance(value, float):
        return value
    return round(value, 4) if math.isfinite(value) else None


def _within(sample: Sample, limits: Mapping[str, Milliseconds]) -> bool:
    seconds = {"ttft": sample.first, "tpot": sample.tpot or 0.0, "e2e": sample.total}
    return all(seconds[name] * 1e3 <= limit for name, limit in limits.items())
