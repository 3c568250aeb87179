"""A collector that keeps what it receives: OTLP over gRPC, on threads of its own, for tests and `make observe`.

with Collector() as collector:
    ... start services with --otlp-endpoint=collector.endpoint ...
    spans = collector.wait_for(lambda: [span for span in collector.spans if span.name == "tercet.core.request"])
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

T = TypeVar("T")

TIMEOUT = 60.0
"""Seconds after which a wait fails: far beyond what anything takes, also on a loaded machine."""


@dataclass(frozen=True)
class Event:
    """Something that happened within a span."""

    name: str
    time: int
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Span:
    """A span as it was received; times are Unix nanoseconds, ids hexadecimal."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[Event]
    links: list[str]
    failed: bool

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1e9


@dataclass(frozen=True)
class Point:
    """The latest state of one series of a metric."""

    service: str
    name: str
    unit: str
    kind: str
    attributes: dict[str, Any]
    value: float  # of a histogram, how many recordings
    exemplars: list[str] = field(default_factory=list)  # trace ids


class Collector:
    """See the module."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: dict[str, dict[str, Any]] = {}  # by service
        self._points: dict[tuple[Any, ...], Point] = {}
        self._arrived = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(self), self._server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=0).wait()

    def points(self, name: str) -> list[Point]:
        """Returns the series of a metric, as they were told last."""
        return [point for point in list(self._points.values()) if point.name == name]

    def all_points(self) -> list[Point]:
        """Returns every series, as it was told last."""
        return list(self._points.values())

    def trace(self, trace_id: str) -> list[Span]:
        """Returns the spans of a trace, by their beginning."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start)

    def wait_for(self, condition: Callable[[], T], timeout: float = TIMEOUT) -> T:
        """Waits until what has arrived makes ``condition`` true, and returns what that returned."""
        with self._arrived:
            if not self._arrived.wait_for(condition, timeout):
                names = sorted({(span.service, span.name) for span in self.spans})
                raise TimeoutError(f"it did not arrive within {timeout} s; spans: {names}")
            return condition()

    def take_spans(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        with self._arrived:
            for resource in request.resource_spans:
                who = _attributes(resource.resource.attributes)
                service = str(who["service.name"])
                self.resources[service] = who
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self.spans.append(
                            Span(
                                service=service,
                                name=span.name,
                                trace_id=span.trace_id.hex(),
                                span_id=span.span_id.hex(),
                                parent_id=span.parent_span_id.hex(),
                                kind=span.kind,
                                start=span.start_time_unix_nano,
                                end=span.end_time_unix_nano,
                                attributes=_attributes(span.attributes),
                                events=[
                                    Event(event.name, event.time_unix_nano, _attributes(event.attributes))
                                    for event in span.events
                                ],
                                links=[link.span_id.hex() for link in span.links],
                                failed=span.status.code == span.status.STATUS_CODE_ERROR,
                            )
                        )
            self._arrived.notify_all()

    def take_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        with self._arrived:
            for resource in request.resource_metrics:
                who = _attributes(resource.resource.attributes)
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        self._take_metric(str(who["service.name"]), metric)
            self._arrived.notify_all()

    def _take_metric(self, service: str, metric: Metric) -> None:
        kind = str(metric.WhichOneof("data"))
        for point in getattr(metric, kind).data_points:
            attributes = _attributes(point.attributes)
            if kind == "histogram":
                value = float(point.count)
            else:
                value = point.as_double if point.HasField("as_double") else float(point.as_int)
            exemplars = [exemplar.trace_id.hex() for exemplar in point.exemplars]
            key = (service, metric.name, *sorted(attributes.items()))
            self._points[key] = Point(service, metric.name, metric.unit, kind, attributes, value, exemplars)


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:  # noqa: N802
        self._collector.take_spans(request)
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> metrics_service_pb2.ExportMetricsServiceResponse:  # noqa: N802
        self._collector.take_metrics(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return None if kind is None else getattr(value, kind)
