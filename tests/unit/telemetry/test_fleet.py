"""What is said of cores before anything has happened to them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from tercet_frontend.cores.journey import Loss
from tercet_frontend.cores.migration import MigrationCounters
from tercet_frontend.telemetry.fleet import FleetMetrics
from tercet_shared.registry.static import StaticFleet
from tercet_shared.telemetry.instruments import Labels, Meter, Number


def _read(meter: Meter, name: str) -> dict[Labels, Number]:
    (reading,) = [reading for reading in meter.collect() if reading.description.name == name]
    return dict(reading.numbers)


def test_every_loss_is_there_before_it_happens() -> None:
    meter = Meter()
    metrics = FleetMetrics(meter)
    counters = MigrationCounters(losses=Counter({Loss.SILENT: 2}))
    pool: Any = SimpleNamespace(streams=(), migrations=counters, migrating=0)
    metrics.watch(pool, StaticFleet(()))
    # Else the first one would not be an increase of anything, and no alert would see it.
    assert _read(meter, "tercet.frontend.losses") == {(loss.value,): 2 * (loss is Loss.SILENT) for loss in Loss}
    assert list(counters.losses) == [Loss.SILENT]
