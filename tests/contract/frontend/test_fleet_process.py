"""``python -m tercet_frontend`` in a fleet: cores and models found in Redis, requests of other front ends, its end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tercet_frontend.tokenizing import ModelText
from tercet_shared.checkpoint import Checkpoint
from tercet_shared.registry.client import RedisClient, close_client, redis_client
from tercet_shared.registry.interface import CoreLoad, CoreRecord, CoreState
from tercet_shared.registry.layout import Keys, StoredCore, core_fields
from tests.contract.frontend.conftest import EOS, TIMEOUT, events
from tests.contract.frontend.test_process import CHAT, front_end
from tests.fakes.checkpoints import write_tiny_llama
from tests.fakes.core import STOP, FakeCore
from tests.fakes.redis_server import RedisServer, redis_server

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
KEYS = Keys("fleet")


@pytest.fixture
async def redis() -> AsyncIterator[RedisServer]:
    async with redis_server() as server:
        yield server


async def register(client: RedisClient, core: FakeCore, source: Path) -> None:
    """Writes down that ``core`` serves what is at ``source``, as a core does of itself."""
    welcome = core.welcome
    record = CoreRecord(
        core_id=welcome.core_id, address=core.address, incarnation=welcome.incarnation,
        served_names=tuple(welcome.served_names), source=str(source), revision="",
        model_fingerprint=welcome.model_fingerprint, tokenizer_fingerprint=welcome.tokenizer_fingerprint,
        block_size=16, state=CoreState.READY, load=CoreLoad(),
    )  # fmt: skip
    fields = core_fields(StoredCore(record, life=1, ttl=3_600.0))
    await client.hset(KEYS.core(record.core_id), mapping=fields)  # type: ignore[arg-type,misc]
    await client.zadd(KEYS.cores, {record.core_id: time.time() * 1e3})
    await client.xadd(KEYS.changes, {"core": record.core_id, "what": "up"})


async def ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(TIMEOUT):
        while (await http.get("/readyz")).status_code != 200:
            pass


async def hears(http: httpx.AsyncClient) -> None:
    """Returns when the front end hears of the requests of others, and so can be asked for them."""
    async with asyncio.timeout(TIMEOUT):
        while (await http.delete("/v1/requests/none")).status_code != 404:
            pass


async def test_models_are_found_and_requests_ended_from_elsewhere(redis: RedisServer, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "model", vocab=300)
    fingerprint = ModelText.read(Checkpoint.open(str(source))).tokenizer.fingerprint
    flags = ("--port", "0", "--redis-prefix=fleet", "--model-alias=chat=tiny", "--api-key=secret")
    client = redis_client(redis.url, timeout=5.0)
    async with (
        FakeCore(served_names=["tiny"], tokenizer_fingerprint=fingerprint, vocab_size=300) as core,
        front_end(*flags, TERCET_REDIS_URL=redis.url) as one,
        front_end(*flags, TERCET_REDIS_URL=redis.url) as two,
    ):
        urls = [(await each.report("ready")).detail["url"] for each in (one, two)]
        headers = {"Authorization": "Bearer secret"}
        async with (
            httpx.AsyncClient(base_url=urls[0], timeout=TIMEOUT, headers=headers) as http,
            httpx.AsyncClient(base_url=urls[1], timeout=TIMEOUT, headers=headers) as other,
        ):
            before = await http.get("/readyz")
            assert (before.status_code, before.json()["reason"]) == (503, "No core has announced a model yet.")
            await register(client, core, source)
            for client_of in (http, other):
                await ready(client_of)
                await hears(client_of)
            assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["tiny", "chat"]
            body = {"model": "chat", "messages": MESSAGES, "stream": True}
            async with http.stream("POST", CHAT, json=body, headers={"X-Request-Id": "mine"}) as response:
                request = await core.next_request()
                request.send(100)
                lines = response.aiter_lines()
                first = orjson.loads((await anext(lines)).removeprefix("data: "))
                route = await client.get(KEYS.route(first["id"]))
                assert route is None or orjson.loads(route)["core"] == "fake"  # it is written some time soon
                assert (await other.delete("/v1/requests/another")).status_code == 404
                assert (await other.delete("/v1/requests/mine")).json()["cancelled"]
                rest = [line async for line in lines if line]
            assert orjson.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "request_cancelled"
            await core.wait_for(lambda: request.aborted)
            for process in (one, two):
                process.process.send_signal(signal.SIGTERM)
        assert [await one.end(), await two.end()] == [0, 0]
    await close_client(client)


async def test_a_front_end_that_leaves_still_serves_who_has_not_heard_of_it(
    model_path: Path, text: ModelText, tmp_path: Path
) -> None:
    socket = f"unix:{tmp_path}/core.sock"
    flags = ("--core", socket, "--port", "0", "--drain-delay", "3600", "--served-model-name", "m")
    async with (
        FakeCore(socket, tokenizer_fingerprint=text.tokenizer.fingerprint) as core,
        front_end(str(model_path), *flags) as process,
    ):
        url = (await process.report("ready")).detail["url"]
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as http:
            await ready(http)
            body = {"model": "m", "messages": MESSAGES, "stream": True}
            async with http.stream("POST", CHAT, json=body) as response:
                request = await core.next_request()
                process.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(TIMEOUT):
                    while (answer := await http.get("/readyz")).status_code == 200:
                        pass
                assert answer.json()["reason"] == "The server is shutting down."
                async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as late:
                    asking = asyncio.create_task(late.post(CHAT, json=body | {"stream": False}))
                    (await core.next_request()).send(EOS, finish=STOP, stop_id=EOS)
                    assert (await asking).status_code == 200
                request.send(100)
                request.send(EOS, finish=STOP, stop_id=EOS)
                *_, last, done = await events(response)
            assert orjson.loads(last)["choices"][0]["finish_reason"] == "stop"
            assert done == "[DONE]"
