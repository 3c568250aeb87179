"""How a plan says what of it is traced, and what the worker makes of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgpack
import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tercet_shared.errors import ProtocolError
from tercet_shared.telemetry.tracing import PACKED_BYTES, Tracing, packed
from tercet_shared.wire.frames import decode_from_core, decode_plan, encode_plan
from tercet_shared.wire.step import NewSlots, PlanTrace, StepPlan, StepResult, empty_i32
from tercet_worker.telemetry.traces import SlotTraces

FIRST, SECOND, STEP = (packed(f"00-{'ab' * 16}-{number:016x}-01") for number in (1, 2, 3))


def plan(step: int, slots: list[int], trace: PlanTrace | None = None, freed: list[int] | None = None) -> StepPlan:
    rows = len(slots)
    return StepPlan(
        step, np.array(freed or [], np.int32), NewSlots.empty(), np.array(slots, np.int32), np.full(rows, 2, np.int32),
        np.zeros(rows, np.int32), np.ones(rows, np.bool_), np.zeros(rows + 1, np.int32), empty_i32(), trace=trace,
    )  # fmt: skip


def begins(slots: list[int], spans: bytes, step: bytes = b"") -> PlanTrace:
    return PlanTrace(np.array(slots, np.int32), spans, step)


def test_a_trace_survives_its_frame_and_costs_nothing_where_there_is_none() -> None:
    sent = plan(1, [4, 7], begins([4, 7], FIRST + SECOND, STEP))
    received = decode_plan(encode_plan(sent)).trace
    assert received is not None
    assert (received.slots.tolist(), received.spans, received.step) == ([4, 7], FIRST + SECOND, STEP)
    assert decode_plan(encode_plan(plan(1, [4, 7]))).trace is None
    assert len(msgpack.unpackb(encode_plan(plan(1, [4, 7])))) == 5
    nothing = decode_from_core(encode_plan(plan(1, [4], begins([], b"", STEP))))
    assert isinstance(nothing, StepPlan)
    assert nothing.trace is not None


@pytest.mark.parametrize(
    "trace",
    [
        [],
        ["x", b"", b""],
        [b"\0" * 4, b"", b""],
        [b"\0" * 4, FIRST + b"x", b""],
        [b"\0" * 3, b"", b""],
        [b"", b"", b"short"],
        "text",
        None,
    ],
)
def test_a_malformed_trace_is_refused(trace: Any) -> None:
    frame = msgpack.unpackb(encode_plan(plan(1, [4])))
    with pytest.raises(ProtocolError):
        decode_plan(msgpack.packb([*frame, trace]))


class Worker:
    def __init__(self, quiet_s: float = 60.0) -> None:
        self.exporter = InMemorySpanExporter()
        self.traces = SlotTraces(Tracing(SimpleSpanProcessor(self.exporter).on_end), quiet_s=quiet_s)

    def step(self, made: StepPlan, **result: Any) -> None:
        none = np.zeros(len(made.slots) + 1, np.int32)
        self.traces.answered(
            made, StepResult(made.step_id, none, empty_i32(), wait_us=10, run_us=1_000, **result), time.time_ns()
        )

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


async def test_a_span_lasts_from_the_plan_to_the_last_step_before_its_slot_is_freed() -> None:
    worker = Worker()
    worker.step(plan(1, [4, 5], begins([4], FIRST)))
    worker.step(plan(2, [4, 5]))
    worker.step(plan(3, [5]))
    assert worker.spans("tercet.worker.request") == []
    worker.step(plan(4, [5], freed=[4]))
    (span,) = worker.spans("tercet.worker.request")
    assert span.parent is not None
    assert span.parent.span_id == 1
    attributes = dict(span.attributes or {})
    assert (attributes["tercet.steps"], attributes["tercet.computed_tokens"]) == (2, 4)
    assert attributes["tercet.worker.run_ms"] == 2.0
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time >= 1_010_000
    assert len(worker.traces) == 0


async def test_a_slot_that_begins_again_has_another_span() -> None:
    worker = Worker()
    worker.step(plan(1, [4], begins([4], FIRST)))
    worker.step(plan(2, [4], begins([4], FIRST)))  # it was preempted
    assert len(worker.spans("tercet.worker.request")) == 1
    worker.step(plan(3, [4], begins([4], SECOND), freed=[4]))
    found = [span.parent.span_id for span in worker.spans("tercet.worker.request") if span.parent is not None]
    assert found == [1, 1]
    worker.traces.close()
    assert len(worker.spans("tercet.worker.request")) == 3


async def test_a_quiet_slot_ends_with_its_last_step() -> None:
    worker = Worker(quiet_s=0.05)
    worker.step(plan(1, [4], begins([4], FIRST)))
    async with asyncio.timeout(60):
        while not (found := worker.spans("tercet.worker.request")):  # noqa: ASYNC110  # ends by a timer
            await asyncio.sleep(0.01)
    assert found[0].end_time is not None
    assert found[0].start_time is not None
    assert found[0].end_time - found[0].start_time < 50_000_000, "the wait is no part of it"
    worker.step(plan(2, [4]))
    assert len(worker.traces) == 0, "what is over does not come back by itself"


async def test_a_step_that_the_core_traces_has_a_span_with_its_requests() -> None:
    worker = Worker()
    worker.step(plan(1, [4, 5, 6], begins([4, 5], FIRST + SECOND, STEP)))
    worker.step(plan(2, [5, 6], begins([], b"", STEP)), error="no such luck")
    worker.step(plan(3, [4]))
    first, second = worker.spans("tercet.worker.step")
    assert first.parent is not None
    assert first.parent.span_id == 3
    assert (len(first.links), len(second.links)) == (2, 1)
    assert dict(first.attributes or {})["tercet.step.requests"] == 3
    assert dict(second.attributes or {})["error.type"] == "step_failed"


async def test_a_worker_without_a_collector_keeps_nothing() -> None:
    traces = SlotTraces(Tracing())
    made = plan(1, [4], begins([4], FIRST, STEP))
    traces.answered(made, StepResult(1, np.zeros(2, np.int32), empty_i32()), time.time_ns())
    assert len(traces) == 0
    assert len(FIRST) == PACKED_BYTES
