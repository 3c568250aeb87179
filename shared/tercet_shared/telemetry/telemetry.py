"""All telemetry of one process, from its settings."""

from __future__ import annotations

import asyncio
import os
import threading
from secrets import token_hex
from typing import TYPE_CHECKING, Final, Self

from opentelemetry.sdk.resources import Resource

from tercet_shared.telemetry.collector import collector_named
from tercet_shared.telemetry.endpoint import Endpoint, Reason, always
from tercet_shared.telemetry.exposition import PrometheusText
from tercet_shared.telemetry.instruments import Meter
from tercet_shared.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from types import TracebackType

    from tercet_shared.config import Common
    from tercet_shared.telemetry.delivery import Delivery

CLOSE_S: Final = 1.0
"""Seconds that the end of a process may take for what it has not delivered."""


class Telemetry:
    """The meter and the tracing of a service, and where they can be read. An async context manager.

    Entering it opens the port and begins to deliver; leaving it takes at most about `CLOSE_S` seconds, whatever a
    collector does. With neither a port nor a collector in the settings, nothing runs, and nothing is traced.

    Attributes:
        meter: makes instruments; to be filled before anybody reads.
        tracing: starts spans.
        port: where ``/metrics`` is, once it is entered; None for nowhere.

    Args:
        service: OpenTelemetry's ``service.name``.
        settings: of the service.
        instance: OpenTelemetry's ``service.instance.id``; by default one is made up.
        alive: why the process should be replaced; see `Endpoint`.
        ready: why it cannot do its work now.

    Raises:
        ConfigurationError: on construction or on entering: an address cannot be used.
    """

    def __init__(
        self,
        service: str,
        settings: Common,
        *,
        instance: str = "",
        alive: Reason = always,
        ready: Reason = always,
    ) -> None:
        self.meter = Meter()
        self.port: int | None = None
        self._host = settings.metrics_host
        self._wanted_port = settings.metrics_port
        own = {"service.name": service, "service.instance.id": instance or token_hex(8)}
        self._delivery = self._deliver(own, settings)
        self.tracing = Tracing() if self._delivery is None else self._delivery.tracing
        self._endpoint = Endpoint(PrometheusText(self.meter, own), alive=alive, ready=ready)

    @property
    def wanted(self) -> bool:
        """Whether anybody reads the meter."""
        return self._wanted_port is not None or self._delivery is not None

    async def __aenter__(self) -> Self:
        if self._wanted_port is not None:
            self.port = await self._endpoint.start(self._host, self._wanted_port)
        if self._delivery is not None:
            self._delivery.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._endpoint.close()
        if self._delivery is not None:
            await _beside(self._delivery)

    def _deliver(self, own: dict[str, str], settings: Common) -> Delivery | None:
        if not collector_named(settings.otlp_endpoint, os.environ):
            return None
        # Not imported where it is not used: it takes a while, and memory.
        from tercet_shared.telemetry.delivery import Delivery  # noqa: PLC0415

        resource = Resource.create(dict(own))
        return Delivery(resource, self.meter, endpoint=settings.otlp_endpoint, ratio=settings.trace_ratio)


async def _beside(delivery: Delivery) -> None:
    """Closes it on a daemon thread, so that neither the loop nor the end of the process waits for a collector."""
    loop = asyncio.get_running_loop()
    closed = loop.create_future()

    def close() -> None:
        delivery.close(CLOSE_S)
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle, closed)

    threading.Thread(target=close, name="close telemetry", daemon=True).start()
    await asyncio.wait({closed}, timeout=CLOSE_S * 1.5)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
