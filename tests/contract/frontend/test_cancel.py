"""``DELETE /v1/requests/{id}``: ending a request from elsewhere."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import orjson
import pytest

from tests.contract.frontend.conftest import EOS, MODEL, events, running
from tests.fakes.core import STOP, FakeCore

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("by", ["answer", "client"])
async def test_a_stream_ends_with_an_error_event(text: ModelText, by: str) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        headers = {"X-Request-Id": "mine/1"}
        stream = front_end.http.stream(
            "POST", "/v1/chat/completions", json=CHAT | {"stream": True, "n": 2}, headers=headers
        )
        async with stream as response:
            requests = [await core.next_request(), await core.next_request()]
            requests[0].send(100)
            lines = response.aiter_lines()
            first = orjson.loads((await anext(lines)).removeprefix("data: "))
            name = first["id"] if by == "answer" else "mine/1"
            answer = await front_end.http.delete(f"/v1/requests/{name}")
            assert (answer.status_code, answer.json()) == (200, {"id": name, "object": "request", "cancelled": True})
            rest = [line.removeprefix("data: ") async for line in lines if line]
        await core.wait_for(lambda: all(request.aborted for request in requests))
        assert (await front_end.http.delete(f"/v1/requests/{name}")).status_code == 404
    *_, error, done = rest
    assert orjson.loads(error)["error"]["code"] == "request_cancelled"
    assert done == "[DONE]"


async def test_a_whole_answer_is_a_status_that_clients_do_not_retry(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        client = front_end.openai.with_options(max_retries=2)
        call = client.chat.completions.create(**CHAT, extra_headers={"X-Request-Id": "mine"})
        waiting = asyncio.ensure_future(call)
        request = await core.next_request()
        assert (await front_end.http.delete("/v1/requests/mine")).status_code == 200
        with pytest.raises(openai.APIStatusError) as caught:
            await waiting
        await core.wait_for(lambda: request.aborted)
    assert (caught.value.status_code, caught.value.code) == (499, "request_cancelled")
    assert len(core.requests) == 1


async def test_only_its_own_tenant_can_end_a_request(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core], keys=["one", "two"]) as front_end:
        stream = front_end.http.stream(
            "POST", "/v1/chat/completions", json=CHAT | {"stream": True}, headers={"X-Request-Id": "mine"}
        )
        async with stream as response:
            request = await core.next_request()
            other = await front_end.http.delete("/v1/requests/mine", headers={"Authorization": "Bearer two"})
            assert other.status_code == 404
            assert other.json()["error"]["code"] == "not_found"
            request.send(EOS, finish=STOP, stop_id=EOS)
            *_, last, done = await events(response)
        assert orjson.loads(last)["choices"][0]["finish_reason"] == "stop"
        assert done == "[DONE]"
        assert (await front_end.http.delete("/v1/requests/mine")).status_code == 404


async def test_unknown_ids(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        for name in ("chatcmpl-0", "x" * 2000, "a/b"):
            answer = await front_end.http.delete(f"/v1/requests/{name}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
            assert len(answer.content) < 500
