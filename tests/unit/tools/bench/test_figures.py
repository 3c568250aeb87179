"""Figures, comparisons and what is said about them."""

from __future__ import annotations

import io
import json
import math
import xml.etree.ElementTree as ET
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest

from tercet_tools.bench.answers import Sample
from tercet_tools.bench.figures import Distribution, Figures, ratios
from tercet_tools.bench.http import HttpClient
from tercet_tools.bench.load import Load, Run
from tercet_tools.bench.plot import draw
from tercet_tools.bench.progress import Progress
from tercet_tools.bench.report import as_json, as_text, heading
from tercet_tools.bench.session import Measurement, Result
from tercet_tools.bench.settings import BenchSettings, Milliseconds
from tercet_tools.bench.target import Target


def sample(first: float = 0.1, gaps: tuple[float, ...] = (0.01, 0.03), tokens: int = 3, **more: Any) -> Sample:
    last = first + sum(gaps)
    fields: dict[str, Any] = {
        "start": 0.0, "first": first, "last": last, "total": last + 0.001, "gaps": list(gaps), "input_tokens": 10,
        "output_tokens": tokens, "counted": True, "cached_tokens": 4, "wanted": 3,
    }  # fmt: skip
    return Sample(**fields | more)


def run(*samples: Sample, elapsed: float = 2.0, cpu: float = 0.001, **more: Any) -> Run:
    return Run(list(samples), begun=len(samples), elapsed=elapsed, cpu=cpu, **more)


def test_a_distribution_is_in_milliseconds() -> None:
    values = [value / 1000 for value in range(101)]
    assert Distribution.of_seconds(values) == Distribution(*map(pytest.approx, (50, 50, 90, 99)))
    assert math.isnan(Distribution.of_seconds([]).p50)


def test_figures_over_rounds() -> None:
    figures = Figures.of([run(sample(), sample(first=0.3)), run(sample(), elapsed=1.0)], {})
    assert (figures.completed, figures.input_tokens, figures.output_tokens, figures.cached_tokens) == (3, 30, 9, 12)
    assert figures.seconds == 3.0
    assert (figures.requests_per_s, figures.output_tokens_per_s, figures.input_tokens_per_s) == (1.0, 3.0, 10.0)
    assert figures.latencies["ttft"].p50 == pytest.approx(100)
    assert figures.latencies["tpot"].mean == pytest.approx(20)
    assert figures.latencies["itl"].mean == pytest.approx(20)
    assert figures.latencies["e2e"].p50 == pytest.approx(141)
    assert figures.events_per_token == 1.0
    assert figures.client_cpu_us_per_token == pytest.approx(0.002 / 9 * 1e6)
    assert figures.warnings() == []


def test_goodput_counts_requests_within_all_limits() -> None:
    limits = {"ttft": Milliseconds(150), "tpot": Milliseconds(25)}
    slow_start, slow_tokens = sample(first=0.2), sample(gaps=(0.05, 0.05))
    figures = Figures.of([run(sample(), slow_start, slow_tokens)], limits)
    assert (figures.good, figures.good_per_s) == (1, 0.5)
    assert Figures.of([run(sample())], {"e2e": Milliseconds(140)}).good == 0
    assert Figures.of([run(sample())], {}).good_per_s is None


def test_what_a_reader_must_know_is_said() -> None:
    bad = run(
        sample(tokens=2), sample(counted=False), elapsed=1.0, cpu=0.95,
        failures=Counter({"HTTP 429": 2}), messages={"HTTP 429": "full"}, lateness=[0.5],
    )  # fmt: skip
    said = " ".join(Figures.of([bad], {}).warnings())
    for words in (
        "2 requests failed (HTTP 429): full",
        "95% of one processor",
        "500 ms",
        "1 answers had fewer",
        "usage",
    ):
        assert words in said


def test_ratios_are_medians_over_rounds() -> None:
    ours = [Figures.of([run(sample(first=first))], {}) for first in (0.1, 0.2, 9.0)]
    theirs = [Figures.of([run(sample(first=first))], {}) for first in (0.2, 0.4, 0.3)]
    found = ratios(ours, theirs)
    assert found["ttft_p50_ms"] == pytest.approx(0.5)
    assert found["requests_per_s"] == 1.0
    assert ratios(ours, []) == {}


def measurement(*servers: list[Run], flags: dict[str, Any] | None = None) -> Measurement:
    settings = BenchSettings(
        _cli_parse_args=False, url=[f"http://s{i}" for i in range(len(servers))], api_key=["secret"], **(flags or {})
    )
    targets = [Target(url=url, client=HttpClient(url), model="<m>", endpoint="completions") for url in settings.url]
    rated = Load(kind="request_rate", value=math.inf, requests=2, duration=None)
    clients = Load(kind="concurrency", value=4, requests=2, duration=None)
    more = Load(kind="concurrency", value=8, requests=2, duration=None)
    results = [Result(load, list(servers), settings.limits) for load in (clients, more, rated)]
    return Measurement(settings, 7, targets, results)


def test_one_server_is_a_table_of_its_own() -> None:
    found = measurement([run(sample(), sample())], flags={"goodput": ["ttft:200"]})
    text = heading(found) + as_text(found.results[0], found)
    assert "http://s0  <m>" in text
    assert "concurrency 4 · 2 requests" in text
    (row,) = (line for line in text.splitlines() if "TTFT" in line)
    assert row.split() == ["TTFT", "ms", "100", "100", "100", "100"]
    assert "goodput 1.00 requests/s (2 of 2 within the limits)" in text
    assert "8 prompt tokens cached" in text
    assert "µs of CPU per token" in text


def test_several_servers_stand_side_by_side_with_ratios() -> None:
    found = measurement([run(sample(first=0.1))], [run(sample(first=0.4))])
    lines = as_text(found.results[0], found).splitlines()
    assert lines[1].split() == ["A", "B", "A/B"]
    (row,) = (line for line in lines if "TTFT" in line)
    assert row.split() == ["TTFT", "ms", "mean", "100", "400", "0.25"]


def test_json_has_everything_but_the_keys() -> None:
    found = measurement([run(sample())], [run()])
    whole = as_json(found, interrupted=True, now=datetime(2030, 1, 2, tzinfo=UTC))
    text = json.dumps(whole, allow_nan=False)
    assert "secret" not in text
    assert whole["time"] == "2030-01-02T00:00:00+00:00"
    assert whole["settings"]["seed"] == 7
    assert whole["interrupted"] is True
    closed, _, rated = whole["loads"]
    assert (closed["concurrency"], rated["request_rate"]) == (4, "inf")
    assert closed["servers"][0]["ttft_p50_ms"] == 100
    assert closed["servers"][1]["ttft_p50_ms"] is None
    assert closed["ratios"] == [{}]


def test_unfinished_requests_are_said() -> None:
    interrupted = run(sample())
    interrupted.begun += 3
    found = measurement([interrupted])
    assert "3 requests to http://s0 were still running" in as_text(found.results[0], found)


@pytest.mark.parametrize("servers", [1, 2])
def test_the_picture_has_a_line_for_each_server_and_quantile(servers: int) -> None:
    found = measurement(*([run(sample(), sample(first=0.2))] for _ in range(servers)))
    root = ET.fromstring(draw(found))  # noqa: S314  # of our own making
    names = Counter(element.tag.partition("}")[2] for element in root.iter())
    assert names["polyline"] == servers * (4 * 2 + 2) * 2  # the closed loops are one line, the open one another
    assert names["circle"] == servers * (4 * 2 + 2) * 3
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "http://s0  <m>" in texts
    assert {"4 clients", "∞/s"} <= set(texts)


def test_a_picture_of_nothing_is_a_picture() -> None:
    ET.fromstring(draw(measurement([run()])))  # noqa: S314


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("out", [Terminal(), io.StringIO()])
def test_progress_is_shown_on_terminals_only(out: io.StringIO) -> None:
    progress = Progress(out)
    progress.begin(Load(kind="concurrency", value=4, requests=2, duration=None), 2)
    progress.watch("http://s0", run(sample(), failures=Counter({"timeout": 1})))
    progress.end()
    if out.isatty():
        assert "concurrency 4  run 1/2" in out.getvalue()
        assert "2/2" in out.getvalue()
        assert "1 failed" in out.getvalue()
        assert out.getvalue().endswith("\x1b[K")
    else:
        assert out.getvalue() == ""
