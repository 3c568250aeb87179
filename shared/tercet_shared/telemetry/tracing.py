"""Which requests are traced, and their spans.

The decision is made once, where a request enters: the sampling flag of its own trace context counts, and without one a
ratio. From there on a W3C ``traceparent`` goes with it only if it is traced, so that what lies behind asks one
question, and what is not traced pays nothing.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Final

from opentelemetry.context import Context, attach
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context

from tercet_shared.telemetry.spans import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_shared.telemetry.spans import Attributes, Sink

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_NOBODY: Final = Resource({})


def parse(traceparent: str) -> SpanContext | None:
    """Returns the span that a W3C ``traceparent`` names; None where it is empty or malformed."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    trace_id, span_id, flags = found.groups()
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))


def written(context: SpanContext) -> str:
    """Returns the ``traceparent`` that names a span."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"


def packed(traceparent: str) -> bytes:
    """Returns the 24 bytes (trace id, span id) of the ``traceparent`` of a traced span."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        raise ValueError("not a traceparent")
    return bytes.fromhex(found[1] + found[2])


def unpacked(raw: bytes) -> SpanContext:
    """Returns the traced span that 24 bytes name."""
    trace_id, span_id = int.from_bytes(raw[:16]), int.from_bytes(raw[16:24])
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=_SAMPLED)


PACKED_BYTES: Final = 24


class Tracing:
    """Starts spans of traced requests.

    Args:
        sink: takes spans that are over; None traces nothing.
        resource: whose spans they are.
        ratio: of traces that begin here, which are sampled.
    """

    def __init__(self, sink: Sink | None = None, resource: Resource = _NOBODY, ratio: float = 1.0) -> None:
        self._sink = sink
        self._resource = resource
        self._sampler = TraceIdRatioBased(ratio)

    def enter(self, name: str, traceparent: str) -> Span | None:
        """Returns the span of a request that enters the system; None where it is not traced.

        Args:
            name: of the span.
            traceparent: that came with the request; its decision counts. Empty: the ratio decides.
        """
        if self._sink is None:
            return None
        parent = parse(traceparent)
        if parent is not None:
            return self._span(name, parent, SpanKind.SERVER) if parent.trace_flags.sampled else None
        trace_id = _random_id(128)
        if self._sampler.should_sample(None, trace_id, name).decision is not Decision.RECORD_AND_SAMPLE:
            return None
        context = SpanContext(trace_id, _random_id(64), is_remote=False, trace_flags=_SAMPLED)
        return Span(self._sink, self._resource, name, context, None, SpanKind.SERVER)

    def follow(self, name: str, traceparent: str, kind: SpanKind = SpanKind.SERVER) -> Span | None:
        """Returns a span below the one that ``traceparent`` names; None unless that is traced."""
        parent = parse(traceparent) if self._sink is not None and traceparent else None
        if parent is None or not parent.trace_flags.sampled:
            return None
        return self._span(name, parent, kind)

    def below(
        self,
        name: str,
        parent: SpanContext,
        *,
        start_ns: int | None = None,
        attributes: Attributes | None = None,
        links: Sequence[SpanContext] = (),
    ) -> Span | None:
        """Returns a span below a traced one; None where nothing is traced.

        Args:
            name: of the span.
            parent: the traced span above it.
            start_ns: Unix nanoseconds at which it began, if not now.
            attributes: known from the beginning.
            links: spans that it has to do with.
        """
        return self._span(name, parent, SpanKind.INTERNAL, start_ns=start_ns, attributes=attributes, links=links)

    def add(
        self, name: str, parent: SpanContext, start_ns: int, end_ns: int, attributes: Attributes | None = None
    ) -> None:
        """Adds a span that is over, below a traced one."""
        span = self._span(name, parent, SpanKind.INTERNAL, start_ns=start_ns, attributes=attributes)
        if span is not None:
            span.end(end_ns)

    def _span(
        self,
        name: str,
        parent: SpanContext,
        kind: SpanKind,
        *,
        start_ns: int | None = None,
        attributes: Attributes | None = None,
        links: Sequence[SpanContext] = (),
    ) -> Span | None:
        if self._sink is None:
            return None
        context = SpanContext(parent.trace_id, _random_id(64), is_remote=False, trace_flags=_SAMPLED)
        return Span(
            self._sink, self._resource, name, context, parent, kind,
            start_ns=start_ns, attributes=attributes, links=links,
        )  # fmt: skip


def _random_id(bits: int) -> int:
    return random.getrandbits(bits) or 1  # 0 is no id


def log_under(traceparent: str) -> None:
    """Lets log records that this task, and tasks that it starts, write from now on carry the ids of a trace."""
    context = parse(traceparent)
    if context is not None:
        attach(set_span_in_context(NonRecordingSpan(context), Context()))
