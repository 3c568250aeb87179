"""The core's numbers, under ``tercet.*`` (docs/observability.md).

Gauges and most counters are read from the scheduler when somebody asks. What is recorded in the loop is recorded once
per step or once per request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tercet_shared.telemetry.instruments import SECONDS, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.trace import SpanContext

    from tercet_core.scheduling.scheduler import Scheduler
    from tercet_shared.telemetry.instruments import Labels, Meter

_PLAN, _WAIT, _APPLY = ("plan",), ("wait",), ("apply",)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Source(Protocol):
    """Where the numbers are."""

    def current_scheduler(self) -> Scheduler | None:
        """Returns the scheduler, or None before there is one."""

    def outbox_rows(self) -> int:
        """Returns the rows that wait for front ends."""

    def num_front_ends(self) -> int:
        """Returns the front ends that are connected."""

    def has_worker(self) -> bool:
        """Returns whether a worker is connected."""


class Registered(Protocol):
    """Where the core is registered; see `tercet_core.membership`."""

    @property
    def healthy(self) -> bool:
        """Whether the registry has what the core says."""

    @property
    def failures(self) -> int:
        """How often the registry could not be reached, or refused."""


def observe_registry(meter: Meter, registered: Registered) -> None:
    """Makes the instruments of a core's place in its fleet."""
    meter.observe(
        Kind.GAUGE,
        "tercet.registry.healthy",
        "",
        "1 while the registry has what the core says, or there is none; else 0.",
        lambda: int(registered.healthy),
    )
    meter.observe(
        Kind.COUNTER,
        "tercet.registry.failures",
        "{failure}",
        "Rounds in which the core could not reach the registry, or was refused.",
        lambda: registered.failures,
    )


class CoreMetrics:
    """All instruments of one core, but for its registry's."""

    def __init__(self, meter: Meter, source: Source) -> None:
        self._source = source
        self._duration = meter.histogram(
            "tercet.step.duration",
            "s",
            "Time of a step: planning it, from its plan to its result, and applying that.",
            SECONDS,
            ("part",),
        )
        self._tokens = meter.histogram("tercet.step.tokens", "{token}", "Tokens that a step computes.", _TOKENS)
        self._batch = meter.histogram("tercet.step.requests", "{request}", "Requests that a step computes.", _REQUESTS)
        self._queued = meter.histogram(
            "tercet.queue.duration", "s", "Time from a request's arrival to its first step.", SECONDS
        )
        self._hits = meter.counter(
            "tercet.prefix.hits", "{request}", "Requests whose prompt began with cached blocks when they were admitted."
        )
        self._ended = meter.counter("tercet.requests.ended", "{request}", "Requests that are over.", ("reason",))
        self._rejected = meter.counter(
            "tercet.requests.rejected", "{request}", "Requests that were not taken.", ("reason",)
        )
        self._arrived = meter.counter("tercet.requests.arrived", "{request}", "Requests that were taken.")
        self._observe(meter)

    def _observe(self, meter: Meter) -> None:
        def gauge(name: str, unit: str, text: str, read: Callable[[Scheduler], int]) -> None:
            meter.observe(Kind.GAUGE, name, unit, text, self._read(read))

        def counter(name: str, unit: str, text: str, read: Callable[[Scheduler], int]) -> None:
            meter.observe(Kind.COUNTER, name, unit, text, self._read(read))

        def split(
            name: str, unit: str, text: str, label: str, read: Callable[[], Iterable[tuple[Labels, int]]]
        ) -> None:
            meter.observe(Kind.GAUGE, name, unit, text, read, (label,))

        gauge("tercet.requests.running", "{request}", "Requests that take part in steps.", lambda s: s.num_running)
        split("tercet.requests.waiting", "{request}", "Requests that take part in none now.", "reason", self._waiting)
        split("tercet.kv.blocks", "{block}", "Blocks of the KV pool; the states sum to it.", "state", self._blocks)
        rows, front_ends = self._source.outbox_rows, self._source.num_front_ends
        meter.observe(Kind.GAUGE, "tercet.outbox.rows", "{row}", "Rows that wait for front ends.", rows)
        meter.observe(Kind.GAUGE, "tercet.frontends", "{frontend}", "Front ends that are connected.", front_ends)
        meter.observe(
            Kind.GAUGE,
            "tercet.workers",
            "{worker}",
            "Workers that are connected: 1, or 0 while one is awaited.",
            lambda: int(self._source.has_worker()),
        )
        counter("tercet.steps", "{step}", "Steps that were planned.", lambda s: s.counters.steps)
        counter(
            "tercet.preemptions",
            "{preemption}",
            "Times that a running request lost its blocks to others.",
            lambda s: s.counters.preemptions,
        )
        counter(
            "tercet.tokens.prompt",
            "{token}",
            "Prompt tokens of requests, when they are admitted.",
            lambda s: s.counters.prompt_tokens,
        )
        counter(
            "tercet.tokens.cached",
            "{token}",
            "Those of them that the prefix cache had.",
            lambda s: s.counters.cached_tokens,
        )
        counter(
            "tercet.tokens.output", "{token}", "Output tokens that requests got.", lambda s: s.counters.output_tokens
        )
        counter(
            "tercet.tokens.recomputed",
            "{token}",
            "Tokens that were computed again after a preemption.",
            lambda s: s.counters.recomputed_tokens,
        )
        counter(
            "tercet.tokens.discarded",
            "{token}",
            "Tokens that were drawn for a request that had ended.",
            lambda s: s.counters.discarded_tokens,
        )
        counter(
            "tercet.rows.not_finite",
            "{row}",
            "Requests that ended because their logits were not finite.",
            lambda s: s.counters.not_finite_rows,
        )

    def planned(self, seconds: float, tokens: int, requests: int) -> None:
        """Records one planned step."""
        self._duration.record(seconds, _PLAN)
        self._tokens.record(tokens)
        self._batch.record(requests)

    def applied(self, waited: float, seconds: float) -> None:
        """Records one applied result: from its plan to its arrival, and its application, in seconds."""
        self._duration.record(waited, _WAIT)
        self._duration.record(seconds, _APPLY)

    def arrived(self) -> None:
        """Counts a request that was taken."""
        self._arrived.add()

    def admitted(self, queued: float, *, hit: bool, trace: SpanContext | None = None) -> None:
        """Records a request's first step: after how many seconds, and whether its prompt began with cached blocks."""
        self._queued.record(queued, (), trace)
        if hit:
            self._hits.add()

    def ended(self, reason: str, count: int = 1) -> None:
        """Counts requests that are over."""
        self._ended.add(count, (reason,))

    def rejected(self, reason: str) -> None:
        """Counts a request that was not taken."""
        self._rejected.add(1, (reason,))

    def _read(self, value: Callable[[Scheduler], int]) -> Callable[[], int]:
        def read() -> int:
            scheduler = self._source.current_scheduler()
            return value(scheduler) if scheduler is not None else 0

        return read

    def _waiting(self) -> Iterable[tuple[Labels, int]]:
        scheduler = self._source.current_scheduler()
        preempted = scheduler.num_preempted if scheduler is not None else 0
        waiting = scheduler.num_waiting if scheduler is not None else 0
        return ((("capacity",), max(waiting - preempted, 0)), (("preempted",), preempted))

    def _blocks(self) -> Iterable[tuple[Labels, int]]:
        scheduler = self._source.current_scheduler()
        cached = scheduler.pool.cached if scheduler is not None else 0
        held = scheduler.pool.referenced if scheduler is not None else 0
        free = scheduler.pool.available - cached if scheduler is not None else 0
        return ((("free",), free), (("cached",), cached), (("held",), held))
