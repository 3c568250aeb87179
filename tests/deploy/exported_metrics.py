"""What our services export to Prometheus, taken from the instruments that they make."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from tercet_core.metrics import CoreMetrics, observe_registry
from tercet_frontend.telemetry.fleet import FleetMetrics
from tercet_frontend.telemetry.metrics import RequestMetrics, observe_edge
from tercet_shared.telemetry.exposition import prometheus_name
from tercet_shared.telemetry.instruments import Description, Kind, Meter
from tercet_worker.telemetry.metrics import WorkerMetrics

if TYPE_CHECKING:
    from collections.abc import Iterator

UNITS = {"s": "_seconds", "By": "_bytes"}

TARGET_LABELS = {"job", "instance"}
"""Added by Prometheus to whatever it scrapes."""


@dataclass(frozen=True)
class Series:
    """One name that Prometheus knows.

    Attributes:
        job: by which it is scraped; empty for what Prometheus makes itself.
        labels: that its samples have, those of the target included.
    """

    name: str
    job: str
    labels: frozenset[str]


PROMETHEUS_OWN = (
    Series("up", "", frozenset(TARGET_LABELS)),
    Series("ALERTS", "", frozenset({*TARGET_LABELS, "alertname", "alertstate", "severity"})),
)


def exported() -> dict[str, Series]:
    """Returns all series by name."""
    found = {series.name: series for series in PROMETHEUS_OWN}
    for job, meter in _meters():
        for description in meter.descriptions():
            for series in _series(job, description):
                assert series.name not in found, f"{series.name} is exported twice"
                found[series.name] = series
    return found


def _series(job: str, description: Description) -> Iterator[Series]:
    name = prometheus_name(description.name) + UNITS.get(description.unit, "")
    labels = frozenset({*TARGET_LABELS, *(prometheus_name(label) for label in description.labels)})
    if description.kind is Kind.HISTOGRAM:
        yield Series(f"{name}_bucket", job, labels | {"le"})
        yield Series(f"{name}_sum", job, labels)
        yield Series(f"{name}_count", job, labels)
    else:
        yield Series(name + ("_total" if description.kind is Kind.COUNTER else ""), job, labels)


def _meters() -> Iterator[tuple[str, Meter]]:
    # Nothing is read from what is observed: instruments are only described.
    anything = cast("Any", SimpleNamespace(outbox_rows=None, num_front_ends=None, has_worker=None))
    meter = Meter()
    RequestMetrics(meter)
    FleetMetrics(meter)
    observe_edge(meter, anything, anything)
    yield "tercet-frontend", meter
    meter = Meter()
    CoreMetrics(meter, anything)
    observe_registry(meter, anything)
    yield "tercet-core", meter
    meter = Meter()
    WorkerMetrics(meter)
    yield "tercet-worker", meter
