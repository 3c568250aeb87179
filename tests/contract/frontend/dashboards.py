"""The dashboard of a front end in a test's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tercet_frontend.api.dashboard import Dashboard
from tercet_frontend.edge import EdgeOptions
from tercet_frontend.telemetry.live import LiveStats
from tercet_frontend.telemetry.requests import RequestTelemetry
from tercet_shared.telemetry.instruments import Meter
from tercet_shared.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from tercet_frontend.access.occupancy import Occupancy
    from tercet_frontend.admission import Admission
    from tercet_frontend.cores import CorePool


class Shown:
    """Makes a front end's dashboard, and keeps it at hand. Its watcher hears of the front end's requests."""

    def __init__(self, **options: Any) -> None:
        self.live: LiveStats | None = None
        self.dashboard: Dashboard | None = None
        self._options = {"interval": 0.05} | options

    def __call__(self, admission: Admission, pool: CorePool) -> Dashboard:
        # The front end's own occupancy is that of its admission.
        self.live = self.live or LiveStats(admission.occupancy)
        self.live.watch(pool)
        self.dashboard = Dashboard(self.live, admission, "a front end", **self._options)
        return self.dashboard

    def watch(self, occupancy: Occupancy) -> EdgeOptions:
        """Returns how requests are taken in so that they are counted."""
        self.live = LiveStats(occupancy)
        return EdgeOptions(watcher=RequestTelemetry(Meter(), Tracing(), self.live))

    @property
    def viewers(self) -> int:
        assert self.dashboard is not None
        return self.dashboard.viewers
