"""HTTPS: certificates that are renewed while connections are open, and clients that must show theirs."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tercet_frontend.access.connection import ConnectionLimits
from tercet_frontend.access.tls import ServerTls
from tercet_frontend.access.watch import FileWatch
from tercet_frontend.edge import EdgeOptions
from tercet_shared.errors import ConfigurationError, UnavailableError
from tercet_shared.lifecycle.readiness import served_model, wait_until_ready
from tests.contract.frontend.conftest import EOS, MODEL, TIMEOUT, events, running
from tests.contract.frontend.wire import CHAT, body, request
from tests.fakes.certificates import Authority, Certificate
from tests.fakes.core import STOP, FakeCore

if TYPE_CHECKING:
    from pathlib import Path

    from tercet_frontend.tokenizing import ModelText


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def trusting(authority: Authority, own: Certificate | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate.chain))
    if own is not None:
        context.load_cert_chain(own.chain, own.key)
    return context


async def shown_name(url: str, context: ssl.SSLContext) -> str:
    """Returns the name in the certificate that a new connection is shown."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), ssl=context)
    try:
        certificate: Any = writer.get_extra_info("peercert")
        return dict(pair[0] for pair in certificate["subject"])["commonName"]
    finally:
        writer.close()
        await writer.wait_closed()
        del reader


def replace(target: Certificate, source: Certificate) -> None:
    for to, of in ((target.chain, source.chain), (target.key, source.key)):
        shutil.copy(of, to.with_suffix(".new"))
        to.with_suffix(".new").replace(to)


async def test_https(text: ModelText, authority: Authority) -> None:
    own = authority.issue("server")
    tls = ServerTls(own.chain, own.key)
    async with (
        FakeCore() as core,
        running(text, [core], tls=tls, verify=trusting(authority)) as front_end,
    ):
        call = asyncio.create_task(front_end.http.post(CHAT, json=body()))
        (await core.next_request()).send(EOS, finish=STOP, stop_id=EOS)
        assert (await call).status_code == 200
        async with front_end.http.stream("POST", CHAT, json=body(stream=True)) as response:
            waiting = await core.next_request()
            waiting.send(100)
            waiting.send(EOS, finish=STOP, stop_id=EOS)
            assert (await events(response))[-1] == "[DONE]"
        async with httpx.AsyncClient(timeout=TIMEOUT) as stranger:
            with pytest.raises(httpx.ConnectError):
                await stranger.get(f"{front_end.url}/livez")
            with pytest.raises(httpx.TransportError):
                await stranger.get(f"http://{front_end.url.removeprefix('https://')}/livez")
        old = ssl.create_default_context(cafile=str(authority.certificate.chain))
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await shown_name(front_end.url, old)


async def test_tercet_serve_sees_that_it_is_ready(text: ModelText, authority: Authority) -> None:
    own = authority.issue("somewhere.example")  # as others know it; on this machine it is asked by its address
    async with (
        FakeCore() as core,
        running(text, [core], tls=ServerTls(own.chain, own.key), verify=trusting(authority)) as front_end,
    ):
        port = int(front_end.url.rpartition(":")[2])
        await wait_until_ready("127.0.0.1", port, timeout_s=TIMEOUT, tls=True)
        assert await served_model("127.0.0.1", port, "unused", tls=True) == MODEL
        with pytest.raises(UnavailableError):
            await wait_until_ready("127.0.0.1", port, timeout_s=0.2)


@pytest.mark.parametrize("by", ["look", "signal"])
async def test_a_certificate_that_is_renewed(text: ModelText, authority: Authority, by: str) -> None:
    own, renewed, other = (authority.issue(name) for name in ("first", "second", "third"))
    outcomes: list[str] = []
    now = [0.0]
    tls = ServerTls(own.chain, own.key, reloaded=outcomes.append)
    tls._watch = FileWatch([own.chain, own.key], clock=lambda: now[0])
    context = trusting(authority)

    def notice() -> None:
        if by == "signal":
            tls.reload()
        else:
            now[0] += 2

    async with FakeCore() as core, running(text, [core], tls=tls, verify=context) as front_end:
        assert await shown_name(front_end.url, context) == "first"
        async with front_end.http.stream("POST", CHAT, json=body(stream=True)) as response:
            waiting = await core.next_request()
            waiting.send(100)
            replace(own, renewed)
            notice()
            assert await shown_name(front_end.url, context) == "second"
            # With half of a pair nothing changes.
            shutil.copy(other.chain, own.chain)
            notice()
            assert await shown_name(front_end.url, context) == "second"
            own.key.unlink()
            notice()
            assert await shown_name(front_end.url, context) == "second"
            replace(own, other)
            notice()
            assert await shown_name(front_end.url, context) == "third"
            # The stream was there all the time.
            waiting.send(EOS, finish=STOP, stop_id=EOS)
            assert (await events(response))[-1] == "[DONE]"
    assert "was read again" in outcomes[0]
    assert "stays as it was" in outcomes[1]


async def test_clients_that_must_show_a_certificate(text: ModelText, authority: Authority, tmp_path: Path) -> None:
    own, client = authority.issue("server"), authority.issue("client")
    (tmp_path / "elsewhere").mkdir()
    foreign = Authority(tmp_path / "elsewhere", "foreign").issue("stranger")
    tls = ServerTls(own.chain, own.key, authority.certificate.chain)
    edge = EdgeOptions(client_certificates=tls.asks_clients)
    async with (
        FakeCore() as core,
        running(text, [core], tls=tls, edge=edge, verify=trusting(authority, client)) as front_end,
    ):
        assert (await front_end.http.get("/v1/models")).status_code == 200
        async with httpx.AsyncClient(base_url=front_end.url, verify=trusting(authority), timeout=TIMEOUT) as nobody:
            for path in ("/v1/models", "/", "/docs", "/nowhere"):
                refused = await nobody.get(path)
                assert (refused.status_code, refused.json()["error"]["type"]) == (401, "invalid_request_error")
                assert "certificate" in refused.json()["error"]["message"]
            assert (await nobody.get("/readyz")).status_code == 200  # for load balancers
        async with httpx.AsyncClient(base_url=front_end.url, verify=trusting(authority, foreign)) as stranger:
            with pytest.raises(httpx.TransportError):
                await stranger.get("/readyz")


async def test_a_client_that_takes_nothing_over_tls(text: ModelText, authority: Authority) -> None:
    own = authority.issue("server")
    limits = ConnectionLimits(client_timeout=0.3)
    context = trusting(authority)
    async with (
        FakeCore() as core,
        running(text, [core], tls=ServerTls(own.chain, own.key), limits=limits, verify=context) as front_end,
    ):
        port = int(front_end.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, limit=1_000)
        writer.write(request(payload=body(stream=True, max_tokens=1_000)))
        stuck = await core.next_request()
        async with asyncio.timeout(TIMEOUT):
            while not stuck.aborted:  # the reader stops at its limit of 1,000 bytes
                stuck.send(*text.tokenizer.encode("Paris is nice. " * 400))
                await front_end.http.get("/livez")
        writer.transport.abort()
        del reader


def test_files_that_are_no_pair(authority: Authority, tmp_path: Path) -> None:
    one, two = authority.issue("one"), authority.issue("two")
    text = tmp_path / "text"
    text.write_text("no certificate")
    for chain, key, ca in (
        (one.chain, two.key, None),
        (text, one.key, None),
        (one.chain, text, None),
        (tmp_path / "none", one.key, None),
        (one.chain, one.key, text),
        (one.chain, one.key, tmp_path / "none"),
    ):
        with pytest.raises(ConfigurationError, match="cannot be used"):
            ServerTls(chain, key, ca)
