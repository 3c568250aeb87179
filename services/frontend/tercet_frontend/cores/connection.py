"""A channel to one core: opened, and reached or not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from tercet_shared.errors import ConfigurationError, LinkError
from tercet_shared.mtls import is_local

if TYPE_CHECKING:
    from tercet_frontend.cores.options import StreamOptions


def open_channel(address: str, options: StreamOptions) -> grpc.aio.Channel:
    """Returns a channel to ``address``, which connects when it is used; the caller closes it."""
    arguments: list[tuple[str, int | str]] = [*options.channel_arguments()]
    if options.tls is None or is_local(address):
        return grpc.aio.insecure_channel(address, options=arguments)
    # Asked for anew, because the files may have been replaced since the last channel.
    credentials = options.tls.client_credentials()
    return grpc.aio.secure_channel(address, credentials, options=[*arguments, *options.tls_arguments])


async def reach(channel: grpc.aio.Channel, address: str, *, within: float) -> None:
    """Returns when ``channel`` is connected. Raises `LinkError` when it cannot be, or not in ``within`` seconds."""
    ready, failed = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
    try:
        async with asyncio.timeout(within):
            while (state := channel.get_state(try_to_connect=True)) is not ready:
                if state is failed:
                    raise LinkError(f"The core at {address} cannot be reached.")
                await channel.wait_for_state_change(state)
    except TimeoutError as error:
        raise LinkError(f"The core at {address} cannot be reached.") from error


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
