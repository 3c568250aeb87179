"""The port for those who watch: ``/metrics`` for Prometheus, ``/livez`` and ``/readyz`` for orchestrators.

It is served by the service's own event loop, so that an answer to ``/livez`` proves that the loop turns. Every
connection has one request, and a few seconds for it.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from tercet_shared.telemetry.exposition import PrometheusText

_log = logging.getLogger(__name__)

Reason = Callable[[], str | None]
"""Returns why something is not so, in one sentence, or None when it is."""

_TIMEOUT_S: Final = 5.0
_MAX_HEAD: Final = 16 * 1024
_MAX_CONNECTIONS: Final = 32
_JSON: Final = "application/json"


def always() -> str | None:
    """A `Reason` of what is always so."""
    return None


class Endpoint:
    """The small HTTP server. `start` and `close` it on one event loop.

    Args:
        metrics: the text of ``/metrics``.
        alive: why the process should be replaced.
        ready: why it cannot do its work now.
    """

    def __init__(self, metrics: PrometheusText, *, alive: Reason = always, ready: Reason = always) -> None:
        self._metrics = metrics
        self._reasons = {"/livez": alive, "/readyz": ready}
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port, which is a free one where ``port`` is 0.

        Raises:
            ConfigurationError: that is not possible.
        """
        try:
            self._server = await asyncio.start_server(self._connected, host, port, limit=_MAX_HEAD)
        except OSError as error:
            reason = "it is in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
            raise ConfigurationError(
                f"Metrics cannot be served on {host}:{port}: {reason}.", param="metrics_port"
            ) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        _log.info("metrics are at http://%s:%d/metrics", host, bound)
        return bound

    async def close(self) -> None:
        """Stops listening, and cuts connections that are left."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._connections) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head.decode("latin-1")))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()  # whoever asked is gone, slow, or speaks no HTTP
        except asyncio.CancelledError:
            writer.transport.abort()  # by `close`; streams would log it
        finally:
            writer.close()
            self._connections.discard(task)

    def _response(self, head: str) -> bytes:
        request, _, fields = head.partition("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        status, media_type, body = self._answer(method, path, _field(fields, "accept"))
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Content-Type: {media_type}",
            f"Content-Length: {len(body)}",
            "Connection: close",
            "\r\n",
        )
        return "\r\n".join(lines).encode("latin-1") + (b"" if method == "HEAD" else body)

    def _answer(self, method: str, path: str, accept: str) -> tuple[HTTPStatus, str, bytes]:
        if method not in {"GET", "HEAD"}:
            return HTTPStatus.METHOD_NOT_ALLOWED, _JSON, b"{}"
        if path == "/metrics":
            text, media_type = self._metrics.text(accept)
            return HTTPStatus.OK, media_type, text
        reason = self._reasons.get(path)
        if reason is None:
            return HTTPStatus.NOT_FOUND, _JSON, b"{}"
        why = reason()
        if why is None:
            return HTTPStatus.OK, _JSON, b'{"status":"ok"}'
        return HTTPStatus.SERVICE_UNAVAILABLE, _JSON, json.dumps({"status": "not ok", "reason": why}).encode()


def _field(fields: str, name: str) -> str:
    for line in fields.split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == name:
            return value.strip()
    return ""
