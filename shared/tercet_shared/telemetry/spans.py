"""A span while it is open: a few fields, and one call at its end.

OpenTelemetry's SDK takes several times as long for one (locks, limits, checks of every attribute), which counts at full
load; what is exported is the SDK's own type.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.util.types import AttributeValue

Sink: TypeAlias = Callable[[ReadableSpan], None]
"""Takes spans that are over; returns at once."""

Attributes: TypeAlias = "Mapping[str, AttributeValue]"

_SCOPE: Final = InstrumentationScope("tercet")
_UNSET: Final = Status(StatusCode.UNSET)


class Span:
    """Begins when it is made. Used by one thread at a time.

    Attributes:
        context: its ids.
        name: may change until its end.

    Args:
        sink: takes it at its end.
        resource: whose it is.
        name: of the span.
        context: its ids.
        parent: the span above it; None for the first of a trace.
        kind: of the span.
        start_ns: Unix nanoseconds at which it began, if not now.
        attributes: known from the beginning.
        links: spans that it has to do with.
    """

    __slots__ = ("_attributes", "_events", "_kind", "_links", "_parent", "_resource", "_sink", "_start", "_status",
                 "context", "name")  # fmt: skip

    def __init__(
        self,
        sink: Sink,
        resource: Resource,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind = SpanKind.INTERNAL,
        *,
        start_ns: int | None = None,
        attributes: Attributes | None = None,
        links: Sequence[SpanContext] = (),
    ) -> None:
        self.context = context
        self.name = name
        self._sink = sink
        self._resource = resource
        self._parent = parent
        self._kind = kind
        self._start = time.time_ns() if start_ns is None else start_ns
        self._attributes: dict[str, AttributeValue] = {} if attributes is None else {**attributes}
        self._events: list[Event] = []
        self._links = [Link(link) for link in links]
        self._status = _UNSET

    def set(self, attributes: Attributes) -> None:
        """Adds attributes, or replaces their values."""
        self._attributes.update(attributes)

    def event(self, name: str, attributes: Attributes | None = None, time_ns: int | None = None) -> None:
        """Adds something that happened, now if not otherwise said."""
        self._events.append(Event(name, attributes, time_ns))

    def fail(self, reason: str) -> None:
        """Marks it as failed."""
        self._status = Status(StatusCode.ERROR, reason)

    def end(self, end_ns: int | None = None) -> None:
        """Hands it over. Called once."""
        span = ReadableSpan(
            self.name,
            self.context,
            self._parent,
            self._resource,
            self._attributes,
            self._events,
            self._links,
            self._kind,
            status=self._status,
            start_time=self._start,
            end_time=time.time_ns() if end_ns is None else end_ns,
            instrumentation_scope=_SCOPE,
        )
        self._sink(span)
