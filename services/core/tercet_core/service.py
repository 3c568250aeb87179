"""The core as a gRPC service: streams of front ends, and a few calls for people and probes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]  # the stubs leave it out

from tercet_core.kv_cache.published import PublishedBlocks
from tercet_core.scheduling.request import FrontEnd
from tercet_core.streams.connection import PROTOCOL_VERSION, FrontEndConnection
from tercet_core.streams.encoding import error_kind, stats_of
from tercet_proto.v1 import engine_pb2 as pb
from tercet_proto.v1 import engine_pb2_grpc as pb_grpc
from tercet_proto.v1 import link_pb2_grpc as link_grpc
from tercet_shared.errors import ConfigurationError, UnavailableError
from tercet_shared.ipc.claim import SocketClaim
from tercet_shared.mtls import is_local, mutual_tls

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_core.engine import Engine
    from tercet_core.observer import Observer
    from tercet_core.scheduling.outputs import Output
    from tercet_core.scheduling.request import Request
    from tercet_core.scheduling.scheduler import Scheduler
    from tercet_core.streams.connection import FrameContext
    from tercet_shared.config import CoreSettings
    from tercet_shared.errors import TercetError
    from tercet_shared.ipc.remote_listener import RemoteListener
    from tercet_shared.wire.step import CoreWelcome, WorkerHello

_log = logging.getLogger(__name__)

_COUNT_INTERVAL = 0.1
"""Seconds for which a count of the tokens to compute is good enough."""

LIVENESS = "liveness"
"""Name of the health check that fails when the core hangs."""

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Engine"].full_name


class EngineService(pb_grpc.EngineServicer):
    """Serves front ends. Useful from `attach` on, when there is an engine; until then streams are kept waiting."""

    def __init__(self, core_id: str, settings: CoreSettings) -> None:
        self.model_fingerprint = ""
        self._core_id = core_id
        self._settings = settings
        self._connections: dict[FrontEnd, FrontEndConnection] = {}
        self._next_number = 0
        self._engine: Engine | None = None
        self._welcome: asyncio.Future[pb.Welcome] = asyncio.get_running_loop().create_future()
        self._draining = ""
        self._hung = ""
        self._watchers: list[Callable[[], None]] = []
        self._pending = 0
        self._count_again_at = 0.0
        self._observer: Observer | None = None

    @property
    def core_id(self) -> str:
        """Name of this core."""
        return self._core_id

    def attach(self, engine: Engine, hello: WorkerHello, limits: CoreWelcome) -> None:
        """Begins to take requests."""
        self._engine = engine
        self.model_fingerprint = hello.model_fingerprint
        self._welcome.set_result(
            pb.Welcome(
                protocol=PROTOCOL_VERSION,
                core_id=self._core_id,
                incarnation=hello.incarnation,
                model_name=hello.model_name,
                model_fingerprint=hello.model_fingerprint,
                tokenizer_fingerprint=hello.tokenizer_fingerprint,
                vocab_size=hello.vocab_size,
                block_size=hello.block_size,
                num_blocks=hello.num_blocks,
                max_slots=limits.max_slots,
                max_model_len=limits.max_model_len,
                max_submit_bytes=int(self._settings.max_message_bytes),
                served_names=self._settings.served_model_name,
            )
        )

    def renew(self, hello: WorkerHello) -> None:
        """Tells all front ends, those that come later too, what has changed with another worker."""
        welcome = pb.Welcome()
        welcome.CopyFrom(self._welcome.result())
        welcome.incarnation, welcome.num_blocks = hello.incarnation, hello.num_blocks
        self._welcome = asyncio.get_running_loop().create_future()
        self._welcome.set_result(welcome)
        for connection in self._connections.values():
            connection.renew(welcome)
        self._changed()

    def hang(self, reason: str) -> None:
        """Answers from now on that this core does not work any more, and takes nothing new."""
        self._hung = reason
        self._changed()

    def publish(self, output: Output) -> None:
        """Hands rows to their front end; those of a front end that has left are dropped."""
        connection = self._connections.get(output.front_end)
        if connection is not None:
            connection.publish(output)

    def drain(self, reason: str) -> int:
        """Takes no new requests from now on, and tells all front ends; returns the requests that have not ended."""
        self._draining = reason
        for connection in self._connections.values():
            connection.outbox.put_frame(pb.EngineFrame(draining=pb.Draining(reason=reason)))
        self._changed()
        return sum(connection.num_requests for connection in self._connections.values())

    def close_streams(self) -> None:
        """Ends every stream once it has carried what waits for it."""
        for connection in self._connections.values():
            connection.close()

    @property
    def introduction(self) -> pb.Welcome:
        """What this core is, as front ends are told; there is a worker by now."""
        return self._welcome.result()

    @property
    def takes_requests(self) -> bool:
        """Whether new requests are taken, as soon as there is a worker."""
        return not (self._draining or self._hung)

    def on_change(self, changed: Callable[[], None]) -> None:
        """Has ``changed`` called when it ceases to take requests, or is not what it was."""
        self._watchers.append(changed)

    def _changed(self) -> None:
        for changed in self._watchers:
            changed()

    # ---------------------------------------------------------------------------------------- Host of the streams

    @property
    def draining(self) -> str:
        """Why no new requests are taken, or empty."""
        return self._draining

    def block_log(self) -> PublishedBlocks:
        """Returns where block events are; there is a worker by now."""
        if self._engine is None:
            raise AssertionError("there is no engine yet")
        return PublishedBlocks(self._engine.scheduler)

    async def welcome(self) -> pb.Welcome:
        """Waits until there is an engine, and returns what front ends are told."""
        return await asyncio.shield(self._welcome)

    def current_scheduler(self) -> Scheduler | None:
        """Returns the scheduler, or None before there is one."""
        return self._engine.scheduler if self._engine is not None else None

    def outbox_rows(self) -> int:
        """Returns the rows that wait for front ends."""
        return sum(connection.outbox.pending_rows for connection in list(self._connections.values()))

    def num_front_ends(self) -> int:
        """Returns the front ends that are connected."""
        return len(self._connections)

    def has_worker(self) -> bool:
        """Returns whether a worker is connected."""
        return self._engine is not None and self._engine.has_worker

    def not_ready_reason(self) -> str | None:
        """Returns why no request would be taken now, in one sentence, or None."""
        reason = self._hung or self._draining
        return reason or (None if self.has_worker() else "waiting for the worker")

    def not_live_reason(self) -> str | None:
        """Returns why the process should be replaced, in one sentence, or None."""
        return self._hung or None

    def observe(self, observer: Observer) -> None:
        """Has ``observer`` told of requests that are not taken."""
        self._observer = observer

    def stats(self) -> pb.Stats:
        """Returns the current numbers; zeros before there is an engine."""
        if self._engine is None:
            return pb.Stats()
        return stats_of(
            self._engine.scheduler,
            self._engine.step_seconds,
            token_seconds=self._engine.token_rate.token_seconds,
            pending_tokens=self._pending_tokens(self._engine.scheduler),
            without_worker_s=self._engine.without_worker_s,
            worker_left=self._engine.worker_left,
        )

    def _pending_tokens(self, scheduler: Scheduler) -> int:
        """Returns the tokens to compute, from a moment ago at most: with a long queue it takes a while to count."""
        now = asyncio.get_running_loop().time()
        if not scheduler.num_running + scheduler.num_waiting:
            self._pending = 0
        elif now >= self._count_again_at:
            self._pending = scheduler.pending_tokens()
            self._count_again_at = now + _COUNT_INTERVAL
        return self._pending

    def submit(self, request: Request) -> None:
        """Takes a request. Raises `RequestError`, or `UnavailableError` when none can be taken now."""
        if self._hung:
            raise UnavailableError(self._hung)
        if self._draining:
            raise UnavailableError(f"This core takes no new requests: {self._draining}")
        if self._engine is None:
            raise UnavailableError("This core waits for its worker.")
        self._engine.submit(request)

    def end(self, requests: list[Request], reason: str) -> None:
        """Ends requests, for a reason in one word; those that ended already are left alone."""
        if self._engine is not None and requests:
            self._engine.end(requests, reason)

    def rejected(self, error: TercetError) -> None:
        """Hears that a request was not taken."""
        if self._observer is not None:
            self._observer.rejected(pb.ErrorKind.Name(error_kind(error)).removeprefix("ERROR_KIND_").lower())

    # ---------------------------------------------------------------------------------------- gRPC

    async def Connect(self, request_iterator: object, context: FrameContext) -> None:  # noqa: N802, ARG002
        """Serves one front end until its stream ends."""
        number = FrontEnd(self._next_number)
        self._next_number += 1
        connection = FrontEndConnection(
            number,
            self,
            heartbeat_interval=self._settings.heartbeat_interval,
            heartbeat_timeout=self._settings.heartbeat_timeout,
        )
        self._connections[number] = connection
        try:
            await connection.serve(context)
        finally:
            del self._connections[number]

    async def Info(self, request: pb.InfoRequest, context: object) -> pb.InfoReply:  # noqa: N802, ARG002
        """Returns what this core is and how loaded."""
        reason = self.not_ready_reason()
        return pb.InfoReply(
            welcome=self._welcome.result() if self._welcome.done() else None,
            stats=self.stats(),
            ready=reason is None,
            not_ready_reason=reason,
        )

    async def Drain(self, request: pb.DrainRequest, context: object) -> pb.DrainReply:  # noqa: N802, ARG002
        """Takes no new requests from now on."""
        return pb.DrainReply(unfinished=self.drain(request.reason or "asked to drain"))

    async def ResetPrefixCache(  # noqa: N802
        self,
        request: pb.ResetPrefixCacheRequest,  # noqa: ARG002
        context: object,  # noqa: ARG002
    ) -> pb.ResetPrefixCacheReply:
        """Forgets all cached prefixes."""
        dropped = self._engine.scheduler.reset_prefix_cache() if self._engine is not None else 0
        return pb.ResetPrefixCacheReply(dropped_blocks=dropped)


class HealthChecks:
    """Answers the standard gRPC health checks of this service and of the server as a whole."""

    def __init__(self, servicer: health_pb2_grpc.HealthServicer) -> None:
        self.servicer = servicer

    async def set_serving(self, *, serving: bool) -> None:
        """Answers SERVING or NOT_SERVING from now on."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self.servicer.set(name, status)

    async def set_live(self, *, live: bool) -> None:
        """Answers from now on, under the name `LIVENESS`, whether the process is worth keeping."""
        status = health_pb2.HealthCheckResponse.SERVING if live else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.servicer.set(LIVENESS, status)


def claim_of(address: str) -> SocketClaim | None:
    """Returns the claim to the path of a Unix address, for which gRPC does not ask; None for other addresses."""
    path = address.removeprefix("unix:")
    return SocketClaim(Path(path)) if path != address else None


def make_server(
    service: EngineService, workers: RemoteListener, settings: CoreSettings
) -> tuple[grpc.aio.Server, HealthChecks]:
    """Returns a server that is bound but not started. The path of a Unix address must have been claimed.

    Args:
        service: what front ends call.
        workers: what workers on other hosts attach to.
        settings: the address, and what messages may have.

    Raises:
        ConfigurationError: the address cannot be used.
    """
    limit = int(settings.max_message_bytes)
    server = grpc.aio.server(
        options=[
            # With the default of 1 a second server on the same port starts "successfully", and calls go missing.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
        ]
    )
    pb_grpc.add_EngineServicer_to_server(service, server)  # type: ignore[no-untyped-call]  # generated
    if settings.remote_workers:
        link_grpc.add_WorkerLinkServicer_to_server(workers, server)  # type: ignore[no-untyped-call]  # generated
    checks = HealthChecks(health.HealthServicer())
    health_pb2_grpc.add_HealthServicer_to_server(checks.servicer, server)
    tls = None if is_local(settings.listen) else mutual_tls(settings)
    try:
        if tls is None:
            server.add_insecure_port(settings.listen)
        else:
            server.add_secure_port(settings.listen, tls.server_credentials())
    except RuntimeError as error:
        raise ConfigurationError(
            f"Cannot listen on {settings.listen} (--listen): it is not host:port or unix:/path, no address of this "
            "machine, or in use by another program.",
            param="listen",
        ) from error
    return server, checks
