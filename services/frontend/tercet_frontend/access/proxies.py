"""Whom to believe about a client's address: proxies that were named, and nobody else."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING

from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

MAX_HOPS = 32
"""Addresses that are looked at in ``X-Forwarded-For``, from the end."""


class TrustedProxies:
    """Networks whose ``X-Forwarded-For`` and ``X-Forwarded-Proto`` are believed.

    Raises:
        ConfigurationError: one is no address or network.
    """

    def __init__(self, networks: Iterable[str] = ()) -> None:
        self._networks: list[IPv4Network | IPv6Network] = []
        for text in networks:
            try:
                self._networks.append(ip_network(text, strict=False))
            except ValueError:
                raise ConfigurationError(
                    f"{text!r} is no address or network, as 10.0.0.0/8.", param="trusted_proxy"
                ) from None

    def believes(self, peer: str) -> bool:
        """Returns whether what comes from ``peer`` has passed a trusted proxy."""
        address = _parsed(peer) if self._networks else None
        return address is not None and self._trusted(address)

    def client(self, peer: str, forwarded_for: bytes) -> str:
        """Returns the address of the client behind a trusted ``peer``.

        That is the last address that is not a trusted proxy's: what is before it came from that client, who can write
        there anything.
        """
        client = peer
        for part in reversed(forwarded_for.rsplit(b",", MAX_HOPS)[-MAX_HOPS:]):
            address = _parsed(part.decode("latin-1").strip())
            if address is None:
                break
            client = str(address)
            if not self._trusted(address):
                break
        return client

    def _trusted(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in network for network in self._networks)


def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    if text.startswith("["):  # [2001:db8::1]:443
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:  # 192.0.2.1:443
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped
