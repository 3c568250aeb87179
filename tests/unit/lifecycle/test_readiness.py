from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tercet_shared.errors import ConfigurationError, UnavailableError
from tercet_shared.lifecycle.readiness import check_port, fetch, served_model, url_of, wait_until_ready
from tercet_shared.lifecycle.supervisor import announcement
from tests.fakes.certificates import Authority
from tests.fakes.ports import free_port
from tests.unit.lifecycle.conftest import slow_answers


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that gives ``answers`` in turn, the last one for ever; yields its port and the requests."""
    requests: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answers[min(len(requests), len(answers)) - 1])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], requests


async def test_waits_through_refusals_until_200() -> None:
    async with answering(b"HTTP/1.1 503 No\r\n\r\nno core", b"HTTP/1.1 200 OK\r\n\r\n") as (port, requests):
        await wait_until_ready("127.0.0.1", port)
    assert len(requests) == 2
    assert requests[0].startswith(b"GET /readyz HTTP/1.0\r\n")


async def test_gives_up_with_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_answers(monkeypatch)
    async with answering(b"HTTP/1.1 503 No\r\n\r\nno core") as (port, _):
        with pytest.raises(UnavailableError, match="503 no core"):
            await wait_until_ready("127.0.0.1", port)


async def test_what_does_not_speak_http_is_an_error() -> None:
    async with answering(b"220 smtp ready\r\n") as (port, _):
        with pytest.raises(UnavailableError, match="does not speak HTTP"):
            await fetch("127.0.0.1", port, "/readyz")


async def test_the_model_s_name_is_asked_for_with_the_key() -> None:
    async with answering(b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "m"}]}') as (port, requests):
        assert await served_model("127.0.0.1", port, "sesame") == "m"
    assert b"Authorization: Bearer sesame" in requests[0]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"data": []}', b'{"data": [{"id": 3}]}'])
async def test_a_list_without_a_name_is_no_name(body: bytes) -> None:
    async with answering(b"HTTP/1.1 200 OK\r\n\r\n" + body) as (port, _):
        assert await served_model("127.0.0.1", port, None) is None


def test_a_free_port_passes_and_a_taken_one_is_named() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(ConfigurationError, match=f"Port {port} on 127.0.0.1 is in use"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not an address of this machine"):
        check_port("192.0.2.1", 0)


def test_the_url_is_one_that_can_be_opened_here() -> None:
    assert url_of("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert url_of("::", 80) == "http://[::1]:80"
    assert url_of("host", 80) == "http://host:80"


def test_the_announcement_quotes_for_the_shell_and_keeps_the_key_out() -> None:
    text = announcement("http://h:1", "it's", needs_key=True)
    assert "it'\"'\"'s" in text
    assert 'Authorization: Bearer $TERCET_API_KEY"' in text


async def test_over_tls_whatever_the_certificate_s_name(tmp_path: Path) -> None:
    own = Authority(tmp_path).issue("model.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.chain, own.key)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "m"}]}')
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        await wait_until_ready("127.0.0.1", port, tls=True)
        assert await served_model("127.0.0.1", port, None, tls=True) == "m"
    assert url_of("0.0.0.0", 443, tls=True) == "https://127.0.0.1:443"
