"""How requests end when it is not by themselves: the client leaves, the core fails, the server stops."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import openai
import orjson
import pytest

from tercet_frontend.access.occupancy import Occupancy
from tercet_proto.v1 import engine_pb2 as pb
from tests.contract.frontend.conftest import EOS, MODEL, TIMEOUT, events, running
from tests.fakes.core import ABORT, LENGTH, STOP, FakeCore
from tests.fakes.ports import free_port

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES} | fields


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "Hi", "n": 2}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
    ],
)
async def test_whoever_reads_the_end_of_an_answer_finds_the_request_over(
    text: ModelText, says: Any, path: str, fields: dict[str, Any], stream: bool
) -> None:
    """Nothing of it is left in the turn of the loop in which its last bytes are sent."""
    occupancy, loop = Occupancy(), asyncio.get_running_loop()
    body = orjson.dumps({"model": MODEL, "stream": stream} | fields)
    left: list[tuple[int, int]] = []
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core], occupancy=occupancy) as front_end:
        messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else await loop.create_future()

        async def send(message: Any) -> None:
            assert message.get("status", 200) == 200
            if message["type"] == "http.response.body" and not message.get("more_body"):
                loop.call_soon(lambda: left.append((occupancy.running, len(front_end.admission.running))))

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        await front_end.server._server.config.loaded_app(scope, receive, send)
        await asyncio.sleep(0)
    assert left == [(0, 0)]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("running_already", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_everything(
    text: ModelText, stream: bool, running_already: bool, n: int
) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        async with httpx.AsyncClient(base_url=front_end.url, timeout=TIMEOUT) as leaving:
            call = asyncio.create_task(leaving.post(CHAT, json=_body(stream=stream, n=n)))
            requests = await core.next_requests(n)
            if running_already:
                for request in requests:
                    request.send(100, 101)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await core.wait_for(lambda: all(request.aborted for request in requests))
        assert [request.finished_at for request in requests] == [None] * n
        # Nobody else notices.
        other = asyncio.create_task(front_end.openai.chat.completions.create(**_body()))
        (await core.next_request()).send(EOS, finish=STOP, stop_id=EOS)
        assert (await other).choices[0].finish_reason == "stop"


async def test_a_client_that_leaves_in_the_middle_of_its_body(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        for _ in range(3):
            _, writer = await asyncio.open_connection("127.0.0.1", int(front_end.url.rpartition(":")[2]))
            writer.write(
                f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                'Content-Length: 500\r\n\r\n{"model":'.encode()
            )
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        assert (await front_end.http.get("/readyz")).status_code == 200
    assert core.requests == []


@pytest.mark.parametrize("n", [1, 3])
async def test_no_core_is_left_in_the_middle_of_a_stream(text: ModelText, n: int) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with FakeCore(address) as core, running(text, [core], migration_timeout=0.3) as front_end:
        async with front_end.http.stream("POST", CHAT, json=_body(stream=True, n=n)) as response:
            requests = await core.next_requests(n)
            reading = asyncio.create_task(events(response))
            for request in requests:
                request.send(*text.tokenizer.encode("So far"))
            await core.kill()
            found = await reading
        assert response.status_code == 200
        *chunks, error, done = found
        assert done == "[DONE]"
        assert orjson.loads(error)["error"]["code"] == "service_unavailable"
        assert not any("error" in chunk for chunk in map(orjson.loads, chunks))

        ready = await front_end.http.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["reason"]
        refused = await front_end.http.post(CHAT, json=_body())
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "service_unavailable"


async def test_the_client_library_sees_the_error_in_the_stream(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        stream_call = asyncio.create_task(front_end.openai.chat.completions.create(**_body(stream=True)))
        request = await core.next_request()
        request.send(*text.tokenizer.encode("So far"))
        stream: Any = await stream_call
        said = ""
        while said != "So far":
            said += (await anext(stream)).choices[0].delta.content or ""
        request.fail(pb.ERROR_KIND_INTERNAL, "The logits are not finite.")
        with pytest.raises(openai.APIError, match="not finite"):
            await anext(stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_no_core(text: ModelText, stream: bool) -> None:
    core = FakeCore(f"127.0.0.1:{free_port()}")
    await core.start()
    async with running(text, [core]) as front_end:
        await core.kill()
        async with asyncio.timeout(TIMEOUT):
            while front_end.cores.not_ready_reason() is None:
                await front_end.cores.wait_for_change()
        with pytest.raises(openai.InternalServerError) as caught:
            await front_end.openai.chat.completions.create(**_body(stream=stream))
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.InternalServerError):
            await front_end.openai.models.list()


@pytest.mark.usefixtures("late_headers")
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "raised", "status"),
    [
        (pb.ERROR_KIND_INVALID, openai.BadRequestError, 400),
        (pb.ERROR_KIND_CONTEXT_LENGTH, openai.BadRequestError, 400),
        (pb.ERROR_KIND_OVERLOADED, openai.RateLimitError, 429),
        (pb.ERROR_KIND_INTERNAL, openai.InternalServerError, 500),
    ],
)
async def test_refused_by_the_core(
    text: ModelText, stream: bool, n: int, kind: Any, raised: type[openai.APIStatusError], status: int
) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        call = asyncio.create_task(front_end.openai.chat.completions.create(**_body(stream=stream, n=n)))
        first, *siblings = await core.next_requests(n)
        first.reject(kind, "Not today.", "temperature")
        with pytest.raises(raised, match="Not today") as caught:
            await call
        assert caught.value.status_code == status
        await core.wait_for(lambda: all(request.aborted for request in siblings))


async def test_aborted_by_the_core(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        call = asyncio.create_task(front_end.openai.chat.completions.create(**_body()))
        (await core.next_request()).send(100, finish=ABORT)
        with pytest.raises(openai.InternalServerError):
            await call


async def test_headers_do_not_wait_for_a_core_that_takes_its_time(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        async with front_end.http.stream("POST", CHAT, json=_body(stream=True)) as response:
            request = await core.next_request()  # nothing is sent for it until the headers are there
            assert response.status_code == 200
            request.send(100, finish=LENGTH)
            *_, end, done = await events(response)
    assert orjson.loads(end)["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"


async def test_not_ready_before_the_tokenizer_is_loaded(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core], ready=False) as front_end:
        assert (await front_end.http.get("/livez")).status_code == 200
        for path in ("/readyz", "/health"):
            ready = await front_end.http.get(path)
            assert (ready.status_code, ready.json()["reason"]) == (503, "The tokenizer is being loaded.")
        assert (await front_end.http.post(CHAT, json=_body())).status_code == 503


async def test_shutdown_lets_running_requests_finish(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        call = asyncio.create_task(front_end.http.post(CHAT, json=_body(stream=True)))
        request = await core.next_request()
        front_end.admission.drain()
        ready = await front_end.http.get("/readyz")
        assert (ready.status_code, ready.json()["reason"]) == (503, "The server is shutting down.")
        assert (await front_end.http.get("/livez")).status_code == 200
        assert (await front_end.http.post(CHAT, json=_body())).status_code == 503
        front_end.server.stop()
        request.send(EOS, finish=STOP, stop_id=EOS)
        *_, end, done = (await call).text.split("\n\n")[:-1]
    assert '"finish_reason":"stop"' in end
    assert done == "data: [DONE]"


async def test_shutdown_ends_requests_when_the_grace_is_over(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        whole = asyncio.create_task(front_end.http.post(CHAT, json=_body()))
        waiting = await core.next_request()
        async with front_end.http.stream("POST", CHAT, json=_body(stream=True, n=2)) as response:
            requests = await core.next_requests(2)
            requests[0].send(100)
            front_end.admission.expire()
            *chunks, error, done = await events(response)
        assert done == "[DONE]"
        assert orjson.loads(error)["error"]["code"] == "service_unavailable"
        assert all(orjson.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)
        refused = await whole
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        await core.wait_for(lambda: all(request.aborted for request in [waiting, *requests]))
