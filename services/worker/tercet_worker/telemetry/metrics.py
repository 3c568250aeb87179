"""The worker's numbers, under ``tercet.worker.*`` (docs/observability.md). Recorded once per step, on the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_shared.telemetry.instruments import SECONDS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tercet_shared.telemetry.instruments import Labels, Meter
    from tercet_shared.wire.step import StepPlan, StepResult
    from tercet_worker.startup import Engine

_WAIT, _RUN = ("wait",), ("run",)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class WorkerMetrics:
    """All instruments of one worker.

    Attributes:
        linked: whether a core is connected; kept by whoever connects.
    """

    def __init__(self, meter: Meter) -> None:
        self.linked = False
        self._engine: Engine | None = None
        self._duration = meter.histogram(
            "tercet.worker.step.duration",
            "s",
            "Time of a step: from its plan's arrival to its start, and from there to its tokens.",
            SECONDS,
            ("part",),
        )
        self._tokens = meter.histogram("tercet.worker.step.tokens", "{token}", "Tokens that a step computed.", _TOKENS)
        self._requests = meter.histogram(
            "tercet.worker.step.requests", "{request}", "Requests that a step computed.", _REQUESTS
        )
        self._drawn = meter.counter("tercet.worker.tokens", "{token}", "Tokens that were drawn.")
        self._failed = meter.counter("tercet.worker.steps.failed", "{step}", "Steps that failed as a whole.")
        meter.observe(
            Kind.GAUGE,
            "tercet.worker.linked",
            "{core}",
            "Cores that are connected: 1, or 0 while one is looked for.",
            lambda: int(self.linked),
        )
        meter.observe(
            Kind.GAUGE, "tercet.worker.memory", "By", "Memory that is taken once, by what.", self._memory, ("use",)
        )
        meter.observe(
            Kind.GAUGE,
            "tercet.worker.info",
            "",
            "1; the labels say what computes.",
            self._info,
            ("model", "dtype", "device", "kernels"),
        )

    def loaded(self, engine: Engine) -> None:
        """The model is there."""
        self._engine = engine

    def not_ready_reason(self) -> str | None:
        """Returns why nothing is computed now, in one sentence, or None."""
        if self._engine is None:
            return "The model is being loaded."
        return None if self.linked else "No core is connected."

    def answered(self, plan: StepPlan, result: StepResult) -> None:
        """Records one step."""
        self._duration.record(result.wait_us / 1e6, _WAIT)
        self._duration.record(result.run_us / 1e6, _RUN)
        self._tokens.record(int(plan.num_tokens.sum()))
        self._requests.record(len(plan.slots))
        self._drawn.add(len(result.token_ids))
        if result.error:
            self._failed.add()

    def _memory(self) -> Iterable[tuple[Labels, int]]:
        if self._engine is None:
            return ()
        return ((("weights",), self._engine.weight_bytes), (("kv",), self._engine.kv_bytes))

    def _info(self) -> Iterable[tuple[Labels, int]]:
        if self._engine is None:
            return ()
        offer = self._engine.offer
        return (((offer.model_name, offer.dtype, offer.device, self._engine.kernels), 1),)
