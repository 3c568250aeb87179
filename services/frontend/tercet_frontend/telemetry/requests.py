"""Hears of every request, and makes numbers and spans of it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.trace import SpanKind

from tercet_frontend.telemetry.fleet import FleetMetrics
from tercet_frontend.telemetry.generations import WatchedGeneration
from tercet_frontend.telemetry.metrics import PROVIDER, RequestMetrics, Tenants
from tercet_frontend.telemetry.watch import CLIENT_CLOSED, Watch, Watcher
from tercet_shared.errors import TercetError, status_of
from tercet_shared.telemetry.tracing import written

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from opentelemetry.trace import SpanContext
    from opentelemetry.util.types import AttributeValue

    from tercet_frontend.access.exchange import Exchange
    from tercet_frontend.cores.interface import Generation, GenerationRequest
    from tercet_frontend.telemetry.fleet import Pool
    from tercet_frontend.telemetry.live import LiveStats
    from tercet_shared.registry.interface import Fleet
    from tercet_shared.telemetry.instruments import Labels, Meter
    from tercet_shared.telemetry.spans import Span
    from tercet_shared.telemetry.tracing import Tracing

API: Final = "/v1/"
"""What begins like this is traced; pages and probes are not."""

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""``gen_ai.operation.name`` of the routes that ask a model."""

GAP_EVERY: Final = 16
"""Of so many choices the gaps between tokens of one are measured."""

MAX_PATH: Final = 200
"""Characters of a path that a span has."""

_ABORTS = {"request_cancelled": "cancelled", CLIENT_CLOSED: "client_closed"}
_METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH"})


class RequestTelemetry(Watcher):
    """See the module.

    Args:
        meter: gets the instruments.
        tracing: decides who is traced.
        live: what happens right now.
    """

    def __init__(self, meter: Meter, tracing: Tracing, live: LiveStats) -> None:
        self.metrics = RequestMetrics(meter)
        self.fleet = FleetMetrics(meter)
        self.tenants = Tenants()
        self.live = live
        self._tracing = tracing
        self._choices = 0

    def watch(self, pool: Pool, fleet: Fleet) -> None:
        """Shows these cores, and this registry, from now on."""
        self.fleet.watch(pool, fleet)
        self.live.watch(pool)

    def begin(self, scope: MutableMapping[str, Any], exchange: Exchange) -> Watch:
        """See `Watcher`. The trace context of a traced request is from now on that of its span."""
        self.metrics.opened()
        span = None
        path = scope["path"]
        if path.startswith(API):
            span = self._tracing.enter(f"{scope['method']} {OPERATIONS.get(path, API)}", exchange.traceparent)
            if span is not None:
                exchange.traceparent = written(span.context)
        return _RequestWatch(self, scope, exchange, span)

    def choice(self, exchange: Exchange, request: GenerationRequest) -> tuple[GenerationRequest, Span | None]:
        """Returns a choice as it is to be submitted, and the span that goes with it."""
        span = self._tracing.follow("tercet.choice", exchange.traceparent, SpanKind.CLIENT)
        if span is None:
            return request, None
        params = request.params
        span.set(
            {
                "tercet.request.id": request.request_id,
                "gen_ai.request.model": request.model,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.usage.input_tokens": len(request.prompt_ids),
            }
        )
        return replace(request, traceparent=written(span.context)), span

    def gap(self) -> Callable[[float], None] | None:
        """Returns who is told the gaps between the tokens of the next choice, if anybody is."""
        self._choices += 1
        return None if self._choices % GAP_EVERY else self._gap

    def _gap(self, seconds: float) -> None:
        self.metrics.gaps.record(seconds)
        self.live.gaps.record(seconds)


class _RequestWatch(Watch):
    __slots__ = ("_all", "_begin", "_exchange", "_first", "_last", "_scope", "_span", "_streamed")

    def __init__(
        self, telemetry: RequestTelemetry, scope: MutableMapping[str, Any], exchange: Exchange, span: Span | None
    ) -> None:
        self._all = telemetry
        self._scope = scope
        self._exchange = exchange
        self._span = span
        self._begin = time.perf_counter()
        self._first = self._last = 0.0
        self._streamed = False

    def streaming(self) -> None:
        if not self._streamed:
            self._streamed = True
            self._all.metrics.streaming()

    def submit(self, submit: Callable[[GenerationRequest], Generation], request: GenerationRequest) -> Generation:
        span = None
        if self._span is not None:
            request, span = self._all.choice(self._exchange, request)
        gap = self._all.gap()
        if span is None and gap is None:
            return submit(request)
        try:
            return WatchedGeneration(submit(request), span, gap)
        except TercetError as error:
            if span is not None:
                span.set({"error.type": _code(error)})
                span.end()
            raise

    def first_token(self) -> None:
        if self._first:
            return
        self._first = time.perf_counter()
        seconds = self._first - self._begin
        self._all.live.first_tokens.record(seconds)
        self._all.metrics.first_token.record(seconds, self._labels(), self._context())
        if self._span is not None:
            self._span.event("tercet.first_token")

    def generated(self) -> None:
        self._last = time.perf_counter()

    def ended(self, status: int) -> None:
        now = time.perf_counter()
        metrics, scope, exchange = self._all.metrics, self._scope, self._exchange
        metrics.closed(streamed=self._streamed)
        route = self._route()
        metrics.http.record(now - self._begin, _http_labels(scope, route, status), self._context())
        outcome = _outcome(exchange.error, status)
        if scope["path"].startswith(API):
            self._count(outcome, status)
        if route in OPERATIONS:
            self._all.live.ended(failed=outcome != "ok")
            metrics.duration.record(now - self._begin, (*self._labels(), _error(exchange, status)), self._context())
            self._tokens(outcome)
        if self._span is not None:
            self._finish(self._span, route, status)

    def _count(self, outcome: str, status: int) -> None:
        metrics, exchange = self._all.metrics, self._exchange
        metrics.requests.add(1, (outcome, self._all.tenants.label(exchange.key.owner)))
        if outcome == "rejected":
            metrics.rejected.add(1, (_error(exchange, status),))
        elif outcome == "aborted":
            metrics.aborted.add(1, (_ABORTS[exchange.error],))

    def _tokens(self, outcome: str) -> None:
        metrics, exchange = self._all.metrics, self._exchange
        if exchange.prompt_tokens or exchange.output_tokens:
            model, tenant = exchange.model, self._all.tenants.label(exchange.key.owner)
            metrics.usage.add(exchange.prompt_tokens, ("input", model, tenant))
            metrics.usage.add(exchange.output_tokens, ("output", model, tenant))
        later = exchange.output_tokens - max(len(exchange.finish_reasons), 1)  # each choice has a first one
        if outcome == "ok" and self._first and later > 0:
            # Choices run side by side: the time is the longest one's, and so is the number of tokens, about.
            steps = later / max(len(exchange.finish_reasons), 1)
            metrics.per_token.record((self._last - self._first) / steps, self._labels(), self._context())

    def _finish(self, span: Span, route: str, status: int) -> None:
        scope, exchange = self._scope, self._exchange
        operation = OPERATIONS.get(route)
        attributes: dict[str, AttributeValue] = {
            "http.request.method": scope["method"],
            "http.response.status_code": status,
            "url.path": scope["path"][:MAX_PATH],
            "url.scheme": scope.get("scheme", ""),
            "tercet.request.id": exchange.request_id,
            "tercet.streamed": self._streamed,
        }
        if route:
            attributes["http.route"] = route
        if exchange.key.owner:
            attributes["tercet.tenant"] = exchange.key.owner
        if operation is not None:
            span.name = f"{operation} {exchange.model}".rstrip()
            attributes |= {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": exchange.model,
                "gen_ai.response.model": exchange.target,
                "gen_ai.usage.input_tokens": exchange.prompt_tokens,
                "gen_ai.usage.output_tokens": exchange.output_tokens,
                "gen_ai.response.finish_reasons": tuple(exchange.finish_reasons),
            }
        error = _error(exchange, status)
        if error:
            attributes["error.type"] = error
        if status >= 500 or (error and status < 400):
            span.fail(error)
        span.set(attributes)
        span.end()

    def _route(self) -> str:
        return str(getattr(self._scope.get("route"), "path", ""))

    def _labels(self) -> Labels:
        exchange = self._exchange
        return (OPERATIONS.get(self._route(), ""), PROVIDER, exchange.model, exchange.target)

    def _context(self) -> SpanContext | None:
        return None if self._span is None else self._span.context


def _outcome(error: str, status: int) -> str:
    if error in _ABORTS:
        return "aborted"
    if status >= 400:
        return "rejected"
    return "error" if error else "ok"


def _error(exchange: Exchange, status: int) -> str:
    return exchange.error or (str(status) if status >= 400 else "")


def _code(error: TercetError) -> str:
    status = status_of(error)
    return status.code or status.type


def _http_labels(scope: MutableMapping[str, Any], route: str, status: int) -> Labels:
    # What a client may invent must not become a label.
    method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
    return (method, route, str(status), scope.get("scheme", ""))
