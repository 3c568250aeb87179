"""The worker's end of a link to another host: attaches to a core's gRPC port, says hello, and is told its limits."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from tercet_proto.v1 import link_pb2 as pb
from tercet_proto.v1 import link_pb2_grpc as pb_grpc
from tercet_shared.errors import ConfigurationError, ProtocolError
from tercet_shared.ipc.connect import Joined
from tercet_shared.ipc.errors import LinkClosedError, LinkRejectedError, LinkUnavailableError
from tercet_shared.ipc.link import Stream
from tercet_shared.ipc.remote import VERSION, RemoteLink, decode_limits
from tercet_shared.ipc.settings import HeartbeatSettings
from tercet_shared.mtls import is_local

if TYPE_CHECKING:
    from tercet_shared.mtls import MutualTls

_OPTIONS: Final = [
    ("grpc.max_send_message_length", 4 * 1024 * 1024),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    # Below the heartbeats, which also notice a core whose process hangs.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A new attempt shall be a new connection, not gRPC's memory of the one that failed.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
]

_ATTEMPTS: Final = 4


class _WorkerWire:
    """A call, seen from the worker."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self) -> pb.LinkMessage | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise LinkClosedError(error.details() or error.code().name) from error
        return message if isinstance(message, pb.LinkMessage) else None

    async def write(self, message: pb.LinkMessage) -> None:
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise LinkClosedError(error.details() or error.code().name) from error
        except asyncio.InvalidStateError as error:
            raise LinkClosedError("the call is over") from error

    async def end(self) -> None:
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise LinkClosedError("the call is over") from error


async def connect_remote(
    address: str, hello: bytes, tls: MutualTls | None = None, *, tls_name: str | None = None, timeout_s: float = 10.0
) -> Joined:
    """Joins the core whose gRPC port is ``address``. Heartbeat settings and limits are the core's.

    Args:
        address: host:port, or unix:/path.
        hello: what the core judges; opaque here.
        tls: with what to identify; None, or a Unix socket: without TLS.
        tls_name: name in the core's certificate, where it is not the address.
        timeout_s: seconds for the whole handshake.

    Raises:
        LinkUnavailableError: nobody listens there, or does not answer in time, or ended meanwhile. Try again.
        LinkRejectedError: the core refused the hello and said why.
        ProtocolError: what listens there does not speak this protocol.
        ConfigurationError: no such address can be.
    """
    async with AsyncExitStack() as undo:
        channel = _open_channel(address, tls, tls_name)
        undo.push_async_callback(channel.close, None)
        stub = pb_grpc.WorkerLinkStub(channel)  # type: ignore[no-untyped-call]  # generated
        opening = pb.LinkMessage(open=pb.LinkOpen(version=VERSION, hello=hello))
        try:
            async with asyncio.timeout(timeout_s):
                call, answer = await _say_hello(stub, opening)
        except TimeoutError:
            raise LinkUnavailableError(f"the core at {address} did not answer within {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise _failure(address, error) from error
        if not isinstance(answer, pb.LinkMessage):
            raise LinkUnavailableError(f"the core at {address} did not answer: it ended the call")
        link, reply = _accepted(_WorkerWire(call), answer)
        undo.pop_all()

    async def clean_up() -> None:
        call.cancel()
        await channel.close(None)

    link.start()
    link.run_in_task(clean_up)
    return Joined(link, reply)


async def _say_hello(stub: pb_grpc.WorkerLinkStub, opening: pb.LinkMessage) -> tuple[Any, object]:
    """Returns a call on which ``opening`` was sent, and the first answer."""
    for attempts_left in reversed(range(_ATTEMPTS)):
        call = stub.Attach()
        try:
            # A core that refuses early ends the call while the hello is still being sent; its answer says why.
            with suppress(asyncio.InvalidStateError):
                await call.write(opening)
            return call, await call.read()
        except grpc.aio.AioRpcError as error:
            # Where the call ends in the very moment of sending, gRPC says that, in place of how the call ended.
            if not attempts_left or error.code() is not grpc.StatusCode.INTERNAL:
                raise
    raise AssertionError("the last attempt returns or raises")


def _open_channel(address: str, tls: MutualTls | None, tls_name: str | None) -> grpc.aio.Channel:
    if not is_local(address):
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) <= 65_535):
            raise ConfigurationError(f"{address!r} is not an address: give host:port or unix:/path.")
    if tls is None or is_local(address):
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    name = [] if tls_name is None else [("grpc.ssl_target_name_override", tls_name)]
    return grpc.aio.secure_channel(address, tls.client_credentials(), options=[*_OPTIONS, *name])


def _failure(address: str, error: grpc.aio.AioRpcError) -> LinkUnavailableError | ProtocolError:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolError(
            f"what listens at {address} takes no workers from other hosts; a core does with --remote-workers"
        )
    details = error.details() or error.code().name
    return LinkUnavailableError(f"no core can be reached at {address}: {details}")


def _accepted(wire: _WorkerWire, answer: pb.LinkMessage) -> tuple[RemoteLink, bytes]:
    if answer.HasField("reject"):
        raise LinkRejectedError(answer.reject)
    if not answer.HasField("accept"):
        raise ProtocolError("the core answered a hello with neither yes nor no")
    accept = answer.accept
    try:
        heartbeat = HeartbeatSettings(accept.heartbeat_interval_s, accept.heartbeat_timeout_s)
    except ConfigurationError as error:
        raise ProtocolError(f"the core's settings cannot be used: {error.message}") from None
    incoming = {Stream.STEPS: decode_limits(accept.plan), Stream.MASKS: decode_limits(accept.mask)}
    link = RemoteLink(wire, {Stream.STEPS: decode_limits(accept.result)}, incoming, heartbeat, "core")
    return link, accept.reply
