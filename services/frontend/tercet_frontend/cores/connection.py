"""A channel to one core: opened, and reached or not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from tercet_proto.v1 import engine_pb2, engine_pb2_grpc
from tercet_shared.errors import ConfigurationError, LinkError, bounded
from tercet_shared.mtls import is_local

if TYPE_CHECKING:
    from tercet_frontend.cores.options import StreamOptions


_MAX_WHY = 300


class UnreachableError(LinkError):
    """The core cannot be reached.

    Attributes:
        why: for the log, as gRPC puts it. It may differ from one attempt to the next, so the message is without.
    """

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"The core at {address} cannot be reached.")
        self.why = why


def open_channel(address: str, options: StreamOptions) -> grpc.aio.Channel:
    """Returns a channel to ``address``, which connects when it is used; the caller closes it."""
    arguments: list[tuple[str, int | str]] = [*options.channel_arguments()]
    if options.tls is None or is_local(address):
        return grpc.aio.insecure_channel(address, options=arguments)
    # Asked for anew, because the files may have been replaced since the last channel.
    credentials = options.tls.client_credentials()
    return grpc.aio.secure_channel(address, credentials, options=[*arguments, *options.tls_arguments])


async def reach(channel: grpc.aio.Channel, address: str, *, within: float) -> None:
    """Returns when ``channel`` is connected. Raises `UnreachableError` when it is not ``within`` so many seconds."""
    ready, failed = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
    try:
        async with asyncio.timeout(within):
            while (state := channel.get_state(try_to_connect=True)) is not ready:
                if state is failed:
                    raise UnreachableError(address, await _why(channel))
                await channel.wait_for_state_change(state)
    except TimeoutError as error:
        raise UnreachableError(address, f"no connection within {within:g} s") from error


async def _why(channel: grpc.aio.Channel) -> str:
    """Returns why ``channel`` has failed to connect, which only the failure of a call tells."""
    stub = engine_pb2_grpc.EngineStub(channel)  # type: ignore[no-untyped-call]
    try:
        await stub.Info(engine_pb2.InfoRequest())
    except grpc.aio.AioRpcError as error:
        return bounded((error.details() or "").rpartition("last error: ")[2], _MAX_WHY)
    return ""


def checked_address(address: str) -> str:
    """Returns ``address``. Raises `ConfigurationError` unless it is ``host:port`` or ``unix:/path``."""
    if address.startswith("unix:"):
        if len(address) > len("unix:"):
            return address
    else:
        host, colon, port = address.rpartition(":")
        if host and colon and port.isascii() and port.isdigit() and 0 < int(port) <= 65_535:
            return address
    raise ConfigurationError(f"{address!r} is not an address: give host:port or unix:/path (--core).")
