"""Readings as OpenTelemetry's data points, for its exporters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from opentelemetry.sdk.metrics import Exemplar as OtelExemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from tercet_shared.telemetry.instruments import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.resources import Resource

    from tercet_shared.telemetry.instruments import Distribution, Labels, Number, Reading

_CUMULATIVE = AggregationTemporality.CUMULATIVE


def metrics_data(readings: Sequence[Reading], resource: Resource, *, start_ns: int) -> MetricsData:
    """Returns readings as they are exported.

    Args:
        readings: of one process.
        resource: that process.
        start_ns: since when its sums count, in Unix nanoseconds.
    """
    now = time.time_ns()
    # One without a point has no form in the protocol.
    metrics = [_metric(reading, start_ns, now) for reading in readings if reading.numbers or reading.distributions]
    scope = ScopeMetrics(InstrumentationScope("tercet"), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(reading: Reading, start: int, now: int) -> Metric:
    what = reading.description

    def attributes(labels: Labels) -> dict[str, str]:
        return {name: value for name, value in zip(what.labels, labels, strict=True) if value}

    data: Histogram | Sum | Gauge
    if what.kind is Kind.HISTOGRAM:
        points = [
            _distribution(one, reading.bounds, attributes(labels), start, now) for labels, one in reading.distributions
        ]
        data = Histogram(points, _CUMULATIVE)
    else:
        numbers = [NumberDataPoint(attributes(labels), start, now, _plain(value)) for labels, value in reading.numbers]
        data = Sum(numbers, _CUMULATIVE, is_monotonic=True) if what.kind is Kind.COUNTER else Gauge(numbers)
    return Metric(what.name, what.text, what.unit, data)


def _plain(value: Number) -> int | float:
    # Also of NumPy's numbers, which the exporter does not take.
    return float(value) if value % 1 else int(value)


def _distribution(
    one: Distribution, bounds: tuple[float, ...], attributes: dict[str, str], start: int, now: int
) -> HistogramDataPoint:
    exemplars = [
        OtelExemplar({}, found.value, found.time_ns, found.span_id, found.trace_id) for found in one.exemplars.values()
    ]
    return HistogramDataPoint(
        attributes, start, now, one.count, one.sum, one.counts, bounds, one.least, one.most, exemplars
    )
