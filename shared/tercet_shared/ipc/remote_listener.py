"""The core's end of links to other hosts: a gRPC service that workers attach to."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeAlias

import grpc
import grpc.aio

from tercet_proto.v1 import link_pb2 as pb
from tercet_proto.v1 import link_pb2_grpc as pb_grpc
from tercet_shared.errors import LinkError, ProtocolError, TercetError
from tercet_shared.ipc.control import MAX_REPLY, MAX_TEXT
from tercet_shared.ipc.errors import LinkClosedError
from tercet_shared.ipc.link import Stream
from tercet_shared.ipc.listener import Rejected
from tercet_shared.ipc.remote import VERSION, RemoteLink, encode_limits, limits_of
from tercet_shared.ipc.settings import ListenerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_shared.ipc.listener import HelloCallback

_log = logging.getLogger(__name__)

RemoteCallback: TypeAlias = "Callable[[RemoteLink, bytes], None]"
"""Takes over a started link and the hello it came with; owns the link from then on."""


class CallContext(Protocol):
    """What is used of ``grpc.aio.ServicerContext``, whose types leave out that `read` may return its end marker."""

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        """Sends the call's headers, once, before anything else."""

    async def read(self) -> pb.LinkMessage | object:
        """Returns the next message, or ``grpc.aio.EOF``."""

    async def write(self, message: pb.LinkMessage) -> None:
        """Sends a message; waits while the connection is busy."""

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """Ends the call with a status."""


class _CoreWire:
    """A call, seen from the core."""

    def __init__(self, context: CallContext) -> None:
        self._context = context

    async def greet(self) -> None:
        """Lets the caller know that its handshake has begun: it has one of the places for those."""
        try:
            await self._context.send_initial_metadata(())
        except grpc.aio.BaseError as error:
            raise LinkClosedError(str(error)) from error

    async def read(self) -> pb.LinkMessage | None:
        try:
            message = await self._context.read()
        except grpc.aio.BaseError as error:
            raise LinkClosedError(str(error)) from error
        return message if isinstance(message, pb.LinkMessage) else None

    async def write(self, message: pb.LinkMessage) -> None:
        try:
            await self._context.write(message)
        except grpc.aio.BaseError as error:
            raise LinkClosedError(str(error)) from error

    async def end(self) -> None:
        """Nothing: the call ends when its handler returns."""


class RemoteListener(pb_grpc.WorkerLinkServicer):
    """Accepts workers on other hosts, as ``LinkListener`` does on this one. Add it to a gRPC server.

    Args:
        on_hello: judges a worker's hello; a place in a group has no meaning here.
        on_connection: takes over the link of a worker that was accepted.
        settings: limits and sizes; those of the rings are limits of the streams.
    """

    def __init__(
        self, on_hello: HelloCallback, on_connection: RemoteCallback, settings: ListenerSettings | None = None
    ) -> None:
        self._on_hello = on_hello
        self._on_connection = on_connection
        self._settings = settings if settings is not None else ListenerSettings()
        self._handshakes = 0

    async def Attach(self, request_iterator: object, context: CallContext) -> None:  # noqa: N802, ARG002
        """Serves one worker until its link is closed."""
        if self._handshakes >= self._settings.max_handshakes:
            with suppress(grpc.aio.InternalError):  # it has left meanwhile, which gRPC would log as a fault of ours
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many workers attach at once")
            return
        wire = _CoreWire(context)
        self._handshakes += 1
        try:
            async with asyncio.timeout(self._settings.handshake_timeout_s):
                await wire.greet()
                met = await self._handshake(wire)
        except TimeoutError:
            within = self._settings.handshake_timeout_s
            _log.warning("a worker that attached was closed: its handshake took longer than %g s", within)
            return
        except LinkError as error:
            _log.warning("a worker that attached was closed: %s", error.message)
            return
        finally:
            self._handshakes -= 1
        if met is None:
            return
        link, hello = met
        link.start()
        self._on_connection(link, hello)
        await link.run()

    async def _handshake(self, wire: _CoreWire) -> tuple[RemoteLink, bytes] | None:
        """Returns the link and the hello of a worker that may join."""
        first = await wire.read()
        if first is None:
            raise LinkClosedError("it left before its hello")
        hello = b""
        try:
            hello = self._hello(first)
            verdict = self._on_hello(hello)
        except TercetError as error:
            verdict = Rejected(error.message)
        if isinstance(verdict, Rejected):
            _log.warning("a worker was rejected: %s", verdict.reason)
            await wire.write(pb.LinkMessage(reject=verdict.reason[:MAX_TEXT]))
            return None
        if len(verdict.reply) > MAX_REPLY:
            raise ProtocolError(f"the reply to a hello has {len(verdict.reply)} bytes; the limit is {MAX_REPLY}")
        settings = self._settings
        plan, result, mask = (limits_of(ring) for ring in (settings.plan, settings.result, settings.mask))
        accept = pb.LinkAccept(
            reply=verdict.reply,
            heartbeat_interval_s=settings.heartbeat.interval_s,
            heartbeat_timeout_s=settings.heartbeat.dead_after_s,
            plan=encode_limits(plan),
            result=encode_limits(result),
            mask=encode_limits(mask),
        )
        await wire.write(pb.LinkMessage(accept=accept))
        outgoing = {Stream.STEPS: plan, Stream.MASKS: mask}
        return RemoteLink(wire, outgoing, {Stream.STEPS: result}, settings.heartbeat, "worker"), hello

    def _hello(self, message: pb.LinkMessage) -> bytes:
        if not message.HasField("open"):
            raise ProtocolError("the peer did not begin with a hello")
        if message.open.version != VERSION:
            raise ProtocolError(
                f"the peer speaks version {message.open.version} of the link protocol; this process speaks {VERSION}"
            )
        if len(message.open.hello) > self._settings.max_hello:
            raise ProtocolError(
                f"the hello has {len(message.open.hello)} bytes; the limit is {self._settings.max_hello}"
            )
        return message.open.hello
