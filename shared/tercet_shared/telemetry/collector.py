"""Whether there is a collector, and where: by ``--otlp-endpoint`` or by OpenTelemetry's own variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENDPOINTS: Final = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)


def collector_named(endpoint: str | None, environ: Mapping[str, str]) -> bool:
    """Returns whether settings or environment name a collector.

    Raises:
        ConfigurationError: ``endpoint`` is no address.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if endpoint is not None:
        checked_endpoint(endpoint)
        return True
    return any(environ.get(name) for name in _ENDPOINTS)


def checked_endpoint(endpoint: str) -> str:
    """Returns the address of a collector as a URL. Raises `ConfigurationError` when it is none."""
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    parts = urlsplit(url)
    try:
        sound = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        sound = False
    if not sound:
        raise ConfigurationError(
            f"{endpoint!r} is no address of a collector: give http://host:port or https://host:port.",
            param="otlp_endpoint",
        )
    return url
