"""`tercet serve` with a collector: one request is one tree across three processes, and numbers are what clients saw."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.fakes.checkpoints import write_tiny_llama
from tests.fakes.otlp import Collector, Span
from tests.fakes.ports import free_ports

SERVICES = ("tercet-frontend", "tercet-core", "tercet-worker")
READY_S = 120.0
TIMEOUT = 60.0


@dataclass
class System:
    """A running `tercet serve`."""

    url: str
    ports: dict[str, int]
    collector: Collector
    process: subprocess.Popen[str]
    errors: Path

    async def chat(self, traceparent: str = "", **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, **fields}
        headers = {"traceparent": traceparent} if traceparent else {}
        async with httpx.AsyncClient(timeout=60) as http:
            return await http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)

    async def read(self) -> dict[str, dict[str, float]]:
        """Returns the samples of every service but histograms' buckets, by name and label values that are not empty."""
        found: dict[str, dict[str, float]] = {}
        async with httpx.AsyncClient() as http:
            for service, port in self.ports.items():
                headers = {"accept": "application/openmetrics-text; version=1.0.0"}
                answer = await http.get(f"http://127.0.0.1:{port}/metrics", headers=headers)
                found[service] = {
                    "/".join((sample.name, *filter(None, sample.labels.values()))): sample.value
                    for family in text_string_to_metric_families(answer.raise_for_status().text)
                    for sample in family.samples
                    if not sample.name.endswith("_bucket")
                }
        return found

    async def settled(self) -> dict[str, dict[str, float]]:
        """Returns the samples once no request is under way, nor a step that was planned beyond the last one's end.

        What an answer leaves in the numbers may come after it.
        """
        async with asyncio.timeout(TIMEOUT):
            while True:
                found = await self.read()  # of the front end, then of the core, then of the worker
                core, planned = found["tercet-core"], "tercet_steps_total"
                under_way = found["tercet-frontend"]["http_server_active_requests"] + core["tercet_requests_running"]
                if not under_way and core[planned] == core.get("tercet_step_duration_seconds_count/wait", 0.0):
                    return found
                await asyncio.sleep(0.02)  # numbers have no event

    async def read_when(self, service: str, name: str, value: float) -> dict[str, dict[str, float]]:
        async with asyncio.timeout(TIMEOUT):
            while (found := await self.read())[service].get(name, 0.0) != value:  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # numbers have no event
            return found


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    model = tmp_path_factory.mktemp("model") / "tiny"
    model.mkdir()
    write_tiny_llama(model, max_len=32_768)
    first = free_ports(3)[0]
    with Collector() as collector, tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as runs:
        command = [sys.executable, "-m", "tercet_shared.cli", "serve", "--port=0", f"--run-dir={runs}"]
        command += ["--dtype=float32", "--served-model-name=tiny"]
        command += [f"--otlp-endpoint={collector.endpoint}", "--trace-ratio=0", f"--metrics-port={first}"]
        command += ["--log-format=json", "--max-num-seqs=8", "--num-kv-blocks=2048", str(model)]
        environ = {"OTEL_METRIC_EXPORT_INTERVAL": "200", "OTEL_BSP_SCHEDULE_DELAY": "50"}
        errors = tmp_path_factory.mktemp("log") / "errors"  # read by its name: a descriptor's place in it is shared
        with errors.open("w") as output:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=output, text=True, env=_environ() | environ
            )
            try:
                assert process.stdout is not None
                url = next(
                    (m[1] for line in process.stdout if (m := re.search(r"listens on (http://\S+)", line))), None
                )
                if url is None:
                    pytest.fail(f"tercet serve did not start:\n{errors.read_text()}")
                ports = {service: first + place for place, service in enumerate(SERVICES)}
                yield System(url, ports, collector, process, errors)
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                process.wait(60)
                if process.stdout is not None:
                    process.stdout.close()


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("TERCET_", "OTEL_"))}


async def tree(system: System, trace_id: str, outside: str, choices: int = 1) -> list[Span]:
    """Waits for the spans of one whole request, the worker's included, and returns them.

    They come in any order, also of one process: the span of a step may come after that of a request which it ends.
    """
    whole = ("tercet.choice", "tercet.core.request", "tercet.worker.request")

    def arrived() -> list[Span]:
        spans = system.collector.trace(trace_id)
        names, ids = [span.name for span in spans], {outside, *(span.span_id for span in spans)}
        complete = all(names.count(name) >= choices for name in whole) and all(span.parent_id in ids for span in spans)
        return spans if complete and any(span.parent_id == outside for span in spans) else []

    return await asyncio.to_thread(system.collector.wait_for, arrived)


async def test_a_request_is_one_tree_across_all_processes(system: System) -> None:
    trace_id, outside = token_hex(16), token_hex(8)
    answer = await system.chat(f"00-{trace_id}-{outside}-01", max_tokens=8, n=2)
    usage = answer.json()["usage"]
    spans = await tree(system, trace_id, outside, choices=2)
    by_id = {span.span_id: span for span in spans}
    (root,) = [span for span in spans if span.parent_id == outside]
    assert (root.name, root.service) == ("chat tiny", "tercet-frontend")
    assert root.attributes["tercet.request.id"] == answer.headers["x-request-id"]
    assert root.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert root.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 16
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]

    def path(span: Span) -> list[str]:
        return [span.name] if span is root else [*path(by_id[span.parent_id]), span.name]

    paths = [path(span) for span in spans]
    down = ["chat tiny", "tercet.choice", "tercet.core.request"]
    assert paths.count(down[:2]) == paths.count(down) == 2
    for name in ("tercet.queue", "tercet.prefill", "tercet.decode", "tercet.worker.request"):
        assert paths.count([*down, name]) == 2, name
    assert [*down, "tercet.core.step", "tercet.worker.step"] in paths
    for span in spans:
        assert span.start <= span.end
        assert span is root or by_id[span.parent_id].start <= span.start + 50_000_000, "clocks are read in turn"
    workers = [span for span in spans if span.name == "tercet.worker.request"]
    cached = sum(span.attributes["tercet.cached_tokens"] for span in spans if span.name == "tercet.core.request")
    least = 2 * usage["prompt_tokens"] - cached + 16 - 2  # of each choice, the last token is drawn and no more computed
    assert sum(span.attributes["tercet.computed_tokens"] for span in workers) >= least
    assert {span.service for span in spans} == set(SERVICES)
    assert len({system.collector.resources[service]["service.instance.id"] for service in SERVICES}) == 3
    assert "hi" not in json.dumps([span.attributes for span in spans]), "prompts are not told"


async def test_a_request_that_is_not_traced_is_not(system: System) -> None:
    before = {span.trace_id for span in system.collector.spans}  # of which more may come
    await system.chat(f"00-{token_hex(16)}-{token_hex(8)}-00", max_tokens=2)
    await system.chat(max_tokens=2)
    traced, outside = token_hex(16), token_hex(8)
    await system.chat(f"00-{traced}-{outside}-01", max_tokens=2)
    await tree(system, traced, outside)
    assert {span.trace_id for span in system.collector.spans} == {*before, traced}


async def test_counters_are_what_clients_saw_and_gauges_return_to_zero(system: System) -> None:
    before = await system.settled()
    answers = await asyncio.gather(*(system.chat(max_tokens=tokens) for tokens in (1, 5, 9)))
    refused = await system.chat(max_tokens=0)
    assert refused.status_code == 400
    after = await system.settled()

    def moved(service: str, name: str) -> float:
        return after[service].get(name, 0.0) - before[service].get(name, 0.0)

    def moved_all(name: str) -> float:
        return sum(moved("tercet-frontend", each) for each in after["tercet-frontend"] if each.startswith(name))

    given = sum(answer.json()["usage"]["prompt_tokens"] for answer in answers)
    told = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
    assert told == 15
    assert moved("tercet-frontend", "tercet_frontend_tokens_total/tiny/output") == told
    assert moved("tercet-frontend", "tercet_frontend_tokens_total/tiny/input") == given
    assert moved("tercet-frontend", "tercet_frontend_requests_total/ok") == 3
    assert moved("tercet-frontend", "tercet_frontend_requests_total/rejected") == 1
    assert moved_all("tercet_frontend_rejections_total") == 1
    assert moved_all("gen_ai_server_time_to_first_token_seconds_count") == 3
    assert moved_all("gen_ai_server_time_per_output_token_seconds_count") == 2, "one had a single token"
    assert moved("tercet-core", "tercet_tokens_output_total") == told
    assert moved("tercet-core", "tercet_tokens_prompt_total") == given
    assert moved("tercet-core", "tercet_requests_arrived_total") == 3
    assert moved("tercet-core", "tercet_requests_ended_total/length") == 3
    assert moved("tercet-worker", "tercet_worker_step_tokens_sum") == moved("tercet-core", "tercet_step_tokens_sum")
    drawn = told + moved("tercet-core", "tercet_tokens_discarded_total")
    assert moved("tercet-worker", "tercet_worker_tokens_total") == drawn
    gauges = ("requests_running", "requests_waiting", "streams", "kv_blocks/held", "outbox_rows", "frontend_choices")
    for service, samples in after.items():
        for name, value in samples.items():
            if any(gauge in name for gauge in gauges) and "total" not in name:
                assert value == 0, (service, name)
    assert after["tercet-frontend"]["tercet_frontend_cores/ready"] == 1
    assert after["tercet-worker"]["tercet_worker_linked"] == after["tercet-core"]["tercet_workers"] == 1
    assert after["tercet-worker"]["tercet_worker_memory_bytes/weights"] > 100_000
    assert after["tercet-worker"]["tercet_worker_memory_bytes/kv"] > 100_000
    assert any(name.startswith("tercet_worker_info/") and "/float32/" in name for name in after["tercet-worker"])


async def test_a_client_that_leaves_is_an_abort_everywhere(system: System) -> None:
    before = await system.settled()
    trace_id, outside = token_hex(16), token_hex(8)
    # More than are computed in any time in which this process may be asleep.
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "max_tokens": 30_000}
    headers = {"traceparent": f"00-{trace_id}-{outside}-01"}
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{system.url}/v1/chat/completions"
        async with http.stream("POST", url, json={**body, "stream": True}, headers=headers) as answer:
            async for line in answer.aiter_lines():
                if '"content":"' in line:
                    break
            during = await system.read()
    assert during["tercet-frontend"]["tercet_frontend_streams"] == 1
    assert during["tercet-frontend"]["tercet_frontend_requests_running"] == 1
    aborts = before["tercet-core"].get("tercet_requests_ended_total/abort", 0) + 1
    await system.read_when("tercet-core", "tercet_requests_ended_total/abort", aborts)
    after = await system.settled()
    frontend, earlier = after["tercet-frontend"], before["tercet-frontend"]
    for name in ("tercet_frontend_aborts_total/client_closed", "tercet_frontend_requests_total/aborted"):
        assert frontend[name] == earlier.get(name, 0) + 1
    assert frontend.get("tercet_frontend_requests_total/error", 0) == earlier.get(
        "tercet_frontend_requests_total/error", 0
    )
    spans = await tree(system, trace_id, outside)
    ends = {span.name: span.attributes.get("tercet.end") for span in spans}
    assert (ends["tercet.choice"], ends["tercet.core.request"]) == ("abort", "abort")
    (root,) = [span for span in spans if span.name == "chat tiny"]
    assert root.attributes["error.type"] == "client_closed"


async def test_metrics_are_pushed_with_exemplars(system: System) -> None:
    trace_id = token_hex(16)
    await system.chat(f"00-{trace_id}-{token_hex(8)}-01", max_tokens=3)

    def arrived() -> bool:
        points = system.collector.points("gen_ai.server.time_to_first_token")
        return any(trace_id in point.exemplars for point in points)

    await asyncio.to_thread(system.collector.wait_for, arrived)
    for service in SERVICES:
        await asyncio.to_thread(
            system.collector.wait_for,
            lambda name=service: any(point.service == name for point in system.collector.all_points()),
        )
    (point,) = system.collector.points("gen_ai.server.time_to_first_token")
    assert point.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tercet",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
    }


async def test_every_service_says_that_it_is_ready(system: System) -> None:
    async with httpx.AsyncClient() as http:
        for port in system.ports.values():
            for path in ("/livez", "/readyz"):
                assert (await http.get(f"http://127.0.0.1:{port}{path}")).json() == {"status": "ok"}


def test_lines_of_the_log_are_json(system: System) -> None:  # the last one: it reads what all of them have left
    lines = [line for line in system.errors.read_text().splitlines(keepends=True) if "{" in line and line[-1] == "\n"]
    logged = [json.loads(line[line.index("{") :]) for line in lines]
    assert {entry["service"] for entry in logged} == set(SERVICES)
    assert all(entry["level"] in {"info", "warning"} for entry in logged), "nothing failed"
    assert not any(entry["logger"].startswith("opentelemetry") for entry in logged)
