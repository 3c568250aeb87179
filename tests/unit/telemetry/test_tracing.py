"""Who is traced, and what goes along with a request that is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tercet_shared.telemetry.tracing import PACKED_BYTES, Tracing, packed, parse, unpacked, written

SAMPLED = f"00-{'ab' * 16}-{'cd' * 8}-01"
UNSAMPLED = f"00-{'ab' * 16}-{'cd' * 8}-00"


def tracing(ratio: float) -> tuple[Tracing, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return Tracing(SimpleSpanProcessor(exporter).on_end, ratio=ratio), exporter


@pytest.mark.parametrize(
    ("ratio", "traceparent", "traced"),
    [(0, "", False), (1, "", True), (0, SAMPLED, True), (1, UNSAMPLED, False), (1, "nonsense", True)],
)
def test_the_parent_decides_and_without_one_the_ratio(ratio: float, traceparent: str, traced: bool) -> None:
    made, exporter = tracing(ratio)
    span = made.enter("request", traceparent)
    assert (span is not None) is traced
    if span is not None:
        span.end()
        (finished,) = exporter.get_finished_spans()
        assert (finished.parent is not None) is (traceparent == SAMPLED)
        if traceparent == SAMPLED:
            assert finished.context.trace_id == int("ab" * 16, 16)


def test_a_service_behind_follows_and_decides_nothing() -> None:
    made, _ = tracing(1)
    assert made.follow("core", "") is None
    assert made.follow("core", UNSAMPLED) is None
    assert made.follow("core", "nonsense") is None
    span = made.follow("core", SAMPLED)
    assert span is not None
    assert span.context.trace_id == int("ab" * 16, 16)


def test_without_a_collector_nothing_is_traced() -> None:
    assert Tracing().enter("request", SAMPLED) is None
    assert Tracing().follow("request", SAMPLED) is None


def test_about_as_many_as_the_ratio_says() -> None:
    made, _ = tracing(0.25)
    traced = sum(made.enter("request", "") is not None for _ in range(4_000))
    assert 800 < traced < 1_200  # five standard deviations and more


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1))
def test_contexts_survive_both_ways_of_writing(trace_id: int, span_id: int) -> None:
    text = f"00-{trace_id:032x}-{span_id:016x}-01"
    context = parse(text)
    assert context is not None
    assert written(context) == text
    raw = packed(text)
    assert len(raw) == PACKED_BYTES
    assert written(unpacked(raw)) == text


@pytest.mark.parametrize(
    "text", ["", "00", f"00-{'0' * 32}-{'cd' * 8}-01", f"00-{'ab' * 16}-{'0' * 16}-01", f"ff-{'ab' * 16}-{'cd' * 8}-01"]
)
def test_what_is_no_context(text: str) -> None:
    assert parse(text) is None
