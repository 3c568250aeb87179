"""Spans of traced requests and steps in the worker, below those of the core.

The plan that begins a slot says whether its request is traced. Its span here, ``tercet.worker.request``, goes from that
plan's arrival to the end of the last step that computed it. The worker is not told when a request ends: the slot is
freed by a later plan, or never while there is nothing else to do. So a span also ends once its slot has been quiet for
a while; if the request goes on after all (it was preempted), it begins again with another plan, and so does its span.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from tercet_shared.telemetry.tracing import PACKED_BYTES, unpacked

if TYPE_CHECKING:
    from tercet_shared.telemetry.spans import Span
    from tercet_shared.telemetry.tracing import Tracing
    from tercet_shared.wire.step import PlanTrace, StepPlan, StepResult

QUIET_S: Final = 1.0
"""Seconds without a step of a slot, after which its span ends (with its last step)."""


@dataclass(slots=True)
class _SlotTrace:
    span: Span
    steps: int = 0
    tokens: int = 0
    run_us: int = 0
    last: int = 0  # Unix nanoseconds


class SlotTraces:
    """The traced slots of one worker. Used on one event loop; costs a look at their number where there are none."""

    def __init__(self, tracing: Tracing, *, quiet_s: float = QUIET_S) -> None:
        self._tracing = tracing
        self._quiet_s = quiet_s
        self._open: dict[int, _SlotTrace] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def answered(self, plan: StepPlan, result: StepResult, now: int) -> None:
        """Takes note of one step, which was computed by ``now``, in Unix nanoseconds."""
        if plan.trace is None and not self._open:
            return
        for slot in plan.freed.tolist():
            self._end(slot)
        if plan.trace is not None:
            began = now - (result.wait_us + result.run_us) * 1_000
            self._begin(plan.trace, began)
            if plan.trace.step:
                self._step(plan, result, began, now)
        self._count(plan, result, now)
        if self._open and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._quiet_s, self._look)

    def close(self) -> None:
        """Ends all spans: the core is gone, or the worker stops."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for slot in [*self._open]:
            self._end(slot)

    def _begin(self, trace: PlanTrace, began: int) -> None:
        for index, slot in enumerate(trace.slots.tolist()):
            self._end(slot)
            parent = unpacked(trace.spans[index * PACKED_BYTES : (index + 1) * PACKED_BYTES])
            span = self._tracing.below(
                "tercet.worker.request", parent, start_ns=began, attributes={"tercet.slot": slot}
            )
            if span is not None:
                self._open[slot] = _SlotTrace(span, last=began)

    def _step(self, plan: StepPlan, result: StepResult, began: int, now: int) -> None:
        trace = plan.trace
        if trace is None:
            return
        attributes = {
            "tercet.step.id": plan.step_id,
            "tercet.step.requests": len(plan.slots),
            "tercet.step.tokens": int(plan.num_tokens.sum()),
            "tercet.worker.wait_ms": result.wait_us / 1e3,
            "tercet.worker.run_ms": result.run_us / 1e3,
        }
        among = set(plan.slots.tolist())
        links = [open_.span.context for slot, open_ in self._open.items() if slot in among]
        span = self._tracing.below(
            "tercet.worker.step", unpacked(trace.step), start_ns=began, attributes=attributes, links=links
        )
        if span is None:
            return
        if result.error:
            span.set({"error.type": "step_failed"})
        span.end(now)

    def _count(self, plan: StepPlan, result: StepResult, now: int) -> None:
        if not self._open:
            return
        slots = np.fromiter(self._open, np.int32, len(self._open))
        for row in np.flatnonzero(np.isin(plan.slots, slots)).tolist():
            found = self._open[int(plan.slots[row])]
            found.steps += 1
            found.tokens += int(plan.num_tokens[row])
            found.run_us += result.run_us
            found.last = now

    def _end(self, slot: int) -> None:
        found = self._open.pop(slot, None)
        if found is None:
            return
        found.span.set(
            {
                "tercet.steps": found.steps,
                "tercet.computed_tokens": found.tokens,
                "tercet.worker.run_ms": found.run_us / 1e3,
            }
        )
        found.span.end(found.last)

    def _look(self) -> None:
        self._timer = None
        quiet_since = time.time_ns() - int(self._quiet_s * 1e9)
        for slot in [slot for slot, found in self._open.items() if found.last <= quiet_since]:
            self._end(slot)
        if self._open:
            self._timer = asyncio.get_running_loop().call_later(self._quiet_s, self._look)
