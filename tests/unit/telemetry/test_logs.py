"""Lines of JSON, and the trace that they belong to."""

from __future__ import annotations

import asyncio
import json
import logging

from tercet_shared.telemetry.logs import JsonLines
from tercet_shared.telemetry.tracing import log_under

FIRST, SECOND = f"00-{'ab' * 16}-{'cd' * 8}-00", f"00-{'12' * 16}-{'34' * 8}-01"


def line(**extra: object) -> dict[str, str]:
    record = logging.LogRecord("tercet.test", logging.WARNING, "file.py", 1, "%s of\n%d", ("one", 2), None)
    record.__dict__.update(extra)
    text = JsonLines("tercet-core").format(record)
    assert "\n" not in text
    found: dict[str, str] = json.loads(text)
    return found


def test_a_record_is_one_object() -> None:
    found = line()
    assert found.pop("time").endswith("Z")
    assert found == {"level": "warning", "service": "tercet-core", "logger": "tercet.test", "message": "one of\n2"}


async def test_records_carry_the_trace_of_their_own_task() -> None:
    ready = asyncio.Event()

    async def request(traceparent: str) -> dict[str, str]:
        log_under(traceparent)
        await ready.wait()
        return line()

    tasks = [asyncio.create_task(request(text)) for text in (FIRST, SECOND, "")]
    await asyncio.sleep(0)
    ready.set()
    first, second, none = await asyncio.gather(*tasks)
    assert (first["trace_id"], first["span_id"]) == ("ab" * 16, "cd" * 8)
    assert second["trace_id"] == "12" * 16
    assert "trace_id" not in none
    assert "trace_id" not in line()


def test_a_record_may_name_its_trace() -> None:
    assert line(traceparent=FIRST)["trace_id"] == "ab" * 16
    assert "trace_id" not in line(traceparent="")


def test_a_traceback_is_part_of_the_object() -> None:
    error = ValueError("no such luck")
    found = line(exc_info=(type(error), error, None))
    assert "no such luck" in found["error"]
