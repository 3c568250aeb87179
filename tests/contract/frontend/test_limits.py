"""Whatever a client does with its connection, it is bounded, and nobody else notices."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tercet_frontend.access.connection import MAX_FIELDS, MAX_HEAD_BYTES, ConnectionLimits
from tercet_frontend.access.occupancy import Occupancy
from tercet_frontend.edge import EdgeOptions
from tercet_proto.v1 import engine_pb2 as pb
from tests.contract.frontend.conftest import EOS, MODEL, TIMEOUT, FrontEnd, running
from tests.contract.frontend.wire import CHAT, body, request, wire
from tests.fakes.core import STOP, FakeCore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_frontend.tokenizing import ModelText


async def still_answers(front_end: FrontEnd) -> None:
    assert (await front_end.http.get("/v1/models")).status_code == 200


def connections(front_end: FrontEnd) -> set[Any]:
    """Returns the server's ends of all connections, in a set that changes with them."""
    connections: set[Any] = front_end.server._server.server_state.connections
    return connections


async def until(front_end: FrontEnd, condition: Callable[[], bool]) -> None:
    """Returns when ``condition`` holds, while the front end goes on to answer."""
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await front_end.http.get("/livez")


# ------------------------------------------------------------------------------------------------------------ places


@pytest.mark.parametrize("occupancy", [Occupancy(max_requests=1), Occupancy(max_waiting=1)])
async def test_too_many_requests(text: ModelText, occupancy: Occupancy) -> None:
    async with FakeCore() as core, running(text, [core], occupancy=occupancy) as front_end:
        call = asyncio.create_task(front_end.http.post(CHAT, json=body()))
        running_one = await core.next_request()
        for path in (CHAT, "/v1/completions", "/v1/embeddings", "/tokenize"):
            refused = await front_end.http.post(path, json=body())
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        refused = await front_end.http.post("/v1/messages", json=body())
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        await still_answers(front_end)
        running_one.send(EOS, finish=STOP, stop_id=EOS)
        assert (await call).status_code == 200
        again = asyncio.create_task(front_end.http.post(CHAT, json=body()))
        (await core.next_request()).send(EOS, finish=STOP, stop_id=EOS)
        assert (await again).status_code == 200
        assert (await front_end.http.post(CHAT, json=body(n=0))).status_code == 400
        assert (occupancy.running, occupancy.waiting, occupancy.refused) == (0, 0, 5)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_has_begun_does_not_wait_any_more(text: ModelText, stream: bool) -> None:
    occupancy = Occupancy(max_waiting=1)
    async with FakeCore() as core, running(text, [core], occupancy=occupancy) as front_end:
        first = asyncio.create_task(front_end.http.post(CHAT, json=body(stream=stream)))
        request_one = await core.next_request()
        assert (await front_end.http.post(CHAT, json=body())).status_code == 429
        request_one.send(100)
        await until(front_end, lambda: not occupancy.waiting)
        second = asyncio.create_task(front_end.http.post(CHAT, json=body()))
        request_two = await core.next_request()
        assert (await front_end.http.post(CHAT, json=body())).status_code == 429
        for each in (request_one, request_two):
            each.send(EOS, finish=STOP, stop_id=EOS)
        assert {(await first).status_code, (await second).status_code} == {200}


async def test_the_body_of_a_refused_request_is_not_read(text: ModelText) -> None:
    occupancy = Occupancy(max_requests=1)
    async with FakeCore() as core, running(text, [core], occupancy=occupancy) as front_end:
        call = asyncio.create_task(front_end.http.post(CHAT, json=body()))
        await core.next_request()
        async with wire(front_end.url) as client:
            await client.send(request().partition(b"\r\n\r\n")[0] + b"\r\n\r\n")  # and no body
            assert (await client.answer()).status == 429
        call.cancel()


@pytest.mark.usefixtures("late_headers")
async def test_a_core_that_is_full_says_when_to_come_back(text: ModelText) -> None:
    now = [0.0]
    occupancy = Occupancy(clock=lambda: now[0])
    async with FakeCore() as core, running(text, [core], occupancy=occupancy) as front_end:
        waiting = asyncio.create_task(front_end.http.post(CHAT, json=body()))
        await core.next_request()
        served = asyncio.create_task(front_end.http.post(CHAT, json=body()))
        last = await core.next_request()
        now[0] = 12.0
        last.send(EOS, finish=STOP, stop_id=EOS)  # one in twelve seconds, and another waits
        assert (await served).status_code == 200
        for stream in (False, True):
            refused = asyncio.create_task(front_end.http.post(CHAT, json=body(stream=stream)))
            (await core.next_request()).reject(pb.ERROR_KIND_OVERLOADED, "The queue is full.")
            answer = await refused
            # It waits as well: two times twelve seconds.
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "24")
        waiting.cancel()


# ------------------------------------------------------------------------------------------------------------- heads


HEADS: list[tuple[str, Callable[[], list[bytes]]]] = [
    ("10,000 fields", lambda: [b"GET /livez HTTP/1.1\r\n" + b"X-A: b\r\n" * 10_000 + b"\r\n"]),
    ("a megabyte in one field", lambda: [b"GET /livez HTTP/1.1\r\nX-A: " + b"b" * 1_000_000 + b"\r\n\r\n"]),
    ("one field without an end", lambda: [b"GET /livez HTTP/1.1\r\nX-A: ", *[b"b" * 60_000] * 20]),
    ("a name without an end", lambda: [b"GET /livez HTTP/1.1\r\n", *[b"b" * 60_000] * 20]),
    ("an address without an end", lambda: [b"GET /", *[b"a" * 60_000] * 20]),
    ("fields behind the body", lambda: [
        b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X-A: b\r\n" * 10_000
    ]),
]  # fmt: skip


@pytest.mark.parametrize("pieces", [pieces for _, pieces in HEADS], ids=[name for name, _ in HEADS])
async def test_heads_that_are_too_large(text: ModelText, pieces: Callable[[], list[bytes]]) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        async with wire(front_end.url) as client:
            for piece in pieces():
                client.writer.write(piece)
            answer = await client.answer()
            assert answer.status in (400, 431)
            assert "error" in answer.json()
            assert len(answer.body) < 500
            await client.end()
        await still_answers(front_end)


async def test_heads_that_are_just_small_enough(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        async with wire(front_end.url) as client:
            for fields, status in ((MAX_FIELDS, 200), (MAX_FIELDS + 1, 431)):
                await client.send(b"GET /livez HTTP/1.1\r\n" + b"X-A: b\r\n" * fields + b"\r\n")
                assert (await client.answer()).status == status
        for size, status in ((MAX_HEAD_BYTES - 100, 200), (MAX_HEAD_BYTES + 1, 431)):
            async with wire(front_end.url) as client:
                await client.send(b"GET /livez HTTP/1.1\r\nX-A: " + b"b" * size + b"\r\n\r\n")
                assert (await client.answer()).status == status


async def test_what_is_no_http(text: ModelText, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        for garbage in (b"\x16\x03\x01\x02\x00", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 10_000):
            async with wire(front_end.url) as client:
                await client.send(garbage)
                answer = await client.answer()
                assert (answer.status, answer.headers["connection"]) == (400, "close")
                assert answer.json()["error"]["type"] == "invalid_request_error"
                assert await client.end() == b""
        await still_answers(front_end)
    assert "Traceback" not in caplog.text


async def test_garbage_behind_a_request_does_not_spoil_its_answer(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end, wire(front_end.url) as client:
        await client.send(request())
        waiting = await core.next_request()
        (connection,) = connections(front_end)
        await client.send(b"\0garbage\r\n\r\n")
        await until(front_end, lambda: connection._discarding)
        waiting.send(EOS, finish=STOP, stop_id=EOS)
        answer = await client.answer()
        assert (answer.status, answer.json()["choices"][0]["finish_reason"]) == (200, "stop")
        assert await client.end() == b""


# -------------------------------------------------------------------------------------------------------------- time


SOON = ConnectionLimits(receive_timeout=0.2, client_timeout=0.2, linger=0.2)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", None),
        (b"\r\n\r\n", None),
        (b"GET", 408),
        (b"GET /livez HTTP/1.1\r\nX-A: b", 408),
        (b"GET /livez HTTP/1.1\r\nX-A: b\r\n", 408),
    ],
)
async def test_heads_that_do_not_come(text: ModelText, sent: bytes, status: int | None) -> None:
    async with FakeCore() as core, running(text, [core], limits=SOON) as front_end:
        async with wire(front_end.url) as client:
            await client.send(sent)
            if status is not None:
                answer = await client.answer()
                assert (answer.status, answer.json()["error"]["code"]) == (408, "request_timeout")
            assert await client.end() == b""
        async with wire(front_end.url) as client:  # the same behind a request that was answered
            await client.send(b"GET /livez HTTP/1.1\r\n\r\n" + sent)
            assert (await client.answer()).status == 200
            if status is not None:
                assert (await client.end()).startswith(b"HTTP/1.1 408 ")
        await still_answers(front_end)


async def test_a_head_that_drips(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core], limits=SOON) as front_end, wire(front_end.url) as client:

        async def drip() -> None:
            while True:
                client.writer.write(b"X")
                await client.writer.drain()
                await front_end.http.get("/livez")

        client.writer.write(b"GET /livez HTTP/1.1\r\n")
        dripping = asyncio.create_task(drip())
        assert (await client.answer()).status == 408  # however often something comes
        dripping.cancel()
        await asyncio.wait([dripping])


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_body_that_does_not_come(text: ModelText, path: str) -> None:
    async with FakeCore() as core, running(text, [core], receive_timeout=0.2) as front_end:
        async with wire(front_end.url) as client:
            await client.send(request(path)[:-5])
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (408, "close")
            assert answer.headers["x-request-id"]
            assert "did not come in time" in answer.json()["error"]["message"]
            assert await client.end() == b""
        await still_answers(front_end)


async def test_what_is_left_of_a_body_is_not_taken_for_ever(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core], limits=SOON, keys=["secret"]) as front_end:
        async with wire(front_end.url) as client:
            await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n")
            assert (await client.answer()).status == 401
            closed = asyncio.create_task(client.end())
            while not closed.done():
                client.writer.write(b"x" * 1_000)
                await front_end.http.get("/livez")
            await closed


async def test_what_is_left_of_a_body_and_ends_soon_is_taken(text: ModelText) -> None:
    limits = ConnectionLimits(linger=TIMEOUT)
    async with FakeCore() as core, running(text, [core], limits=limits, keys=["secret"]) as front_end:
        async with wire(front_end.url) as client:
            await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 5\r\n\r\n")
            assert (await client.answer()).status == 401
            await client.send(b"hello" + b"GET /livez HTTP/1.1\r\n\r\n")
            assert (await client.answer()).status == 200


async def test_too_many_connections(text: ModelText) -> None:
    limits = ConnectionLimits(max_connections=3)
    async with FakeCore() as core, running(text, [core], limits=limits) as front_end:
        await still_answers(front_end)  # keeps one
        async with wire(front_end.url) as one, wire(front_end.url) as two:
            for client in (one, two):
                await client.send(b"GET /livez HTTP/1.1\r\n\r\n")
                assert (await client.answer()).status == 200
            async with wire(front_end.url) as third:
                answer = await third.answer()
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert answer.json()["error"]["code"] == "service_unavailable"
                assert await third.end() == b""
            await until(front_end, lambda: front_end.server.connections == 3)
            await one.send(b"GET /livez HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert (await one.answer()).status == 200
            await one.end()
            await until(front_end, lambda: front_end.server.connections == 2)
            async with wire(front_end.url) as fourth:
                await fourth.send(b"GET /livez HTTP/1.1\r\n\r\n")
                assert (await fourth.answer()).status == 200


# ----------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_silence_is_filled(text: ModelText, path: str) -> None:
    edge = EdgeOptions(heartbeat=0.1)
    async with FakeCore() as core, running(text, [core], edge=edge) as front_end:
        fields = {"/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}
        asked = fields.get(path, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 10})
        payload = {"model": MODEL, "stream": True} | asked
        async with front_end.http.stream("POST", path, json=payload) as response:
            waiting = await core.next_request()
            lines = response.aiter_lines()
            beats = 0
            async with asyncio.timeout(TIMEOUT):
                async for line in lines:  # before the first token
                    beats += line == ": "
                    if beats == 3:
                        break
                waiting.send(100)
                async for line in lines:  # between tokens
                    beats += line == ": "
                    if beats == 6:
                        break
            waiting.send(EOS, finish=STOP, stop_id=EOS)
            rest = [line async for line in lines if line]
        ending = "message_stop" if path == "/v1/messages" else "response.completed" if "resp" in path else "[DONE]"
        assert ending in rest[-1]


async def test_the_client_library_ignores_comments(text: ModelText) -> None:
    edge = EdgeOptions(heartbeat=0.05)
    async with FakeCore() as core, running(text, [core], edge=edge) as front_end:
        call = asyncio.create_task(front_end.openai.chat.completions.create(**body(stream=True)))
        waiting = await core.next_request()
        stream: Any = await call  # the headers are there, no token is
        waiting.send(*text.tokenizer.encode("Paris"))
        said = ""
        async with asyncio.timeout(TIMEOUT):
            while said != "Paris":
                said += (await anext(stream)).choices[0].delta.content or ""
            waiting.send(EOS, finish=STOP, stop_id=EOS)
            rest = [chunk async for chunk in stream]
    assert rest[-1].choices[0].finish_reason == "stop"


async def test_tokens_are_not_held_back_by_comments(text: ModelText) -> None:
    edge = EdgeOptions(heartbeat=30.0)
    async with FakeCore() as core, running(text, [core], edge=edge) as front_end:
        async with front_end.http.stream("POST", CHAT, json=body(stream=True)) as response:
            waiting = await core.next_request()
            for _ in range(50):
                waiting.send(100)
            waiting.send(EOS, finish=STOP, stop_id=EOS)
            assert ": " not in [line async for line in response.aiter_lines()]


async def test_one_client_may_ask_for_many_things_at_once(text: ModelText, says: Any) -> None:
    """Pipelined requests are answered in order, each once."""
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end, wire(front_end.url) as client:
        await client.send(request() * 20)
        answers = [await client.answer() for _ in range(20)]
        assert {answer.status for answer in answers} == {200}
        assert len({answer.json()["id"] for answer in answers}) == 20
