"""The port and the collector of one process: what is served, what is delivered, and what disturbs nobody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any

import httpx
import pytest

from tercet_shared.config import CoreSettings, parse
from tercet_shared.errors import ConfigurationError
from tercet_shared.telemetry import endpoint
from tercet_shared.telemetry.collector import collector_named
from tercet_shared.telemetry.telemetry import Telemetry
from tests.fakes.otlp import TIMEOUT, Collector
from tests.fakes.ports import free_port

TRACEPARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


def settings(**changes: Any) -> CoreSettings:
    return parse(CoreSettings, []).model_copy(update=changes)


async def test_what_is_recorded_arrives(collector: Collector) -> None:
    telemetry = Telemetry("tercet-test", settings(otlp_endpoint=collector.endpoint), instance="one")
    async with telemetry:
        telemetry.meter.counter("tercet.count", "{thing}", "Things.").add(3)
        span = telemetry.tracing.enter("request", TRACEPARENT)
        assert span is not None
        span.set({"tercet.answer": 42})
        span.end()
    (received,) = await asyncio.to_thread(collector.wait_for, lambda: collector.trace("ab" * 16))
    assert (received.service, received.parent_id, received.attributes) == (
        "tercet-test",
        "cd" * 8,
        {"tercet.answer": 42},
    )
    assert collector.resources["tercet-test"]["service.instance.id"] == "one"
    (point,) = await asyncio.to_thread(collector.wait_for, lambda: collector.points("tercet.count"))
    assert (point.value, point.kind) == (3, "sum")


async def test_metrics_come_at_an_interval(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    telemetry = Telemetry("tercet-test", settings(otlp_endpoint=collector.endpoint))
    counter = telemetry.meter.counter("tercet.count", "{thing}", "Things.")
    async with telemetry:
        counter.add()
        await asyncio.to_thread(
            collector.wait_for, lambda: [p for p in collector.points("tercet.count") if p.value == 1]
        )
        counter.add()
        await asyncio.to_thread(
            collector.wait_for, lambda: [p for p in collector.points("tercet.count") if p.value == 2]
        )


async def test_a_collector_that_is_away_disturbs_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    caplog.set_level(logging.INFO, "tercet_shared")
    telemetry = Telemetry("tercet-test", settings(otlp_endpoint=f"127.0.0.1:{free_port()}"))
    telemetry.meter.counter("tercet.count", "{thing}", "Things.")
    async with telemetry:
        for _ in range(1_000):
            span = telemetry.tracing.enter("request", TRACEPARENT)
            assert span is not None
            span.end()
        async with asyncio.timeout(60):
            while len(warnings(caplog)) < 2:  # noqa: ASYNC110  # said on other threads
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # more deliveries fail, and say nothing
    assert sorted(text.split()[0] for text in warnings(caplog)) == ["metrics", "traces"]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What we say; that the library says nothing is for a process with our logging (test_system.py)."""
    ours = [record for record in caplog.records if record.name.startswith("tercet")]
    return [record.message for record in ours if record.levelno >= logging.WARNING]


async def test_a_collector_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(10 * TIMEOUT))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        telemetry = Telemetry("tercet-test", settings(otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}"))
        async with asyncio.timeout(TIMEOUT), telemetry:
            telemetry.meter.counter("tercet.count", "{thing}", "Things.")
            span = telemetry.tracing.enter("request", TRACEPARENT)
            assert span is not None
            span.end()


async def test_nothing_runs_unless_it_is_asked_for() -> None:
    telemetry = Telemetry("tercet-test", settings())
    async with telemetry:
        assert telemetry.port is None
        assert not telemetry.wanted
        assert telemetry.tracing.enter("request", TRACEPARENT) is None


@pytest.mark.parametrize(
    ("endpoint", "environ", "named"),
    [
        (None, {}, False),
        ("collector:4317", {}, True),
        ("https://collector:4317", {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, True),
        ("collector:4317", {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_where_a_collector_is_named(endpoint: str | None, environ: dict[str, str], named: bool) -> None:
    assert collector_named(endpoint, environ) is named


@pytest.mark.parametrize("endpoint", ["ftp://x:1", "http://", "http://x:port", "x:0"])
def test_an_address_that_is_none_stops_the_start(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="collector") as caught:
        Telemetry("tercet-test", settings(otlp_endpoint=endpoint))
    assert caught.value.param == "otlp_endpoint"


# ------------------------------------------------------------------------------------------------------- the port


async def test_the_port_answers_about_life_readiness_and_numbers() -> None:
    reason: list[str | None] = ["The model is being loaded."]
    telemetry = Telemetry("tercet-test", settings(metrics_port=0), ready=lambda: reason[0])
    telemetry.meter.counter("tercet.count", "{thing}", "Things.").add(2)
    async with telemetry, httpx.AsyncClient(base_url=f"http://127.0.0.1:{telemetry.port}") as http:
        assert (await http.get("/livez")).status_code == 200
        unready = await http.get("/readyz")
        assert (unready.status_code, unready.json()["reason"]) == (503, "The model is being loaded.")
        reason[0] = None
        assert (await http.get("/readyz")).json() == {"status": "ok"}
        metrics = await http.get("/metrics?x=y")
        assert "tercet_count_total 2.0" in metrics.text
        assert metrics.headers["content-type"].startswith("text/plain")
        assert (await http.head("/metrics")).text == ""
        assert (await http.get("/other")).status_code == 404
        assert (await http.post("/metrics")).status_code == 405


@pytest.mark.parametrize("said", [b"", b"\r\n\r\n", b"GET /livez", b"x" * 100_000, b"\x00\xff\r\n\r\n"])
async def test_garbage_and_those_who_leave_disturb_nobody(said: bytes) -> None:
    telemetry = Telemetry("tercet-test", settings(metrics_port=0))
    async with telemetry:
        assert telemetry.port is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", telemetry.port)
        writer.write(said)
        writer.write_eof()
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://127.0.0.1:{telemetry.port}/livez")).status_code == 200


async def test_leaving_does_not_wait_for_who_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_TIMEOUT_S", 10 * TIMEOUT)
    telemetry = Telemetry("tercet-test", settings(metrics_port=0))
    async with asyncio.timeout(TIMEOUT), telemetry:
        assert telemetry.port is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", telemetry.port)
        async with httpx.AsyncClient() as http:  # whoever came before it has been let in
            await http.get(f"http://127.0.0.1:{telemetry.port}/livez")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()


async def test_a_port_in_use_stops_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        telemetry = Telemetry("tercet-test", settings(metrics_port=taken.getsockname()[1]))
        with pytest.raises(ConfigurationError, match="in use") as caught:
            async with telemetry:
                pass
    assert caught.value.param == "metrics_port"
