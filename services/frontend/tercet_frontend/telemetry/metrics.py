"""The instruments of requests (docs/observability.md). All are recorded once per request, few at its first token.

Names and bounds of ``gen_ai.*`` and ``http.*`` are those of OpenTelemetry's semantic conventions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tercet_shared.telemetry.instruments import OTHER, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_frontend.access.occupancy import Occupancy
    from tercet_shared.telemetry.instruments import Meter

PROVIDER: Final = "tercet"
"""``gen_ai.provider.name``."""

MAX_TENANTS: Final = 100
"""Tenants with numbers of their own; further ones are counted together."""

_REQUEST_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_HTTP_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_GENAI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model")


class Tenants:
    """Names for the label of tenants, of which there are not too many."""

    def __init__(self, most: int = MAX_TENANTS) -> None:
        self._most = most
        self._named: set[str] = set()

    def label(self, tenant: str) -> str:
        """Returns the tenant's own name, or that of all who came too late; empty without API keys."""
        if not tenant or tenant in self._named:
            return tenant
        if len(self._named) >= self._most:
            return OTHER
        self._named.add(tenant)
        return tenant


class RequestMetrics:
    """See the module."""

    def __init__(self, meter: Meter) -> None:
        histogram, counter = meter.histogram, meter.counter
        self.duration = histogram(
            "gen_ai.server.request.duration",
            "s",
            "Time of a generation or embedding request, from its head to the end of its answer.",
            _REQUEST_S,
            (*_GENAI, "error.type"),
        )
        self.first_token = histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "Time from a request's head to its first output token; requests without a token have none.",
            _FIRST_S,
            _GENAI,
        )
        self.per_token = histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time per output token after the first, of requests that succeeded.",
            _TOKEN_S,
            _GENAI,
        )
        self.gaps = histogram(
            "tercet.frontend.token_gap",
            "s",
            "Time between chunks of output tokens of one choice, of every 16th choice.",
            _GAP_S,
        )
        self.http = histogram(
            "http.server.request.duration",
            "s",
            "Time of every HTTP request, from its head to the end of its answer.",
            _HTTP_S,
            ("http.request.method", "http.route", "http.response.status_code", "url.scheme"),
        )
        self.usage = counter(
            "tercet.frontend.tokens",
            "{token}",
            "Tokens that clients were told they used: input or output.",
            ("gen_ai.token.type", "gen_ai.request.model", "tercet.tenant"),
        )
        self.requests = counter(
            "tercet.frontend.requests",
            "{request}",
            "API requests that are over, by how: ok, error, rejected before their answer began, or aborted.",
            ("outcome", "tercet.tenant"),
        )
        self.rejected = counter(
            "tercet.frontend.rejections",
            "{request}",
            "API requests that were answered with an error status, by the error's code.",
            ("reason",),
        )
        self.aborted = counter(
            "tercet.frontend.aborts",
            "{request}",
            "API requests that ended because of their client: it left, or cancelled them.",
            ("reason",),
        )
        self._streams = 0
        self._active = 0
        meter.observe(
            Kind.GAUGE, "tercet.frontend.streams", "{stream}", "Answers that are being streamed.", lambda: self._streams
        )
        meter.observe(
            Kind.GAUGE,
            "http.server.active_requests",
            "{request}",
            "HTTP requests whose answers are not complete.",
            lambda: self._active,
        )

    def opened(self) -> None:
        """A request has come."""
        self._active += 1

    def closed(self, *, streamed: bool) -> None:
        """A request is over."""
        self._active -= 1
        self._streams -= streamed

    def streaming(self) -> None:
        """An answer is a stream."""
        self._streams += 1


def observe_edge(meter: Meter, occupancy: Occupancy, connections: Callable[[], int]) -> None:
    """Adds what is known of places and connections."""
    meter.observe(
        Kind.GAUGE,
        "tercet.frontend.requests.running",
        "{request}",
        "Requests for models that were let in, have their first token, and are not over.",
        lambda: occupancy.running - occupancy.waiting,
    )
    meter.observe(
        Kind.GAUGE,
        "tercet.frontend.requests.waiting",
        "{request}",
        "Requests for models that were let in and have no token yet.",
        lambda: occupancy.waiting,
    )
    meter.observe(Kind.GAUGE, "tercet.frontend.connections", "{connection}", "Connections of clients.", connections)
