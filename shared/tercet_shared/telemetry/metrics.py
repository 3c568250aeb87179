"""Metrics of one process: an OpenTelemetry meter, and a port on which Prometheus reads it.

Nothing is global: whoever starts a service makes one `Metrics`, hands its meter to what measures, and closes it. State
is read by observable instruments when somebody asks, so that the hot path pays nothing for gauges and counters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from prometheus_client import start_http_server
from prometheus_client.registry import CollectorRegistry

from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    import threading
    from wsgiref.simple_server import WSGIServer

    from opentelemetry.metrics import Meter

SECONDS_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Bounds of every histogram of seconds: from a plan (0.1 ms) to a long answer."""


class Metrics:
    """The meter of a service and where it can be read.

    Args:
        service: OpenTelemetry's ``service.name``.
        port: of the Prometheus endpoint ``/metrics``; 0 takes a free one, None makes none.
        host: address of that endpoint.

    Raises:
        ConfigurationError: the port cannot be used.
    """

    def __init__(self, service: str, *, port: int | None, host: str = "127.0.0.1") -> None:
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        registry = CollectorRegistry()
        self._reader = PrometheusMetricReader(registry=registry) if port is not None else None
        self._provider = MeterProvider(
            resource=Resource.create({"service.name": service}),
            metric_readers=[self._reader] if self._reader is not None else [],
            views=[View(instrument_unit="s", aggregation=ExplicitBucketHistogramAggregation(SECONDS_BUCKETS))],
        )
        self.meter: Meter = self._provider.get_meter("tercet")
        self.port: int | None = None
        if port is not None:
            try:
                self._server, self._thread = start_http_server(port, host, registry=registry)
            except OSError as error:
                raise ConfigurationError(
                    f"metrics cannot be served on {host}:{port}: {error.strerror}", param="metrics_port"
                ) from error
            self.port = self._server.server_port

    def close(self) -> None:
        """Stops serving and forgets the instruments."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._thread is not None:
            self._thread.join()
        self._provider.shutdown()
