"""Readings as text for Prometheus: its own format, or OpenMetrics, which has exemplars too.

Names are OpenTelemetry's with underscores and their unit, as in OpenTelemetry's own rules for Prometheus:
``tercet.step.duration`` in seconds is ``tercet_step_duration_seconds``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import CollectorRegistry
from prometheus_client.samples import Exemplar as TextExemplar

from tercet_shared.telemetry.instruments import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tercet_shared.telemetry.instruments import Distribution, Exemplar, Meter, Reading

_UNITS = {"s": "seconds", "By": "bytes", "1": "ratio"}


def prometheus_name(name: str) -> str:
    """Returns a name as Prometheus has it, without unit and suffix."""
    return name.replace(".", "_").replace("-", "_")


class PrometheusText:
    """Writes everything that a meter has.

    Args:
        meter: is read at every call.
        resource: who it is that measures; becomes ``target_info``.
    """

    def __init__(self, meter: Meter, resource: Mapping[str, str]) -> None:
        self._meter = meter
        self._registry = CollectorRegistry(auto_describe=False)
        info = {prometheus_name(name): value for name, value in resource.items()}
        self._target = InfoMetricFamily("target", "Who measures.", value=info)
        self._registry.register(self)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Returns the text and its media type, in the format that the ``Accept`` header asks for."""
        encoder, media_type = choose_encoder(accept)
        return encoder(self._registry), media_type

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`."""
        yield self._target
        for reading in self._meter.collect():
            yield _family(reading)

    def describe(self) -> Iterable[Metric]:
        """Names nothing ahead: instruments may come later."""
        return ()


def _family(reading: Reading) -> Metric:
    what = reading.description
    name, unit = prometheus_name(what.name), _UNITS.get(what.unit, "")
    labels = [prometheus_name(label) for label in what.labels]
    if what.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, what.text, labels=labels, unit=unit)
        for values, one in reading.distributions:
            histogram.add_metric(values, _buckets(one, reading.bounds), one.sum)
        return histogram
    kind = CounterMetricFamily if what.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(name, what.text, labels=labels, unit=unit)
    for values, number in reading.numbers:
        family.add_metric(values, number)
    return family


def _buckets(one: Distribution, bounds: tuple[float, ...]) -> list[tuple[str, float] | tuple[str, float, TextExemplar]]:
    below = 0
    buckets: list[tuple[str, float] | tuple[str, float, TextExemplar]] = []
    for index, (bound, count) in enumerate(zip([*map(str, map(float, bounds)), "+Inf"], one.counts, strict=True)):
        below += count
        exemplar = one.exemplars.get(index)
        buckets.append((bound, below) if exemplar is None else (bound, below, _exemplar(exemplar)))
    return buckets


def _exemplar(exemplar: Exemplar) -> TextExemplar:
    ids = {"trace_id": f"{exemplar.trace_id:032x}", "span_id": f"{exemplar.span_id:016x}"}
    return TextExemplar(ids, exemplar.value, exemplar.time_ns / 1e9)
