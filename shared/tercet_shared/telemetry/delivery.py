"""Spans and metrics to a collector, by OTLP over gRPC, on threads of their own.

Nobody waits for a collector: queues are bounded, what does not fit or cannot be delivered is dropped, and the log says
once that it is so, and once when it is over. The address comes from ``--otlp-endpoint``, or from OpenTelemetry's own
variables (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``…_HEADERS``, ``…_CERTIFICATE``, ``…_TIMEOUT``, and so on), which the
exporters read themselves.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Final

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from tercet_shared.errors import ConfigurationError
from tercet_shared.telemetry.collector import checked_endpoint
from tercet_shared.telemetry.points import metrics_data
from tercet_shared.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

    from tercet_shared.telemetry.instruments import Meter

_log = logging.getLogger(__name__)

_INTERVAL: Final = "OTEL_METRIC_EXPORT_INTERVAL"
_DEFAULT_INTERVAL_MS: Final = 60_000.0


class _Outcome:
    """Says once that deliveries fail, and once that they do not any more."""

    def __init__(self, what: str, where: str) -> None:
        self._what = what
        self._where = where
        self._failing = False

    def note(self, *, delivered: bool) -> None:
        if not delivered and not self._failing:
            _log.warning("%s cannot be delivered to %s, and are dropped meanwhile", self._what, self._where)
        elif delivered and self._failing:
            _log.info("%s are delivered to %s again", self._what, self._where)
        self._failing = not delivered


class _QuietSpans(SpanExporter):
    def __init__(self, exporter: OTLPSpanExporter, outcome: _Outcome) -> None:
        self._exporter = exporter
        self._outcome = outcome

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except ValueError:  # its channel was closed meanwhile
            return SpanExportResult.FAILURE
        self._outcome.note(delivered=result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class Delivery:
    """What a process sends to its collector. Its threads are daemons: they keep no process from its end.

    Attributes:
        tracing: whose spans are sent.

    Args:
        resource: who sends.
        meter: is read at every interval (``OTEL_METRIC_EXPORT_INTERVAL`` in milliseconds, a minute by default).
        endpoint: of the collector; None: as the environment says.
        ratio: of traces that begin here, which are sampled.

    Raises:
        ConfigurationError: ``endpoint`` or the interval is malformed.
    """

    def __init__(self, resource: Resource, meter: Meter, *, endpoint: str | None, ratio: float) -> None:
        interval_s = _interval_s(os.environ)
        url = None if endpoint is None else checked_endpoint(endpoint)
        where = url or "the collector that the environment names"
        self._spans = BatchSpanProcessor(_QuietSpans(OTLPSpanExporter(endpoint=url), _Outcome("traces", where)))
        self.tracing = Tracing(self._spans.on_end, resource, ratio)
        self._metrics = _MetricsThread(meter, resource, OTLPMetricExporter(endpoint=url), where, interval_s)

    def start(self) -> None:
        """Begins to send."""
        self._metrics.start()

    def close(self, timeout_s: float) -> None:
        """Sends what there is, and ends; waits for at most about ``timeout_s`` seconds. Blocks: not for an event loop.

        What a collector has not taken by then is dropped.
        """
        deadline = time.monotonic() + timeout_s
        self._metrics.stop()  # both send at the same time
        self._spans._batch_processor.shutdown(int(timeout_s * 1_000))  # noqa: SLF001  # the public one has no timeout
        self._metrics.close(max(deadline - time.monotonic(), 0.0))


class _MetricsThread(threading.Thread):
    """Collects and sends at an interval, and once more at the end."""

    def __init__(
        self, meter: Meter, resource: Resource, exporter: OTLPMetricExporter, where: str, interval_s: float
    ) -> None:
        super().__init__(name="metrics", daemon=True)
        self._meter = meter
        self._resource = resource
        self._exporter = exporter
        self._outcome = _Outcome("metrics", where)
        self._interval_s = interval_s
        self._start_ns = time.time_ns()
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        over = False
        while not over:
            try:
                self._ends.get(timeout=self._interval_s)
                over = True
            except queue.Empty:
                pass
            self._send(metrics_data(self._meter.collect(), self._resource, start_ns=self._start_ns))

    def stop(self) -> None:
        self._ends.put(None)

    def close(self, timeout_s: float) -> None:
        if self.is_alive():
            self.join(timeout_s)
        self._exporter.shutdown()

    def _send(self, data: MetricsData) -> None:
        try:
            result = self._exporter.export(data)
        except ValueError:  # its channel was closed meanwhile
            return
        self._outcome.note(delivered=result is MetricExportResult.SUCCESS)


def _interval_s(environ: Mapping[str, str]) -> float:
    given = environ.get(_INTERVAL, "")
    try:
        milliseconds = float(given or _DEFAULT_INTERVAL_MS)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds < float("inf"):
        raise ConfigurationError(f"{_INTERVAL}: {given!r} is no number of milliseconds.")
    return milliseconds / 1_000
