"""Counters, histograms and observed numbers, and what Prometheus and OTLP make of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common._internal.metrics_encoder import encode_metrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import SpanContext
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from tercet_shared.telemetry.exposition import PrometheusText
from tercet_shared.telemetry.instruments import MAX_SERIES, OTHER, Kind, Meter
from tercet_shared.telemetry.points import metrics_data

BOUNDS = (0.1, 1.0, 10.0)
SPAN = SpanContext(0xABC, 0xDEF, is_remote=False)


def samples(meter: Meter, accept: str = "") -> dict[tuple[str, tuple[str, ...]], float]:
    text, _ = PrometheusText(meter, {"service.name": "test"}).text(accept)
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in prometheus(text.decode())
        for sample in family.samples
    }


def test_a_counter_adds_up_by_labels() -> None:
    meter = Meter()
    plain = meter.counter("tercet.plain", "{thing}", "Things.")
    labelled = meter.counter("tercet.labelled", "{thing}", "Things.", ("tercet.kind",))
    plain.add()
    plain.add(2)
    labelled.add(5, ("a",))
    labelled.add(1, ("b",))
    found = samples(meter)
    assert found["tercet_plain_total", ()] == 3
    assert found["tercet_labelled_total", ("a",)] == 5
    assert found["tercet_labelled_total", ("b",)] == 1


def test_labels_are_bounded() -> None:
    counter = Meter().counter("c", "", "Counts.", ("who",))
    for i in range(MAX_SERIES + 50):
        counter.add(1, (str(i),))
    numbers = dict(counter.read().numbers)
    assert len(numbers) == MAX_SERIES + 1
    assert numbers[OTHER,] == 50
    histogram = Meter().histogram("h", "s", "Times.", BOUNDS, ("who",))
    for i in range(MAX_SERIES + 50):
        histogram.record(1.0, (str(i),))
    assert dict(histogram.read().distributions)[OTHER,].count == 50


@given(st.lists(st.floats(0, 100), max_size=50))
def test_a_histogram_has_every_value_in_one_bucket(values: list[float]) -> None:
    histogram = Meter().histogram("h", "s", "Times.", BOUNDS)
    for value in values:
        histogram.record(value)
    distributions = dict(histogram.read().distributions)
    if not values:
        assert not distributions
        return
    one = distributions[()]
    edges = [-1.0, *BOUNDS, float("inf")]
    assert one.counts == [sum(low < v <= high for v in values) for low, high in pairwise(edges)]
    assert one.sum == pytest.approx(sum(values))
    assert (one.least, one.most) == (min(values), max(values))


def test_a_reading_does_not_change_afterwards() -> None:
    histogram = Meter().histogram("h", "s", "Times.", BOUNDS)
    histogram.record(0.5)
    reading = histogram.read()
    histogram.record(0.5)
    assert dict(reading.distributions)[()].count == 1


def test_prometheus_sees_names_units_and_buckets() -> None:
    meter = Meter()
    meter.histogram("gen_ai.server.request.duration", "s", "Times.", BOUNDS, ("error.type",)).record(0.5, ("",))
    meter.observe(Kind.GAUGE, "tercet.worker.memory", "By", "Memory.", lambda: [(("kv",), 5)], ("use",))
    found = samples(meter)
    assert found["gen_ai_server_request_duration_seconds_bucket", ("", "0.1")] == 0
    assert found["gen_ai_server_request_duration_seconds_bucket", ("", "1.0")] == 1
    assert found["gen_ai_server_request_duration_seconds_bucket", ("", "+Inf")] == 1
    assert found["tercet_worker_memory_bytes", ("kv",)] == 5
    assert found["target_info", ("test",)] == 1


def test_openmetrics_has_the_trace_of_the_latest_in_each_bucket() -> None:
    meter = Meter()
    histogram = meter.histogram("tercet.wait", "s", "Times.", BOUNDS)
    histogram.record(0.5)
    histogram.record(0.7, trace=SPAN)
    text, media_type = PrometheusText(meter, {}).text("application/openmetrics-text; version=1.0.0")
    assert media_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in openmetrics(text.decode())}
    exemplars = {
        sample.labels["le"]: sample.exemplar
        for sample in families["tercet_wait_seconds"].samples
        if sample.name.endswith("_bucket")
    }
    assert exemplars["0.1"] is None
    found = exemplars["1.0"]
    assert found is not None
    assert (found.labels["trace_id"], found.value) == (f"{0xABC:032x}", 0.7)


def test_otlp_has_the_same_and_leaves_out_what_is_empty() -> None:
    meter = Meter()
    meter.counter("tercet.count", "{thing}", "Things.", ("a", "b")).add(np.int64(3), ("x", ""))
    meter.histogram("tercet.wait", "s", "Times.", BOUNDS).record(0.7, trace=SPAN)
    meter.histogram("tercet.never", "s", "Times.", BOUNDS)
    message = encode_metrics(metrics_data(meter.collect(), Resource({}), start_ns=7))
    count, wait = message.resource_metrics[0].scope_metrics[0].metrics
    (point,) = count.sum.data_points
    assert count.sum.is_monotonic
    assert (point.as_int, point.start_time_unix_nano) == (3, 7)
    assert [(pair.key, pair.value.string_value) for pair in point.attributes] == [("a", "x")]
    (distribution,) = wait.histogram.data_points
    assert list(distribution.bucket_counts) == [0, 1, 0, 0]
    assert int.from_bytes(distribution.exemplars[0].trace_id) == 0xABC


def test_a_name_is_given_once() -> None:
    meter = Meter()
    meter.counter("tercet.count", "", "Things.")
    with pytest.raises(ValueError, match=r"tercet\.count"):
        meter.counter("tercet.count", "", "Things.")
