"""What a core tells of requests: ends by reason, spans of those that are traced, and what the worker hears of them."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tercet_core.core import serve
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.config import CoreSettings, parse
from tercet_shared.telemetry.tracing import unpacked
from tests.fakes.otlp import Collector, Span
from tests.fakes.ports import free_port
from tests.fakes.stream_client import Client
from tests.fakes.worker import FakeWorker

TRACE = "ab" * 16
TRACEPARENT = f"00-{TRACE}-{'cd' * 8}-01"
TIMEOUT = 60.0


class Reporter:
    def progress(self, stage: str, fraction: float | None = None) -> None:
        pass

    def ready(self, **detail: Any) -> None:
        pass

    def fatal(self, message: str) -> None:
        raise AssertionError(message)

    def restart(self, child: str, pid: int, message: str) -> None:
        pass


@asynccontextmanager
async def system(
    tmp: Path, offer: dict[str, Any] | None = None, **changes: Any
) -> AsyncIterator[tuple[FakeWorker, Client, int]]:
    base = {"listen": f"unix:{tmp}/core.sock", "link": tmp / "worker.sock", "heartbeat_interval": 0.1, "core_id": "c"}
    settings = parse(CoreSettings, []).model_copy(update={**base, **changes})
    stop = asyncio.Event()
    task = asyncio.create_task(serve(settings, Reporter(), stop))
    try:
        while not settings.link.exists():
            assert not task.done(), task.exception()
            await asyncio.sleep(0.01)
        async with FakeWorker(settings.link, **(offer or {})) as worker, Client(settings.listen) as client:
            yield worker, client, settings.metrics_port or 0
    finally:
        stop.set()
        await asyncio.wait_for(task, TIMEOUT)


@pytest.fixture
def tmp() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as path:
        yield Path(path)


async def read(port: int) -> dict[str, float]:
    """Returns the samples that are not of histograms' buckets, by name and label values."""
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"http://127.0.0.1:{port}/metrics")).raise_for_status().text
    found = {}
    for name, labels, value in re.findall(r"^(\w+)(?:\{([^}]*)\})? ([0-9.e+-]+)$", text, re.MULTILINE):
        if not name.endswith("_bucket"):
            found[name + "".join(f"/{part}" for part in re.findall(r'="([^"]*)"', labels))] = float(value)
    return found


def named(spans: list[Span]) -> dict[str, Span]:
    return {span.name: span for span in spans}


async def trace(collector: Collector, count: int = 1, name: str = "tercet.core.request") -> list[Span]:
    """Waits for the spans of so many requests and returns the whole trace."""

    def arrived() -> list[Span]:
        spans = collector.trace(TRACE)
        return spans if sum(span.name == name for span in spans) >= count else []

    return await asyncio.to_thread(collector.wait_for, arrived)


def traced(collector: Collector, **changes: Any) -> dict[str, Any]:
    return {"otlp_endpoint": collector.endpoint, "trace_ratio": 0.0, **changes}


async def test_a_traced_request_is_a_tree(tmp: Path, collector: Collector) -> None:
    async with system(tmp, **traced(collector)) as (worker, client, _):
        await client.submit(1, [9] * 40, max_tokens=5, traceparent=TRACEPARENT)
        await client.finished(1)
        plan = next(plan for plan in worker.plans if len(plan.new))
        assert plan.trace is not None
        assert plan.trace.slots.tolist() == plan.new.slots.tolist()
        below = unpacked(plan.trace.spans)
    found = named(await trace(collector))
    request = found["tercet.core.request"]
    assert request.parent_id == "cd" * 8
    assert f"{below.span_id:016x}" == request.span_id
    assert request.attributes["gen_ai.usage.input_tokens"] == 40
    assert request.attributes["gen_ai.usage.output_tokens"] == 5
    assert (request.attributes["tercet.end"], request.attributes["tercet.core.id"]) == ("length", "c")
    parts = [found["tercet.queue"], found["tercet.prefill"], found["tercet.decode"]]
    assert all(part.parent_id == request.span_id for part in parts)
    times = [time for part in parts for time in (part.start, part.end)]
    assert times == sorted(times)
    assert request.start <= parts[0].start
    assert parts[2].end == request.end
    assert found["tercet.core.step"].parent_id == request.span_id
    assert found["tercet.core.step"].attributes["tercet.step.requests"] == 1


async def test_what_is_not_traced_leaves_no_mark(tmp: Path, collector: Collector) -> None:
    async with system(tmp, **traced(collector, trace_ratio=1.0)) as (worker, client, _):
        await client.submit(1, [9], max_tokens=3)
        await client.submit(2, [9], max_tokens=3, traceparent=TRACEPARENT[:-1] + "0")
        await client.finished(1, 2)
        assert all(plan.trace is None for plan in worker.plans)
    assert collector.spans == []


async def test_an_aborted_request_ends_its_span_and_counts_as_aborted(tmp: Path, collector: Collector) -> None:
    changes = traced(collector, metrics_port=free_port())
    async with system(tmp, **changes) as (worker, client, port):
        worker.hold()
        await client.submit(1, [9] * 40, max_tokens=5, traceparent=TRACEPARENT)
        await worker.wait_for_steps(1)
        await client.send(aborts=[pb.Abort(handle=1, reason="the client is gone")])
        (request,) = [span for span in await trace(collector) if span.name == "tercet.core.request"]
        assert (request.attributes["tercet.end"], request.attributes["gen_ai.usage.output_tokens"]) == ("abort", 0)
        assert "tercet.decode" not in named(collector.trace(TRACE)), "there was no token"
        worker.release()
        found = await read(port)
        assert found["tercet_requests_ended_total/abort"] == 1
        assert found["tercet_requests_running"] == 0
        assert found["tercet_kv_blocks/held"] == 0


async def test_every_request_that_arrived_has_ended_for_a_reason(tmp: Path) -> None:
    async with system(tmp, metrics_port=free_port(), max_num_seqs=2) as (worker, client, port):
        for handle in (1, 2, 3):  # one by one: of two in the same step, neither has cached blocks
            await client.submit(handle, [9] * 20, max_tokens=4)
            await client.finished(handle)
        worker.hold()
        steps = worker.steps
        await client.submit(4, [8], max_tokens=4)
        await client.submit(5, [8], max_tokens=900)
        await worker.wait_for_steps(steps + 1)
        await client.submit(6, [8], max_tokens=4, queue_deadline_s=0.01)  # there is no slot
        await client.finished(6)
        await client.submit(7, [8] * 5_000, max_tokens=4)  # too long
        await client.finished(7)
        await client.send(finishes=[pb.Finish(handle=4, output_tokens=1), pb.Finish(handle=4)])
        async with Client(f"unix:{tmp}/core.sock", "other") as other:
            await other.submit(1, [7], max_tokens=900)
            worker.release()
            await other.wait_for(lambda: bool(other.choices[1].tokens))
            worker.hold()  # neither this one nor 5 comes to an end of its own
        async with asyncio.timeout(TIMEOUT):
            while "tercet_requests_ended_total/disconnect" not in await read(port):
                pass  # the core notices by itself; there is no event here
        await client.send(aborts=[pb.Abort(handle=5)])
        await client.submit(8, [8], max_tokens=4)
        worker.release()
        await client.finished(8)
        found = await read(port)
    ended = {name.rpartition("/")[2]: count for name, count in found.items() if "requests_ended" in name}
    assert ended == {"length": 4, "expired": 1, "stop_string": 1, "disconnect": 1, "abort": 1}
    assert found["tercet_requests_arrived_total"] == sum(ended.values())
    assert found["tercet_requests_rejected_total/context_length"] == 1
    assert found["tercet_queue_duration_seconds_count"] == 7, "one that expired has not begun"
    assert found["tercet_prefix_hits_total"] == 2
    assert found["tercet_frontends"] == found["tercet_workers"] == 1


async def test_a_preempted_request_is_told_to_the_worker_again(tmp: Path, collector: Collector) -> None:
    async with system(tmp, {"num_blocks": 5}, **traced(collector)) as (worker, client, _):  # enough for one alone
        await client.submit(1, [9] * 16, max_tokens=40)
        await client.submit(2, [8] * 16, max_tokens=40, traceparent=TRACEPARENT)
        await client.finished(1, 2)
        began = [plan for plan in worker.plans if plan.trace is not None and len(plan.trace.slots)]
        assert len(began) == 2
        assert began[0].trace is not None
        assert began[1].trace is not None
        assert began[0].trace.spans == began[1].trace.spans
    (request,) = [span for span in await trace(collector) if span.name == "tercet.core.request"]
    assert request.attributes["tercet.resumptions"] == 1
    assert [event.name for event in request.events] == ["tercet.resumed"]
    assert request.attributes["gen_ai.usage.output_tokens"] == 40


async def test_spans_of_steps_are_bounded_by_the_clock(tmp: Path, collector: Collector) -> None:
    async with system(tmp, **traced(collector)) as (worker, client, _):
        for handle in range(1, 9):
            await client.submit(handle, [9], max_tokens=200, traceparent=TRACEPARENT)
        await client.finished(*range(1, 9))
        steps = worker.steps
        marked = [plan for plan in worker.plans if plan.trace is not None and plan.trace.step]
    spans = await trace(collector, 8)
    own = [span for span in spans if span.name == "tercet.core.step"]
    assert len(own) == len(marked)
    longest = max(span.end for span in spans) - min(span.start for span in spans)
    assert 1 <= len(own) <= longest / 1e8 + 2
    assert len(own) < steps
    requests = {span.span_id for span in spans if span.name == "tercet.core.request"}
    for span in own:
        computed = {span.parent_id, *span.links}
        assert computed <= requests
        assert len(computed) == span.attributes["tercet.step.requests"]
