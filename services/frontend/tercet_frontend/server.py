"""The front end's process: HTTP first, then the tokenizer, then the cores; and its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from dataclasses import replace
from secrets import token_hex
from typing import TYPE_CHECKING, Protocol, TypeVar

import uvicorn

from tercet_frontend.access.connection import ConnectionLimits, limited_protocol
from tercet_frontend.access.guard import Guard
from tercet_frontend.admission import Admission
from tercet_frontend.api.dashboard import Dashboard
from tercet_frontend.app import create_app
from tercet_frontend.backend import run_backend
from tercet_frontend.conversations import MemoryResponses, RedisResponses
from tercet_frontend.fleets import TIMEOUT
from tercet_frontend.listening import process_listener, shared_listener
from tercet_frontend.others import OtherFrontEnds
from tercet_frontend.telemetry.live import LiveStats
from tercet_frontend.telemetry.metrics import observe_edge
from tercet_frontend.telemetry.requests import RequestTelemetry
from tercet_frontend.tokenizing import PromptEncoder
from tercet_shared.errors import ConfigurationError
from tercet_shared.registry.client import close_client, redis_client
from tercet_shared.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.types import ASGIApp

    from tercet_frontend.access.notes import Notes
    from tercet_frontend.access.tls import ServerTls
    from tercet_frontend.conversations import ResponseStore
    from tercet_shared.config import FrontendSettings
    from tercet_shared.lifecycle.report import Reporter

LAST_WORDS = 0.3
"""Seconds after the grace for the errors with which running requests end; then connections are closed."""

_KEEP_ALIVE = 75
"""Seconds that an idle connection is kept: longer than clients and load balancers keep theirs, so that none of them
sends a request into a connection that is being closed."""

_BACKLOG = 2_048


class HttpServer:
    """uvicorn in this process's event loop, on sockets that are already open. Signals are not its business.

    Args:
        app: the application.
        listeners: the sockets.
        limits: of connections.
        tls: None for plain HTTP.
        notes: where connections are logged that were refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        *listeners: socket.socket,
        limits: ConnectionLimits | None = None,
        tls: ServerTls | None = None,
        notes: Notes | None = None,
    ) -> None:
        self._listeners = list(listeners)
        limits = ConnectionLimits() if limits is None else limits
        config = uvicorn.Config(
            app,
            http=limited_protocol(limits) if notes is None else limited_protocol(limits, notes.refused),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            backlog=_BACKLOG,
        )
        config.load()
        config.ssl = None if tls is None else tls.context
        self._server = _Uvicorn(config)

    async def run(self) -> None:
        """Serves until `stop`; returns when all connections are closed."""
        await self._server.serve(sockets=self._listeners)

    async def wait_until_up(self) -> None:
        """Returns when requests are answered."""
        await self._server.up.wait()

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._server.server_state.connections)

    def stop(self) -> None:
        """Accepts no more connections, closes idle ones, and the others after their response."""
        self._server.should_exit = True

    def cut(self) -> None:
        """Closes all connections that are left, whatever they are doing."""
        for connection in list(self._server.server_state.connections):
            transport = connection.transport
            if transport is not None:
                transport.abort()
        self._server.force_exit = True


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: FrontendSettings, reporter: Reporter, stop: asyncio.Event) -> None:
    """Runs the front end until ``stop`` is set, then ends it within the grace of ``settings`` and a little.

    Raises:
        ConfigurationError: the address cannot be listened on, or settings cannot work.
        CheckpointError: the model's tokenizer or configuration cannot be read.
    """
    async with _closing(Guard(settings)) as guard, _closing(_store(settings)) as store:
        await _serve(settings, reporter, stop, guard, store)


async def _serve(
    settings: FrontendSettings, reporter: Reporter, stop: asyncio.Event, guard: Guard, store: ResponseStore
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        encoder = stack.enter_context(PromptEncoder())
        listeners = [stack.enter_context(_listener(settings))]
        if settings.process_socket is not None:
            listeners.append(stack.enter_context(process_listener(settings.process_socket)))
        port = listeners[0].getsockname()[1]
        admission = Admission(guard.occupancy)
        frontend_id = f"{socket.gethostname()}-{os.getpid()}-{token_hex(4)}"
        telemetry = Telemetry("tercet-frontend", settings, instance=frontend_id, ready=admission.not_ready_reason)
        watcher = RequestTelemetry(telemetry.meter, telemetry.tracing, LiveStats(guard.occupancy))
        others = await stack.enter_async_context(_others(settings, frontend_id, admission))
        dashboard = Dashboard(watcher.live, admission, frontend_id) if settings.dashboard else None
        app = create_app(
            admission=admission,
            encoder=encoder,
            keys=guard.keys,
            max_body_bytes=int(settings.max_body_bytes),
            chat_page=settings.chat_page,
            store=store,
            quotas=guard.quotas,
            edge=replace(guard.edge, watcher=watcher),
            receive_timeout=settings.receive_timeout,
            others=others,
            dashboard=dashboard,
        )
        http = HttpServer(app, *listeners, limits=guard.limits, tls=guard.tls, notes=guard.notes)
        observe_edge(telemetry.meter, guard.occupancy, lambda: http.connections)
        await stack.enter_async_context(telemetry)
        able = asyncio.Event()
        async with guard.reloading(), asyncio.TaskGroup() as group:
            counting = group.create_task(guard.quotas.run())
            backend = group.create_task(run_backend(settings, reporter, admission, able, frontend_id, watcher.watch))
            hearing = None if others is None else group.create_task(others.run())
            if settings.accept_when_ready:
                await _first_of(able, stop)
            if not (settings.accept_when_ready and stop.is_set()):
                server = group.create_task(http.run())
                await http.wait_until_up()
                if settings.listen_fd is not None:  # there are others, so this one counts when it can serve
                    await _first_of(able, stop)
                url = _url(settings.host, port, guard.tls)
                guard.notes.event("start", f"The front end listens on {url}.")
                reporter.ready(port=port, url=url)
                await stop.wait()
                admission.leave()
                await asyncio.sleep(settings.drain_delay)
                admission.drain()
                if dashboard is not None:
                    dashboard.close()
                http.stop()
                await _wind_down(server, http, admission, settings.grace)
            backend.cancel()
            counting.cancel()
            if hearing is not None:
                hearing.cancel()
            guard.notes.event("stop", "The front end has stopped, as it was asked to.")


def _listener(settings: FrontendSettings) -> socket.socket:
    if settings.listen_fd is not None:
        return shared_listener(settings.listen_fd)
    return open_listener(settings.host, settings.port)


async def _first_of(*events: asyncio.Event) -> None:
    """Returns when one of ``events`` is set."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


@contextlib.asynccontextmanager
async def _others(
    settings: FrontendSettings, frontend_id: str, admission: Admission
) -> AsyncIterator[OtherFrontEnds | None]:
    if settings.redis_url is None:
        yield None
        return
    client = redis_client(settings.redis_url, timeout=TIMEOUT)
    try:
        yield OtherFrontEnds(client, settings.redis_prefix, frontend_id, admission.running)
    finally:
        await close_client(client)


def _store(settings: FrontendSettings) -> ResponseStore:
    if settings.redis_url is None:
        return MemoryResponses(ttl=settings.response_ttl)
    return RedisResponses(settings.redis_url, ttl=settings.response_ttl)


class _Closable(Protocol):
    async def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


@contextlib.asynccontextmanager
async def _closing(thing: C) -> AsyncIterator[C]:
    try:
        yield thing
    finally:
        await thing.close()


async def _wind_down(server: asyncio.Task[None], http: HttpServer, admission: Admission, grace: float) -> None:
    done, _ = await asyncio.wait((server,), timeout=grace)
    if done:
        return
    admission.expire()
    done, _ = await asyncio.wait((server,), timeout=LAST_WORDS)
    if not done:
        http.cut()
        await asyncio.wait((server,))


def open_listener(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on ``host`` and ``port``; 0 takes a free port.

    Raises:
        ConfigurationError: that is not possible; the sentence says why.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigurationError(f"The host {host!r} is not an address of this machine.", param="host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # At once: until a socket listens, another process may still take the port.
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        reasons = {
            errno.EADDRINUSE: "it is in use by another program; choose another with --port",
            errno.EACCES: "this user may not open it; choose one above 1023 with --port",
            errno.EADDRNOTAVAIL: "this machine does not have that address",
        }
        reason = reasons.get(error.errno or 0, os.strerror(error.errno or 0))
        raise ConfigurationError(f"Cannot listen on port {port} of {host}: {reason}.", param="port") from None
    return listener


def _url(host: str, port: int, tls: ServerTls | None = None) -> str:
    scheme = "http" if tls is None else "https"
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104  # compared, not bound
    return f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"
