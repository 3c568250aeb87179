"""The client over real sockets: framing, connections that are kept, and every way in which an answer can fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tercet_shared.errors import ConfigurationError
from tercet_tools.bench.answers import EventStream, Sample
from tercet_tools.bench.http import HttpClient, RequestFailedError, Whole, clock
from tests.fakes.openai_server import Answer, FakeServer, tokens
from tests.fakes.ports import free_port

BODY = b'{"stream": true, "max_tokens": 3, "prompt": "x"}'


@asynccontextmanager
async def client_of(url: str, seconds: float = 20.0) -> AsyncIterator[HttpClient]:
    client = HttpClient(url, timeout=seconds)
    try:
        yield client
    finally:
        client.close()


async def ask(client: HttpClient) -> Sample:
    answer = EventStream(clock(), 3)
    await client.post("/v1/completions", BODY, answer)
    return answer.sample()


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
async def test_every_framing_and_connections_are_kept(framing: str) -> None:
    async with FakeServer(lambda _: Answer(tokens(3), framing=framing)) as server, client_of(server.url) as client:
        samples = [await ask(client) for _ in range(3)]
    assert [sample.output_tokens for sample in samples] == [3, 3, 3]
    assert server.connections == (3 if framing == "close" else 1)


async def test_requests_at_once_have_connections_of_their_own() -> None:
    gate = asyncio.Event()
    async with FakeServer(lambda _: Answer(tokens(3), gate=gate)) as server, client_of(server.url) as client:
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(ask(client))
            await server.asked(5)
            gate.set()
    assert server.connections == 5


async def test_a_connection_that_was_closed_while_idle_is_no_failure() -> None:
    async with FakeServer() as server, client_of(server.url) as client:
        await ask(client)
        server.close_connections()
        assert (await ask(client)).output_tokens == 3
    assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer(tokens(3)[:2], cut=True), "disconnected"),
        (Answer((), cut=True), "disconnected"),
        (Answer(tokens(3)[:2], framing="close"), "cut"),
        (Answer(("{}",), status=503), "HTTP 503"),
        (Answer(("x", "y")), "not JSON"),
    ],
)
async def test_failures_have_kinds_and_leave_the_client_usable(answer: Answer, kind: str) -> None:
    async with FakeServer(lambda _: answer) as server, client_of(server.url) as client:
        with pytest.raises(RequestFailedError) as caught:
            await ask(client)
        assert caught.value.kind == kind
        answer = Answer(tokens(3))
        assert (await ask(client)).output_tokens == 3


async def test_no_answer_in_time() -> None:
    async with FakeServer(lambda _: Answer(tokens(3), gate=asyncio.Event())) as server:
        async with client_of(server.url, seconds=0.01) as client:
            with pytest.raises(RequestFailedError, match=r"0\.01 seconds") as caught:
                await ask(client)
    assert caught.value.kind == "timeout"


async def test_nobody_listens() -> None:
    async with client_of(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(RequestFailedError) as caught:
            await ask(client)
    assert caught.value.kind == "no connection"


async def test_what_is_not_http() -> None:
    async def speak(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with client_of(f"http://127.0.0.1:{port}") as client:
            with pytest.raises(RequestFailedError) as caught:
                await ask(client)
    assert caught.value.kind == "not HTTP"


async def test_a_base_path_and_headers_are_sent() -> None:
    async with FakeServer() as server:
        client = HttpClient(f"{server.url}/base/v1/", headers={"Authorization": "Bearer k"})
        answer = EventStream(clock(), 3)
        await client.post("/v1/completions", BODY, answer)
        await HttpClient(server.url).get("/v1/models", whole := Whole())
        client.close()
    assert server.heads[0].startswith(b"POST /base/v1/completions HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer k\r\n" in server.heads[0]
    assert (whole.status, whole.data) == (200, b'{"data": [{"id": "m"}]}')


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://[::1"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigurationError, match="--url"):
        HttpClient(url)
