"""The instruments of what is behind a front end: its cores, migrations and the registry."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from tercet_frontend.cores.journey import Loss
from tercet_shared.telemetry.instruments import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tercet_frontend.cores.migration import MigrationCounters
    from tercet_frontend.cores.stream import CoreStream
    from tercet_shared.registry.interface import Fleet
    from tercet_shared.telemetry.instruments import Labels, Meter


class Pool(Protocol):
    """What is asked of the cores; see `tercet_frontend.cores.pool.CorePool`."""

    @property
    def streams(self) -> Sequence[CoreStream]:
        """One for each core."""

    @property
    def migrations(self) -> MigrationCounters:
        """What became of choices whose core was lost."""

    @property
    def migrating(self) -> int:
        """Choices that have no core at this moment."""


class FleetMetrics:
    """Zeros until `watch` is called: the cores are known later than the port is open."""

    def __init__(self, meter: Meter) -> None:
        self._pool: Pool | None = None
        self._fleet: Fleet | None = None
        meter.observe(
            Kind.GAUGE, "tercet.frontend.cores", "{core}", "Cores that are known, by state.", self._cores, ("state",)
        )
        meter.observe(
            Kind.GAUGE,
            "tercet.frontend.choices",
            "{choice}",
            "Choices of this front end that are on a core, by core.",
            self._choices,
            ("tercet.core.id",),
        )
        meter.observe(
            Kind.COUNTER,
            "tercet.frontend.migrations",
            "{choice}",
            "Choices whose core was lost, by what became of them.",
            self._migrations,
            ("outcome",),
        )
        meter.observe(
            Kind.COUNTER,
            "tercet.frontend.losses",
            "{choice}",
            "Choices whose core was lost, by how it was.",
            self._losses,
            ("reason",),
        )
        meter.observe(
            Kind.GAUGE,
            "tercet.frontend.migrating",
            "{choice}",
            "Choices that have lost their core and have no other one yet.",
            lambda: 0 if self._pool is None else self._pool.migrating,
        )
        meter.observe(
            Kind.GAUGE,
            "tercet.frontend.registry.healthy",
            "",
            "1 while the registry answers, else 0.",
            lambda: int(self._fleet is not None and self._fleet.healthy),
        )
        meter.observe(
            Kind.COUNTER,
            "tercet.frontend.registry.failures",
            "{failure}",
            "Rounds in which the registry could not be reached or refused.",
            # A registry without a server has none to fail.
            lambda: int(getattr(self._fleet, "failures", 0)),
        )

    def watch(self, pool: Pool, fleet: Fleet) -> None:
        """Reads these from now on."""
        self._pool, self._fleet = pool, fleet

    def _cores(self) -> Iterable[tuple[Labels, int]]:
        states = Counter(stream.state.value for stream in (() if self._pool is None else self._pool.streams))
        return [((state,), states[state]) for state in ("ready", "connecting", "draining", "refused")]

    def _choices(self) -> Iterable[tuple[Labels, int]]:
        streams = () if self._pool is None else self._pool.streams
        return [((stream.core_id,), stream.active) for stream in streams if stream.core_id]

    def _migrations(self) -> Iterable[tuple[Labels, int]]:
        if self._pool is None:
            return ()
        counted = self._pool.migrations
        return [
            (("moved",), counted.moved),
            (("completed",), counted.completed),
            (("failed",), counted.failed),
        ]

    def _losses(self) -> Iterable[tuple[Labels, int]]:
        if self._pool is None:
            return ()
        losses = self._pool.migrations.losses
        return [((loss.value,), losses[loss]) for loss in Loss]
