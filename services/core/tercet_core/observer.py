"""What the engine tells of itself while it runs, made metrics and spans."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tercet_core.tracing import RequestTraces
from tercet_shared.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from tercet_core.metrics import CoreMetrics
    from tercet_core.scheduling.outputs import Output
    from tercet_core.scheduling.request import Request
    from tercet_core.scheduling.scheduler import Scheduler
    from tercet_shared.wire.step import StepPlan, StepResult


class Observer:
    """Hears what happens; every method returns at once.

    Args:
        metrics: None records none.
        traces: None traces nothing.
    """

    def __init__(self, metrics: CoreMetrics | None = None, traces: RequestTraces | None = None) -> None:
        self._metrics = metrics
        self._traces = RequestTraces(Tracing()) if traces is None else traces

    def arrived(self, request: Request) -> None:
        """A request was taken."""
        request.arrived = time.perf_counter()
        if request.traceparent:
            self._traces.arrived(request)
        if self._metrics is not None:
            self._metrics.arrived()

    def planned(self, plan: StepPlan, scheduler: Scheduler, seconds: float) -> None:
        """A step was planned, in ``seconds``; it has not been sent yet."""
        began: list[Request] = []
        if len(plan.new):
            owners = scheduler.table.requests
            began = [owner for slot in plan.new.slots.tolist() if (owner := owners[slot]) is not None]
        if self._metrics is not None:
            self._metrics.planned(seconds, int(plan.num_tokens.sum()), len(plan.slots))
            for request in began:
                if request.arrived:
                    span = None if request.trace is None else request.trace.span.context
                    queued = time.perf_counter() - request.arrived
                    self._metrics.admitted(queued, hit=request.cached_tokens > 0, trace=span)
                    request.arrived = 0.0  # the next time it begins, it resumes
        self._traces.planned(plan, began)

    def applied(self, result: StepResult, waited: float, seconds: float) -> None:
        """A result was applied: ``waited`` from its plan to its arrival, ``seconds`` to apply it."""
        if self._metrics is not None:
            self._metrics.applied(waited, seconds)
        self._traces.applied(result, seconds)

    def published(self, output: Output, scheduler: Scheduler) -> None:
        """Front ends are about to hear something."""
        if output.ends and self._metrics is not None:
            for end in output.ends:
                self._metrics.ended(end.ending.name.lower())
        self._traces.published(output, scheduler)

    def ended(self, requests: list[Request], scheduler: Scheduler, reason: str) -> None:
        """Requests are over because their front end said so, or is gone."""
        requests = list(dict.fromkeys(requests))  # a frame may name one twice
        if self._metrics is not None:
            self._metrics.ended(reason, len(requests))
        self._traces.ended(requests, scheduler, reason)

    def rejected(self, reason: str) -> None:
        """A request was not taken."""
        if self._metrics is not None:
            self._metrics.rejected(reason)

    def close(self) -> None:
        """Ends what is open."""
        self._traces.close()
