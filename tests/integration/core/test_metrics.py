"""What the core's /metrics says is what happened, and gauges return to zero."""

from __future__ import annotations

import re

import httpx
import pytest

from tercet_proto.v1 import engine_pb2 as pb
from tests.fakes.ports import free_port
from tests.fakes.stream_client import Client
from tests.fakes.worker import FakeWorker, expected
from tests.integration.core.conftest import StartCore


async def _read(port: int) -> dict[str, float]:
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"http://127.0.0.1:{port}/metrics")).raise_for_status().text
    found = {}
    for name, labels, value in re.findall(r"^(tercet_\w+)(\{[^}]*\})? ([0-9.e+-]+)$", text, re.MULTILINE):
        kept = [label for label in re.findall(r'(\w+)="([^"]*)"', labels) if not label[0].startswith("otel_scope")]
        found[name + "".join(f"/{value}" for _, value in kept)] = float(value)
    return found


async def test_counters_reconcile_and_gauges_return_to_zero(start_core: StartCore) -> None:
    port = free_port()
    async with (
        start_core(metrics_port=port) as core,
        FakeWorker(core.link) as worker,
        Client(core.settings.listen) as client,
    ):
        worker.hold()
        await client.submit(1, [9] * 40, max_tokens=5)
        await worker.wait_for_steps(2)
        busy = await _read(port)
        assert busy["tercet_requests_running"] == 1
        assert busy["tercet_kv_blocks/held"] == 3
        worker.release()
        await client.finished(1)
        await client.submit(2, [9] * 40, max_tokens=5)
        await client.finished(2)
        idle = await _read(port)
    assert idle["tercet_requests_running"] == 0
    assert idle["tercet_requests_waiting/capacity"] == idle["tercet_requests_waiting/preempted"] == 0
    assert idle["tercet_outbox_rows"] == 0
    assert idle["tercet_kv_blocks/held"] == 0
    assert idle["tercet_kv_blocks/free"] + idle["tercet_kv_blocks/cached"] == 1024
    assert idle["tercet_tokens_prompt_total"] == 80
    assert idle["tercet_tokens_cached_total"] == 32
    assert idle["tercet_tokens_output_total"] == 10
    assert idle["tercet_step_duration_seconds_count/plan"] == idle["tercet_steps_total"]
    assert idle["tercet_step_duration_seconds_count/apply"] == idle["tercet_steps_total"]


async def test_stats_follow_the_steps_without_a_heartbeat(start_core: StartCore) -> None:
    async with start_core(heartbeat_interval=60.0, heartbeat_timeout=180.0) as core, FakeWorker(core.link):
        async with Client(core.settings.listen) as client:
            await client.submit(1, [9] * 40, max_tokens=5)
            await client.finished(1)
            await client.wait_for(lambda: client.stats is not None and client.stats.output_tokens == 5)


async def test_a_request_that_waits_too_long_ends_with_a_clear_error(start_core: StartCore) -> None:
    async with start_core(max_num_seqs=1) as core, FakeWorker(core.link) as worker:
        async with Client(core.settings.listen) as client:
            worker.hold()
            await client.submit(1, [9], max_tokens=30, queue_deadline_s=0.05)
            await worker.wait_for_steps(2)
            await client.submit(2, [8], max_tokens=30, queue_deadline_s=0.05)
            await client.finished(2)
            rejected = client.choices[2].rejected
            assert rejected is not None
            assert rejected.kind == pb.ERROR_KIND_OVERLOADED
            worker.release()
            await client.finished(1)
            assert client.choices[1].tokens == expected([9], 30), "the deadline is for the wait, not for the answer"


async def test_a_frame_may_end_a_request_twice(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.link) as worker, Client(core.settings.listen) as client:
        worker.hold()
        await client.submit(1, [9], max_tokens=30)
        await worker.wait_for_steps(1)
        await client.send(aborts=[pb.Abort(handle=1), pb.Abort(handle=1)], finishes=[pb.Finish(handle=1)])
        worker.release()
        await client.submit(2, [8], max_tokens=3)
        await client.finished(2)
        assert client.choices[2].tokens == expected([8], 3)


@pytest.mark.parametrize("port", [0])
async def test_a_free_port_is_taken_on_request(start_core: StartCore, port: int) -> None:
    async with start_core(metrics_port=port) as core, FakeWorker(core.link), Client(core.settings.listen) as client:
        assert client.welcome.model_name == "fake"
