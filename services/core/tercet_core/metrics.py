"""The core's numbers as OpenTelemetry instruments, under ``tercet.*``.

Gauges and counters are read from the scheduler when somebody asks; only the step's times are recorded in the loop. The
reader may be another thread: what it sees are single integers, each right at some moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from opentelemetry.metrics import CallbackOptions, Observation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.metrics import Meter

    from tercet_core.scheduling.scheduler import Scheduler

_PLAN, _WAIT, _APPLY = {"part": "plan"}, {"part": "wait"}, {"part": "apply"}


class Source(Protocol):
    """Where the numbers are."""

    def current_scheduler(self) -> Scheduler | None:
        """Returns the scheduler, or None before there is one."""

    def outbox_rows(self) -> int:
        """Returns the rows that wait for front ends."""


class CoreMetrics:
    """All instruments of one core."""

    def __init__(self, meter: Meter, source: Source) -> None:
        self._source = source
        self._duration = meter.create_histogram(
            "tercet.step.duration", unit="s", description="Time of a step: planning, waiting for the worker, applying."
        )
        self._tokens = meter.create_histogram(
            "tercet.step.tokens",
            unit="{token}",
            description="Tokens that a step computes.",
            explicit_bucket_boundaries_advisory=[1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
        )
        gauge, counter = meter.create_observable_up_down_counter, meter.create_observable_counter
        gauge("tercet.requests.running", [self._read(lambda s: s.num_running)], unit="{request}")
        gauge("tercet.requests.waiting", [self._waiting], unit="{request}", description="By reason.")
        gauge("tercet.kv.blocks", [self._blocks], unit="{block}", description="By state; the three sum to the pool.")
        gauge("tercet.outbox.rows", [self._outbox], unit="{row}", description="Rows that wait for front ends.")
        counter("tercet.steps", [self._read(lambda s: s.counters.steps)], unit="{step}")
        counter("tercet.preemptions", [self._read(lambda s: s.counters.preemptions)], unit="{preemption}")
        counter("tercet.tokens.prompt", [self._read(lambda s: s.counters.prompt_tokens)], unit="{token}")
        counter("tercet.tokens.cached", [self._read(lambda s: s.counters.cached_tokens)], unit="{token}")
        counter("tercet.tokens.output", [self._read(lambda s: s.counters.output_tokens)], unit="{token}")
        counter("tercet.tokens.recomputed", [self._read(lambda s: s.counters.recomputed_tokens)], unit="{token}")
        counter("tercet.tokens.discarded", [self._read(lambda s: s.counters.discarded_tokens)], unit="{token}")
        counter("tercet.rows.not_finite", [self._read(lambda s: s.counters.not_finite_rows)], unit="{row}")

    def planned(self, seconds: float, tokens: int) -> None:
        """Records one planned step."""
        self._duration.record(seconds, _PLAN)
        self._tokens.record(tokens)

    def applied(self, waited: float, seconds: float) -> None:
        """Records one applied result: from its plan to its arrival, and its application, in seconds."""
        self._duration.record(waited, _WAIT)
        self._duration.record(seconds, _APPLY)

    def _read(self, value: Callable[[Scheduler], int]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def callback(_: CallbackOptions) -> Iterable[Observation]:
            scheduler = self._source.current_scheduler()
            yield Observation(value(scheduler) if scheduler is not None else 0)

        return callback

    def _waiting(self, _: CallbackOptions) -> Iterable[Observation]:
        scheduler = self._source.current_scheduler()
        preempted = scheduler.num_preempted if scheduler is not None else 0
        waiting = scheduler.num_waiting if scheduler is not None else 0
        yield Observation(max(waiting - preempted, 0), {"reason": "capacity"})
        yield Observation(preempted, {"reason": "preempted"})

    def _blocks(self, _: CallbackOptions) -> Iterable[Observation]:
        scheduler = self._source.current_scheduler()
        cached = scheduler.pool.cached if scheduler is not None else 0
        held = scheduler.pool.referenced if scheduler is not None else 0
        free = scheduler.pool.available - cached if scheduler is not None else 0
        yield Observation(free, {"state": "free"})
        yield Observation(cached, {"state": "cached"})
        yield Observation(held, {"state": "held"})

    def _outbox(self, _: CallbackOptions) -> Iterable[Observation]:
        yield Observation(self._source.outbox_rows())
