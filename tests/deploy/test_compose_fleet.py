"""The commands of `docker/compose.yaml` are started as they stand, and a chat is answered through its proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.deploy.compose_fleet import TIMEOUT_S, ComposeFleet
from tests.deploy.exported_metrics import exported
from tests.fakes.checkpoints import write_tiny_llama

pytestmark = pytest.mark.timeout(400)
"""Six processes start, on a machine that may be busy."""

MODEL = "tiny"
FRONTENDS = ("frontend-1", "frontend-2")

EVERY_CHAT = (
    "gen_ai_server_request_duration_seconds_bucket", "gen_ai_server_time_to_first_token_seconds_bucket",
    "gen_ai_server_time_per_output_token_seconds_bucket", "http_server_request_duration_seconds_count",
    "tercet_frontend_requests_total", "tercet_frontend_tokens_total", "tercet_frontend_cores",
    "tercet_frontend_choices",
    "tercet_frontend_registry_healthy", "tercet_frontend_migrations_total", "tercet_requests_arrived_total",
    "tercet_requests_ended_total", "tercet_kv_blocks", "tercet_steps_total", "tercet_step_duration_seconds_bucket",
    "tercet_queue_duration_seconds_bucket", "tercet_worker_step_duration_seconds_bucket", "tercet_worker_info",
    "tercet_worker_memory_bytes", "tercet_worker_linked", "tercet_workers",
)  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[ComposeFleet]:
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as directory:
        model = write_tiny_llama(Path(directory) / MODEL)
        variables = {"TERCET_MODEL": str(model), "TERCET_DTYPE": "float32", "TERCET_THREADS": "1",
                     "TERCET_KV_CACHE_MEMORY": "64MiB", "TERCET_TRACE_RATIO": "1"}  # fmt: skip
        async with ComposeFleet(Path(directory), variables) as running:
            running.start("valkey", "worker-1", "core-1", "frontend-1", "frontend-2", "proxy")
            await running.healthy("worker-1", "core-1", *FRONTENDS)
            await passed_on(running)
            yield running


async def whole(fleet: ComposeFleet) -> None:
    """Starts the front ends that another test has stopped."""
    missing = [name for name in FRONTENDS if name not in fleet.running]
    if missing:
        fleet.start(*missing)
        await fleet.healthy(*missing)
        await passed_on(fleet)


async def passed_on(fleet: ComposeFleet) -> None:
    """Waits until the proxy runs and has seen a front end that is ready, for which it looks once a second."""
    async with asyncio.timeout(TIMEOUT_S), httpx.AsyncClient(base_url=fleet.url("proxy", 8000), timeout=120) as client:
        while True:
            with contextlib.suppress(httpx.ConnectError):
                if (await client.get("/v1/models")).status_code == 200:
                    return
            await asyncio.sleep(0.1)


def chat(tokens: int, text: str = "What is a tercet?") -> dict[str, object]:
    return {
        "model": MODEL, "stream": True, "temperature": 0, "max_tokens": tokens, "ignore_eos": True,
        "messages": [{"role": "user", "content": text}],
    }  # fmt: skip


async def answer(client: httpx.AsyncClient, tokens: int, begun: asyncio.Event | None = None) -> tuple[str, str | None]:
    """Returns the text and how it ended; sets ``begun`` with its first piece."""
    text, reason = "", None
    async with client.stream("POST", "/v1/chat/completions", json=chat(tokens)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
                    if text and begun is not None:
                        begun.set()
    return text, reason


@pytest.mark.asyncio(loop_scope="module")
async def test_a_chat_is_answered_through_the_proxy(fleet: ComposeFleet) -> None:
    await whole(fleet)
    async with httpx.AsyncClient(base_url=fleet.url("proxy", 8000), timeout=120) as client:
        models = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == [MODEL]
        text, reason = await answer(client, 16)
    assert text
    assert reason == "length"


@pytest.mark.asyncio(loop_scope="module")
async def test_the_services_export_what_dashboards_and_alerts_are_checked_against(fleet: ComposeFleet) -> None:
    """`exported` describes instruments; this is what Prometheus really gets, after a chat."""
    await whole(fleet)
    async with httpx.AsyncClient(base_url=fleet.url("proxy", 8000), timeout=120) as client:
        await answer(client, 16)
    expected = exported()
    found: dict[str, str] = {}
    async with httpx.AsyncClient(timeout=120, headers={"Accept": "application/openmetrics-text"}) as client:
        for name in ("frontend-1", "frontend-2", "core-1", "worker-1"):
            job = f"tercet-{name.partition('-')[0]}"
            text = (await client.get(f"{fleet.url(name, 9100)}/metrics")).text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name != "target_info":
                        found[sample.name] = job
                        series = expected[sample.name]
                        assert series.job == job, sample
                        assert {*sample.labels, "job", "instance"} == series.labels, sample
            if job == "tercet-frontend" and "gen_ai_server_time_to_first_token_seconds_count" in text:
                assert re.search(r'time_to_first_token_seconds_bucket\{.*\} \d.* # \{.*trace_id="[0-9a-f]{32}"', text)
    # What a chat that succeeds does not touch has no sample yet.
    assert set(EVERY_CHAT) <= set(found)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_front_end_that_is_stopped_loses_no_stream_and_no_request(fleet: ComposeFleet) -> None:
    await whole(fleet)
    async with httpx.AsyncClient(base_url=fleet.url("proxy", 8000), timeout=60) as client:
        expected, _ = await answer(client, 1200)
        begun = [asyncio.Event(), asyncio.Event()]  # one at each front end: the proxy takes the less busy one
        streams = [asyncio.create_task(answer(client, 1200, each)) for each in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        stopping = asyncio.create_task(fleet.stop("frontend-1"))
        short = 0
        while not stopping.done() or short == 0:
            assert (await answer(client, 4))[1] == "length"
            short += 1
        assert await stopping == 0
        assert (await answer(client, 4))[1] == "length"
        for stream in streams:
            assert await stream == (expected, "length")


@pytest.mark.asyncio(loop_scope="module")
async def test_without_a_front_end_the_proxy_says_so_in_the_shape_of_errors(fleet: ComposeFleet) -> None:
    left = [name for name in FRONTENDS if name in fleet.running]
    assert set(await asyncio.gather(*(fleet.stop(name) for name in left))) == {0}
    async with httpx.AsyncClient(base_url=fleet.url("proxy", 8000), timeout=120) as client:
        response = await client.post("/v1/chat/completions", json=chat(1))
    assert response.status_code == 503
    assert response.headers["Retry-After"]
    assert response.json()["error"]["code"] == "unavailable"
