"""Measures what telemetry costs at full load: nothing, metrics alone, and tracing at a few ratios.

    python -m tests.bench.tracing --core [--running 1024] [--steps 2000] [--rounds 5]
    python -m tests.bench.tracing --frontend MODEL [--streams 256] [--rounds 3]

The core: its scheduler and its observer in one process, requests that begin and end in every step, and a collector that
takes all spans; figures are processor time of the process per step, without the thread that delivers and with it. The
front end: the processes of ``tests/bench/frontend.py``; figures are its processor time per output token. In every round
all modes take their turns, so that a drift of the machine's speed cancels; ``cost`` is the median over the rounds of a
mode's time by that of ``off`` in the same round, less one. One JSON object per mode.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tercet_core.metrics import CoreMetrics
from tercet_core.observer import Observer
from tercet_core.scheduling.request import FrontEnd, Request
from tercet_core.scheduling.scheduler import Scheduler
from tercet_core.scheduling.state import Limits
from tercet_core.tracing import RequestTraces
from tercet_shared.config import CoreSettings, parse
from tercet_shared.hashing import root_key
from tercet_shared.sampling_params import SamplingParams
from tercet_shared.telemetry.telemetry import Telemetry
from tercet_shared.wire.frames import encode_plan
from tercet_shared.wire.step import StepPlan, StepResult
from tests.bench import frontend
from tests.fakes.otlp import Collector

DEPTH = 2
VOCAB = 50_000


@dataclass(frozen=True)
class Mode:
    """One way to run.

    Attributes:
        name: of it.
        ratio: of requests that are traced; None: there is no collector.
        metrics: whether there is a metrics port.
    """

    name: str
    ratio: float | None = None
    metrics: bool = False

    def flags(self, collector: Collector) -> list[str]:
        """Returns what a service is told."""
        flags = ["--metrics-port=0"] if self.metrics else []
        if self.ratio is not None:
            flags += [f"--otlp-endpoint={collector.endpoint}", f"--trace-ratio={self.ratio}"]
        return flags


MODES = (Mode("off"), Mode("metrics", None, True), Mode("1 %", 0.01, True), Mode("100 %", 1.0, True))


@dataclass
class Costs:
    """Seconds by mode, one for each round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, mode: Mode, seconds: float) -> None:
        self.seconds.setdefault(mode.name, []).append(seconds)

    def lines(self, unit: str) -> list[dict[str, Any]]:
        base = self.seconds[MODES[0].name]
        return [
            {
                "telemetry": name,
                unit: round(statistics.median(values) * 1e6, 2),
                "cost": round(statistics.median(v / b for v, b in zip(values, base, strict=True)) - 1, 4),
                "rounds": [round(v * 1e6, 2) for v in values],
            }
            for name, values in self.seconds.items()
        ]


# ------------------------------------------------------------------------------------------------------------ the core


class CoreLoad:
    """A scheduler with as many running requests as there is room for, each of them short; the worker is a rule."""

    def __init__(self, running: int, share: float, observer: Observer) -> None:
        self.scheduler = Scheduler(
            Limits(
                max_slots=running,
                num_blocks=running * 16,
                max_model_len=256,
                max_batched_tokens=16_384,
                vocab_size=VOCAB,
            )
        )
        self._observer = observer
        self._share = share
        self._running = running
        self._draw = np.random.default_rng(0)
        self._flight: deque[tuple[StepPlan, float]] = deque()
        self._handle = 0

    def step(self) -> None:
        """Does what the engine does for one step, requests that arrive included."""
        if len(self._flight) == DEPTH:
            plan, at = self._flight.popleft()
            result = self._result(plan)
            begin = time.perf_counter()
            outputs = self.scheduler.apply(result)
            for output in outputs:
                self._observer.published(output, self.scheduler)
            self._observer.applied(result, begin - at, time.perf_counter() - begin)
        while self.scheduler.num_running + self.scheduler.num_waiting < self._running:
            self._submit()
        begin = time.perf_counter()
        next_plan = self.scheduler.plan()
        assert next_plan is not None
        now = time.perf_counter()
        self._observer.planned(next_plan, self.scheduler, now - begin)
        encode_plan(next_plan)
        self._flight.append((next_plan, now))

    def _submit(self) -> None:
        self._handle += 1
        traced = self._share and self._handle % round(1 / self._share) == 0
        request = Request(
            front_end=FrontEnd(0),
            handle=self._handle,
            attempt=0,
            request_id=str(self._handle),
            prompt_len=32,
            tokens=self._draw.integers(3, VOCAB, 32, dtype=np.int32),
            params=SamplingParams(max_tokens=32 + self._handle % 64),
            root=root_key("bench"),
            traceparent=f"00-{self._handle:032x}-{self._handle:016x}-01" if traced else "",
        )
        self.scheduler.submit(request)
        self._observer.arrived(request)

    def _result(self, plan: StepPlan) -> StepResult:
        offsets = np.zeros(len(plan.slots) + 1, np.int32)
        np.cumsum(plan.samples, out=offsets[1:])
        return StepResult(plan.step_id, offsets, self._draw.integers(3, VOCAB, int(offsets[-1]), dtype=np.int32))


class _Source:
    def __init__(self) -> None:
        self.scheduler: Scheduler | None = None

    def current_scheduler(self) -> Scheduler | None:
        return self.scheduler

    def outbox_rows(self) -> int:
        return 0

    def num_front_ends(self) -> int:
        return 1

    def has_worker(self) -> bool:
        return True


async def core_round(mode: Mode, options: argparse.Namespace, collector: Collector) -> tuple[float, float]:
    """Returns processor seconds per step: of the thread that steps, and of all threads."""
    settings = parse(CoreSettings, mode.flags(collector))
    async with Telemetry("bench", settings) as telemetry:
        source = _Source()
        observer = Observer()
        if telemetry.wanted:
            observer = Observer(CoreMetrics(telemetry.meter, source), RequestTraces(telemetry.tracing, "bench"))
        load = CoreLoad(options.running, mode.ratio or 0.0, observer)
        source.scheduler = load.scheduler
        for _ in range(200):
            load.step()
        own, every = time.thread_time(), time.process_time()
        for _ in range(options.steps):
            load.step()
        spent = time.thread_time() - own, time.process_time() - every
        observer.close()
    return spent[0] / options.steps, spent[1] / options.steps


async def measure_core(options: argparse.Namespace) -> None:
    """Prints the figures of the core."""
    own, every = Costs(), Costs()
    with Collector() as collector:
        for _ in range(options.rounds):
            for mode in MODES:
                seconds = await core_round(mode, options, collector)
                own.add(mode, seconds[0])
                every.add(mode, seconds[1])
                collector.spans.clear()
    for line, whole in zip(own.lines("us_per_step"), every.lines("us_per_step"), strict=True):
        print(json.dumps({"service": "core", **line, "cost_with_delivery": whole["cost"]}), flush=True)


# ------------------------------------------------------------------------------------------------------- the front end


async def frontend_round(mode: Mode, options: argparse.Namespace, collector: Collector) -> float:
    """Returns processor seconds of the front end per output token."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as directory:
        address = f"unix:{directory}/core.sock"
        async with (
            frontend.core(options.frontend, address, 0.0, options.streams) as fed,
            frontend.front_end(options.frontend, address, None, *mode.flags(collector)) as (front, url),
        ):
            await frontend._line(fed, b"connected")
            await frontend.ready(url)
            await frontend.load(url, options.streams, options.streams, options)  # what is first is slow
            before = frontend.cpu_seconds(front.pid)
            figures = await frontend.load(url, options.streams, options.requests * options.streams, options)
            return float((frontend.cpu_seconds(front.pid) - before) / figures["output_tokens"])


async def measure_frontend(options: argparse.Namespace) -> None:
    """Prints the figures of the front end."""
    costs = Costs()
    with Collector() as collector:
        for _ in range(options.rounds):
            for mode in MODES:
                costs.add(mode, await frontend_round(mode, options, collector))
                collector.spans.clear()
    for line in costs.lines("us_per_token"):
        print(json.dumps({"service": "front end", **line}), flush=True)


def options_of(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--core", action="store_true", help="measure the core")
    which.add_argument("--frontend", metavar="MODEL", help="measure the front end, with the tokenizer of this model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--running", type=int, default=1024, help="core: requests that run")
    parser.add_argument("--steps", type=int, default=2000, help="core: steps per round and mode")
    parser.add_argument("--streams", type=int, default=256, help="front end: concurrent streams")
    parser.add_argument("--requests", type=int, default=4, help="front end: requests per stream")
    parser.add_argument("--tokens", type=int, default=64, help="front end: tokens of each answer")
    parser.add_argument("--input-tokens", type=int, default=32, help="front end: tokens of each prompt")
    parser.add_argument("--endpoint", choices=["completions", "chat"], default="chat")
    parser.add_argument("--verbose", action="store_true", help="front end: show what the load generator says")
    return parser.parse_args(argv)


def main() -> None:
    """Measures what the command line asks for."""
    options = options_of()
    asyncio.run(measure_core(options) if options.core else measure_frontend(options))


if __name__ == "__main__":
    main()
