"""What accompanies a request, and whose address it has."""

from __future__ import annotations

from typing import Any

import pytest

from tercet_frontend.access.exchange import Exchange, attach, exchange_of
from tercet_frontend.access.occupancy import Occupancy
from tercet_frontend.access.proxies import TrustedProxies
from tercet_frontend.access.quotas import Grant, LocalQuotas
from tercet_shared.errors import ConfigurationError, InvalidRequestError, OverloadedError
from tests.unit.frontend.access.conftest import make_key

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", True),
        (f"cc-{TRACE}-b7ad6b7169203331-00", True),
        (f"ff-{TRACE}-b7ad6b7169203331-01", False),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-b7ad6b7169203331-01", False),
        (f"00-{TRACE}-b7ad6b7169203331-01-more", False),
        ("x" * 1_000, False),
        ("", False),
    ],
)
def test_traceparent(header: str, kept: bool) -> None:
    exchange = Exchange(traceparent=header)
    assert exchange.traceparent == (header if kept else "")
    assert exchange.trace_id == (TRACE if kept else "")


def test_priorities() -> None:
    exchange = Exchange()
    assert [exchange.priority(asked) for asked in (None, -5, 5)] == [0, -5, 5]
    exchange.key = make_key(priority=3, best_priority=1)
    assert [exchange.priority(asked) for asked in (None, 1, 9)] == [3, 1, 9]
    with pytest.raises(InvalidRequestError, match="is 1") as caught:
        exchange.priority(0)
    assert caught.value.param == "priority"


async def test_what_it_holds_is_given_back() -> None:
    occupancy, quotas, key = Occupancy(), LocalQuotas(), make_key(max_concurrent=1, tokens_per_minute=100)
    exchange = Exchange()
    exchange.occupies(occupancy.enter())
    grant = Grant(key)
    exchange.charges(quotas, grant)
    await quotas.enter(grant)
    await quotas.reserve(grant, 10)
    assert dict(exchange.rate_headers())[b"x-ratelimit-remaining-tokens"] == b"90"
    exchange.began()
    assert (occupancy.running, occupancy.waiting) == (1, 0)
    exchange.used(60, 30, ["stop"] * 200)
    exchange.close()
    assert len(exchange.finish_reasons) == 128
    assert occupancy.running == 0
    later = Grant(key)
    await quotas.enter(later)
    with pytest.raises(OverloadedError, match="tokens"):
        await quotas.reserve(later, 20)


def test_errors_have_a_name() -> None:
    exchange = Exchange()
    exchange.failed(InvalidRequestError("x"))
    assert exchange.error == "invalid_request_error"
    exchange.failed(OverloadedError("x"))
    assert exchange.error == "rate_limit_exceeded"


def test_it_is_found_in_the_scope() -> None:
    scope: dict[str, Any] = {}
    assert exchange_of(scope).request_id == ""
    exchange = Exchange(request_id="x")
    attach(scope, exchange)
    assert exchange_of(scope) is exchange


@pytest.mark.parametrize(
    ("networks", "peer", "believed"),
    [
        (["10.0.0.0/8"], "10.1.2.3", True),
        (["10.0.0.0/8"], "11.1.2.3", False),
        (["10.1.2.3"], "10.1.2.3", True),
        (["::1", "2001:db8::/32"], "2001:db8::5", True),
        (["10.0.0.0/8"], "::ffff:10.1.2.3", True),
        (["0.0.0.0/0"], "", False),
        (["0.0.0.0/0"], "socket", False),
        ([], "10.1.2.3", False),
    ],
)
def test_whom_to_believe(networks: list[str], peer: str, believed: bool) -> None:
    assert TrustedProxies(networks).believes(peer) is believed


@pytest.mark.parametrize(
    ("header", "client"),
    [
        (b"192.0.2.1", "192.0.2.1"),
        (b"6.6.6.6, 192.0.2.1", "192.0.2.1"),  # the first is the client's own word
        (b"192.0.2.1, 10.0.0.2 , 10.0.0.3", "192.0.2.1"),
        (b"10.0.0.2", "10.0.0.2"),
        (b"192.0.2.1:4711", "192.0.2.1"),
        (b"[2001:db8::1]:443", "2001:db8::1"),
        (b"2001:db8::1", "2001:db8::1"),
        (b"::ffff:192.0.2.1", "192.0.2.1"),
        (b"192.0.2.1, nonsense, 10.0.0.2", "10.0.0.2"),
        (b"", "10.0.0.1"),
        (b"unknown", "10.0.0.1"),
        (b"\xff\xfe", "10.0.0.1"),
        (b"," * 10_000, "10.0.0.1"),
        (b"192.0.2.1" + b", 10.0.0.2" * 100, "10.0.0.2"),
    ],
)
def test_the_client_behind_a_proxy(header: bytes, client: str) -> None:
    assert TrustedProxies(["10.0.0.0/8"]).client("10.0.0.1", header) == client


@pytest.mark.parametrize("network", ["", "host", "10.0.0.0/33", "10.0.0"])
def test_networks_that_are_none(network: str) -> None:
    with pytest.raises(ConfigurationError):
        TrustedProxies([network])
