"""What a session tells of its steps, made metrics and spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tercet_shared.wire.step import StepPlan, StepResult
    from tercet_worker.telemetry.metrics import WorkerMetrics
    from tercet_worker.telemetry.traces import SlotTraces


class StepObserver:
    """Hears of every step. Methods are called on the event loop, and return at once.

    Args:
        metrics: None records none.
        traces: None traces nothing.
    """

    def __init__(self, metrics: WorkerMetrics | None = None, traces: SlotTraces | None = None) -> None:
        self._metrics = metrics
        self._traces = traces

    def begin(self) -> None:
        """A core is connected."""
        if self._metrics is not None:
            self._metrics.linked = True

    def answered(self, plan: StepPlan, result: StepResult, at: int) -> None:
        """A step was computed, or failed, ``at`` that time in Unix nanoseconds."""
        if self._metrics is not None:
            self._metrics.answered(plan, result)
        if self._traces is not None:
            self._traces.answered(plan, result, at)

    def end(self) -> None:
        """The core is gone, or the worker stops."""
        if self._metrics is not None:
            self._metrics.linked = False
        if self._traces is not None:
            self._traces.close()
