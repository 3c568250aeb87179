"""Spans of traced requests, and of some of the steps that compute them.

A request's span goes from its arrival to its end, with three below it: ``tercet.queue`` up to its first step,
``tercet.prefill`` up to its first token, ``tercet.decode`` up to its end. The worker's span goes below it too: the plan
that begins a slot tells the worker of it.

A request that is not traced costs one comparison when it arrives. While some are traced, a step costs a look at their
number; spans of steps are bounded by the clock, not by the number of steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from tercet_shared.telemetry.tracing import packed, written
from tercet_shared.wire.step import PlanTrace

if TYPE_CHECKING:
    from tercet_core.scheduling.outputs import Output
    from tercet_core.scheduling.request import Request
    from tercet_core.scheduling.scheduler import Scheduler
    from tercet_shared.telemetry.spans import Span
    from tercet_shared.telemetry.tracing import Tracing
    from tercet_shared.wire.step import StepPlan, StepResult

STEP_INTERVAL_S: Final = 0.1
"""Least time between two steps that get a span."""

MAX_LINKS: Final = 16
"""Requests besides the one above it that the span of a step names."""


@dataclass(slots=True, eq=False)
class RequestTrace:
    """What is known of a traced request. Times are Unix nanoseconds; 0: not yet."""

    request: Request
    span: Span
    arrived: int
    slot: int = -1
    planned: int = 0
    first: int = 0
    parts: int = 0  # steps that computed prompt tokens or resumed it, as far as they began a slot


class RequestTraces:
    """The traced requests of one core."""

    def __init__(self, tracing: Tracing, core_id: str = "") -> None:
        self._tracing = tracing
        self._core_id = core_id
        self._open: dict[int, dict[int, RequestTrace]] = {}  # by front end, then handle; no empty ones
        self._steps: dict[int, Span] = {}  # by id, of steps in flight
        self._next_step = 0.0  # by the monotonic clock

    def arrived(self, request: Request) -> None:
        """Begins the span of a request, if it is traced."""
        span = self._tracing.follow("tercet.core.request", request.traceparent)
        if span is None:
            return
        span.set(
            {
                "tercet.core.id": self._core_id,
                "tercet.request.id": request.request_id,
                "tercet.attempt": request.attempt,
                "gen_ai.usage.input_tokens": request.prompt_len,
                "tercet.resumed_tokens": len(request.tokens) - request.prompt_len,
            }
        )
        trace = RequestTrace(request, span, time.time_ns())
        request.trace = trace
        self._open.setdefault(request.front_end, {})[request.handle] = trace

    def planned(self, plan: StepPlan, began: list[Request]) -> None:
        """Takes note of the requests that begin, or begin again, with ``plan``, and marks what is traced in it."""
        if not self._open:
            return
        now = time.time_ns()
        slots: list[int] = []
        spans: list[bytes] = []
        for request in began:
            trace = request.trace
            if trace is None or request.slot is None:
                continue
            trace.slot = request.slot
            if trace.planned:
                trace.span.event("tercet.resumed", time_ns=now)
            else:
                trace.planned = now
            trace.parts += 1
            slots.append(request.slot)
            spans.append(packed(written(trace.span.context)))
        step = self._step(plan, now)
        if slots or step:
            plan.trace = PlanTrace(np.array(slots, np.int32), b"".join(spans), step)

    def _step(self, plan: StepPlan, now: int) -> bytes:
        """Begins the span of a step, where one is due; returns it as the worker is told of it."""
        clock = time.monotonic()
        if clock < self._next_step:
            return b""
        traces = [trace for own in self._open.values() for trace in own.values() if trace.slot >= 0]
        among = np.isin(np.array([trace.slot for trace in traces], np.int32), plan.slots)
        traces = [trace for trace, found in zip(traces, among.tolist(), strict=True) if found]
        if not traces:
            return b""
        self._next_step = clock + STEP_INTERVAL_S
        first, *others = [trace.span.context for trace in traces[: MAX_LINKS + 1]]
        span = self._tracing.below(
            "tercet.core.step",
            first,
            start_ns=now,
            attributes={
                "tercet.step.id": plan.step_id,
                "tercet.step.requests": len(plan.slots),
                "tercet.step.tokens": int(plan.num_tokens.sum()),
            },
            links=others,
        )
        if span is None:
            return b""
        self._steps[plan.step_id] = span
        return packed(written(span.context))

    def applied(self, result: StepResult, seconds: float) -> None:
        """Ends the span of the step, if it has one, and of those before it that were never answered."""
        if not self._steps:
            return
        for step_id in [step_id for step_id in self._steps if step_id <= result.step_id]:
            span = self._steps.pop(step_id)
            if step_id == result.step_id:
                span.set(
                    {
                        "tercet.worker.wait_ms": result.wait_us / 1e3,
                        "tercet.worker.run_ms": result.run_us / 1e3,
                        "tercet.apply_ms": seconds * 1e3,
                    }
                )
            span.end()

    def published(self, output: Output, scheduler: Scheduler) -> None:
        """Takes note of first tokens and ends."""
        own = self._open.get(output.front_end)
        if own is None:
            return
        if len(output.start_rows):
            for handle in output.handles[output.start_rows].tolist():
                if (trace := own.get(handle)) is not None and not trace.first:
                    trace.first = time.time_ns()
        if output.ends:
            handles = output.handles[[end.row for end in output.ends]].tolist()
            for end, handle in zip(output.ends, handles, strict=True):
                if (trace := own.get(handle)) is not None:
                    reason = end.ending.name.lower() if end.error is None else type(end.error).__name__
                    self._end(trace, scheduler, reason, failed=end.error is not None)

    def ended(self, requests: list[Request], scheduler: Scheduler, reason: str) -> None:
        """Ends the spans of requests that are over without having been told so."""
        if not self._open:
            return
        for request in requests:
            if request.trace is not None:
                self._end(request.trace, scheduler, reason)

    def close(self) -> None:
        """Ends every span that is open."""
        for span in self._steps.values():
            span.end()
        self._steps.clear()
        for trace in [trace for own in self._open.values() for trace in own.values()]:
            self._forget(trace)
            trace.span.end()

    def _end(self, trace: RequestTrace, scheduler: Scheduler, reason: str, *, failed: bool = False) -> None:
        request, span = trace.request, trace.span
        now = time.time_ns()
        self._forget(trace)
        context = span.context
        self._tracing.add("tercet.queue", context, trace.arrived, trace.planned or now)
        if trace.planned:
            cached = {"tercet.cached_tokens": request.cached_tokens}
            self._tracing.add("tercet.prefill", context, trace.planned, trace.first or now, cached)
        if trace.first:
            self._tracing.add("tercet.decode", context, trace.first, now)
        span.set(
            {
                "tercet.cached_tokens": request.cached_tokens,
                "tercet.resumptions": max(trace.parts - 1, 0),
                # Nothing has been planned since it ended, so its row is still as it left it.
                "gen_ai.usage.output_tokens": self._output_tokens(trace, scheduler),
                "tercet.end": reason,
            }
        )
        if failed:
            span.set({"error.type": reason})
        span.end(now)

    def _output_tokens(self, trace: RequestTrace, scheduler: Scheduler) -> int:
        request = trace.request
        known = int(scheduler.table.known[trace.slot]) if trace.slot >= 0 else len(request.tokens)
        return max(known - request.prompt_len, 0)

    def _forget(self, trace: RequestTrace) -> None:
        request = trace.request
        request.trace = None
        own = self._open.get(request.front_end, {})
        if own.get(request.handle) is trace:
            del own[request.handle]
            if not own:
                del self._open[request.front_end]
