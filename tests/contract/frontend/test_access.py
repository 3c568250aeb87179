"""Keys from files and Redis, their models, limits and priorities, over HTTP."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest

from tercet_frontend.access.key_file import KeyFile
from tercet_frontend.access.quotas import LocalQuotas
from tercet_frontend.access.redis_keys import RedisKeys, redis_key
from tercet_frontend.access.redis_link import RedisLink
from tercet_frontend.access.redis_quotas import RedisQuotas
from tercet_frontend.auth import ApiKeys
from tests.contract.frontend.conftest import EOS, MODEL, running
from tests.contract.frontend.wire import CHAT, MESSAGES, body
from tests.fakes.core import STOP, FakeCore
from tests.fakes.redis_server import redis_server

if TYPE_CHECKING:
    from pathlib import Path

    from tercet_frontend.tokenizing import ModelText

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/v1/embeddings", {"input": "Hi"}),
    ("/tokenize", {"prompt": "Hi"}),
    ("/detokenize", {"tokens": [100]}),
]


def hashed(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def keys_of(path: Path, **entries: dict[str, Any]) -> ApiKeys:
    """Returns the keys of a file; each is the same as its name."""
    path.write_text(
        json.dumps(
            {"keys": [{"name": name, "hash": f"sha256:{hashed(name)}"} | entry for name, entry in entries.items()]}
        )
    )
    return ApiKeys(["plain"], file=KeyFile(path))


def auth(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_keys_of_a_file(text: ModelText, says: Any, tmp_path: Path) -> None:
    keys = keys_of(
        tmp_path / "keys.json",
        alice={"tenant": "team"},
        bob={"tenant": "team"},
        off={"disabled": True},
        old={"expires": "2020-01-01T00:00:00Z"},
        new={"expires": "2100-01-01T00:00:00Z"},
    )
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core], api_keys=keys) as front_end:
        for key in ("alice", "bob", "new", "plain"):
            assert (await front_end.http.post(CHAT, json=body(), headers=auth(key))).status_code == 200
        for key, message in (
            ("off", "disabled"),
            ("old", "expired"),
            ("none", "not valid"),
            ("x" * 5_000, "not valid"),
        ):
            refused = await front_end.http.post(CHAT, json=body(), headers=auth(key))
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert message in refused.json()["error"]["message"]
    assert [request.submit.tenant for request in core.requests[:3]] == ["team", "team", "new"]
    assert [request.submit.cache_salt for request in core.requests[:3]] == ["team", "team", "new"]


async def test_every_route_needs_a_key(text: ModelText, tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "keys.json")  # without any: then nobody has one
    async with FakeCore() as core, running(text, [core], api_keys=keys) as front_end:
        del front_end.http.headers["Authorization"]
        schema = (await front_end.http.get("/openapi.json", headers=auth("plain"))).json()
        checked = 0
        for path, operations in schema["paths"].items():
            for method in operations:
                answer = await front_end.http.request(method, path.replace("{", "").replace("}", ""))
                assert answer.status_code == (200 if path in ("/livez", "/readyz", "/health") else 401), (method, path)
                checked += answer.status_code == 401
        assert checked >= 14
        assert (await front_end.http.get("/")).status_code == 200  # the chat page holds no secret
        refused = await front_end.http.post("/v1/messages", json={})
        assert refused.json()["error"]["type"] == "authentication_error"


async def test_models_of_a_key(text: ModelText, says: Any, tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "keys.json", some={"models": ["sm*"]}, other={"models": ["other", "smo"]})
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core], api_keys=keys) as front_end:
        http = front_end.http
        assert (await http.get("/v1/models", headers=auth("other"))).json()["data"] == []
        assert len((await http.get("/v1/models", headers=auth("some"))).json()["data"]) == 1
        assert (await http.get(f"/v1/models/{MODEL}", headers=auth("some"))).status_code == 200
        for path, fields in ENDPOINTS:
            unknown = await http.post(path, json=fields | {"model": "nonesuch"}, headers=auth("some"))
            hidden = await http.post(path, json=fields | {"model": MODEL}, headers=auth("other"))
            assert hidden.status_code == unknown.status_code == 404, path
            assert hidden.text == unknown.text.replace("nonesuch", MODEL)  # no difference that says that it is there
        hidden = await http.get(f"/v1/models/{MODEL}", headers=auth("other"))
        unknown = await http.get("/v1/models/nonesuch", headers=auth("other"))
        assert hidden.text == unknown.text.replace("nonesuch", MODEL)
        assert not core.requests
        assert (await http.post(CHAT, json=body(), headers=auth("some"))).status_code == 200


async def test_priorities_of_a_key(text: ModelText, says: Any, tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "keys.json", late={"priority": 5, "best_priority": 2})
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core], api_keys=keys) as front_end:
        for fields in ({}, {"priority": 2}, {"priority": 9}):
            assert (await front_end.http.post(CHAT, json=body(**fields), headers=auth("late"))).status_code == 200
        refused = await front_end.http.post(CHAT, json=body(priority=1), headers=auth("late"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert [request.submit.priority for request in core.requests] == [5, 2, 9]


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_at_once(text: ModelText, tmp_path: Path, stream: bool) -> None:
    keys = keys_of(tmp_path / "keys.json", two={"max_concurrent": 2}, other={"max_concurrent": 1})
    async with FakeCore() as core, running(text, [core], api_keys=keys) as front_end:
        http = front_end.http
        calls = [asyncio.create_task(http.post(CHAT, json=body(stream=stream), headers=auth("two"))) for _ in range(2)]
        requests = await core.next_requests(2)
        refused = await http.post(CHAT, json=body(stream=stream), headers=auth("two"))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "2 requests at once" in refused.json()["error"]["message"]
        # What needs no place has none: a request can be ended by a key that is full.
        assert (await http.get("/v1/models", headers=auth("two"))).status_code == 200
        other = asyncio.create_task(http.post(CHAT, json=body(), headers=auth("other")))
        (await core.next_request()).send(EOS, finish=STOP, stop_id=EOS)
        assert (await other).status_code == 200
        # A place is free as soon as its request is over, whichever way.
        calls[0].cancel()
        await core.wait_for(lambda: requests[0].aborted)
        third = asyncio.create_task(http.post(CHAT, json=body(), headers=auth("two")))
        (await core.next_request()).send(EOS, finish=STOP, stop_id=EOS)
        assert (await third).status_code == 200
        requests[1].send(EOS, finish=STOP, stop_id=EOS)
        assert (await calls[1]).status_code == 200
        invalid = [await http.post(CHAT, json=body(n=0), headers=auth("two")) for _ in range(5)]
        assert {answer.status_code for answer in invalid} == {400}


async def test_requests_per_minute(text: ModelText, says: Any, tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "keys.json", slow={"requests_per_minute": 2})
    quotas = LocalQuotas(clock=lambda: 0.0)
    async with (
        FakeCore(outputs=says("Yes")) as core,
        running(text, [core], api_keys=keys, quotas=quotas) as front_end,
    ):
        client = front_end.openai.with_options(api_key="slow")
        first = await client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"] == "30s"
        assert "x-ratelimit-limit-tokens" not in first.headers
        assert (await front_end.http.post("/tokenize", json={"prompt": "Hi"}, headers=auth("slow"))).status_code == 200
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert caught.value.response.headers["retry-after"] == "30"
        assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        messages = anthropic.AsyncAnthropic(base_url=front_end.url, api_key="slow", max_retries=0)
        with pytest.raises(anthropic.RateLimitError, match="2 requests per minute"):
            await messages.messages.create(model=MODEL, messages=MESSAGES, max_tokens=5)
        await messages.close()
    assert len(core.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_per_minute(text: ModelText, says: Any, tmp_path: Path, stream: bool) -> None:
    keys = keys_of(tmp_path / "keys.json", small={"tokens_per_minute": 1_000})
    quotas = LocalQuotas(clock=lambda: 0.0)
    async with (
        FakeCore(outputs=says("Yes")) as core,
        running(text, [core], api_keys=keys, quotas=quotas) as front_end,
    ):
        http = front_end.http
        answer = await http.post(CHAT, json=body(stream=stream, max_tokens=800), headers=auth("small"))
        assert answer.status_code == 200
        reserved = 1_000 - int(answer.headers["x-ratelimit-remaining-tokens"])
        assert 800 < reserved < 850  # the guess, as the headers leave before the answer is known
        again = await http.post(CHAT, json=body(max_tokens=900), headers=auth("small"))
        assert again.status_code == 200  # what was not used was given back
        used = again.json()["usage"]["total_tokens"]
        left = int(again.headers["x-ratelimit-remaining-tokens"])
        assert left == 1_000 - used - (900 + len(again.request.content) // 4)
        refused = await http.post(CHAT, json=body(max_tokens=1_000), headers=auth("small"))
        assert refused.status_code == 429
        missing = 1_000 - (1_000 - 2 * used)
        assert int(refused.headers["retry-after"]) == pytest.approx(missing * 60 / 1_000, abs=1)
        # An estimate of the prompt alone is enough to refuse: nothing was tokenized.
        refused = await http.post(
            CHAT, json=body(messages=[{"role": "user", "content": "x" * 8_000}]), headers=auth("small")
        )
        assert refused.status_code == 429
    assert len(core.requests) == 2


async def test_what_an_aborted_stream_used_is_charged(text: ModelText, tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "keys.json", small={"tokens_per_minute": 1_000})
    quotas = LocalQuotas(clock=lambda: 0.0)
    async with FakeCore() as core, running(text, [core], api_keys=keys, quotas=quotas) as front_end:
        payload = body(stream=True, max_tokens=500)
        async with front_end.http.stream("POST", CHAT, json=payload, headers=auth("small")) as response:
            request = await core.next_request()
            request.send(*[100] * 300)
            async for line in response.aiter_lines():
                if "content" in line and '"content":""' not in line:
                    break
        await core.wait_for(lambda: request.aborted)
        call = asyncio.create_task(front_end.http.post(CHAT, json=body(max_tokens=10), headers=auth("small")))
        (await core.next_request()).send(EOS, finish=STOP, stop_id=EOS)
        answer = await call
        prompt = answer.json()["usage"]["prompt_tokens"]
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert left == 1_000 - (300 + prompt) - (10 + len(answer.request.content) // 4)


async def test_keys_and_quotas_in_redis(text: ModelText, says: Any) -> None:
    async with redis_server() as redis:
        link = RedisLink(redis.url, timeout=5.0)
        await link.client.hset(
            redis_key(bytes.fromhex(hashed("far"))), mapping={"name": "far", "requests_per_minute": "2"}
        )
        keys, quotas = ApiKeys(["plain"], remote=RedisKeys(link)), RedisQuotas(link)
        async with FakeCore(outputs=says("Yes")) as core:
            async with (
                running(text, [core], api_keys=keys, quotas=quotas) as one,
                running(text, [core], api_keys=keys, quotas=quotas) as two,
            ):
                assert (await one.http.post(CHAT, json=body(), headers=auth("far"))).status_code == 200
                answer = await two.http.post(CHAT, json=body(), headers=auth("far"))
                assert (answer.status_code, answer.headers["x-ratelimit-remaining-requests"]) == (200, "0")
                refused = await one.http.post(CHAT, json=body(), headers=auth("far"))
                assert refused.status_code == 429
                assert 0 < int(refused.headers["retry-after"]) <= 30
                assert (await one.http.get("/v1/models", headers=auth("near"))).status_code == 401
                await redis.stop()
                assert (await two.http.post(CHAT, json=body(), headers=auth("far"))).status_code == 200
                unknown = await two.http.get("/v1/models", headers=auth("never-seen"))
                assert (unknown.status_code, unknown.headers["retry-after"]) == (503, "1")
                assert (await two.http.get("/v1/models", headers=auth("plain"))).status_code == 200
        await quotas.close()
    assert {request.submit.tenant for request in core.requests} == {"far"}


async def test_the_clients_trace_goes_on(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        for path, fields in (*ENDPOINTS[:4], ENDPOINTS[5]):
            answer = await front_end.http.post(
                path, json=fields | {"model": MODEL}, headers={"traceparent": TRACEPARENT}
            )
            assert answer.status_code == 200, answer.text
        await front_end.http.post(CHAT, json=body(), headers={"traceparent": "nonsense"})
    assert [request.submit.traceparent for request in core.requests] == [TRACEPARENT] * 5 + [""]
