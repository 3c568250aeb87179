"""Flags of `tercet bench serve`: several values, ranges, limits; what is wrong is named."""

from __future__ import annotations

import pytest

from tercet_shared.config import parse
from tercet_shared.errors import ConfigurationError
from tercet_tools.bench.session import loads
from tercet_tools.bench.settings import BenchSettings, Span

URL = ["--url", "http://a"]


def settings(*flags: str) -> BenchSettings:
    found = parse(BenchSettings, [*URL, *flags])
    found.check()
    return found


def test_several_values_are_separated_by_commas_or_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings("--concurrency", "1,4,16").concurrency == [1, 4, 16]
    assert settings("--concurrency", "1", "--concurrency", "4").concurrency == [1, 4]
    assert settings("--request-rate", "0.5,inf").request_rate == [0.5, float("inf")]
    assert settings("--url", "http://b").url == ["http://a", "http://b"]
    monkeypatch.setenv("TERCET_API_KEY", '["one"]')
    assert settings().api_key == ["one"]


def test_loads_are_the_closed_loops_and_then_the_open_ones() -> None:
    asked = [
        (load.kind, load.value, load.requests) for load in loads(settings("--concurrency", "2", "--request-rate", "3"))
    ]
    assert asked == [("concurrency", 2, 12), ("request_rate", 3, 90)]
    assert [load.value for load in loads(settings())] == [1, 16]
    assert [load.kind for load in loads(settings("--request-rate", "inf"))] == ["request_rate"]
    assert {load.requests for load in loads(settings("--requests", "7", "--request-rate", "1,inf"))} == {7}
    (timed,) = loads(settings("--duration", "5", "--concurrency", "3"))
    assert (timed.requests, timed.duration) == (None, 5)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "some"], "--concurrency"),
        (["--request-rate", "0"], "--request-rate"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--input-tokens", "8-4"], "--input-tokens"),
        (["--input-tokens", "few"], "--input-tokens"),
        (["--output-tokens", "0"], "--output-tokens"),
        (["--vocabulary", "1:2"], "--vocabulary"),
        (["--shared-prefix", "128"], "--shared-prefix"),
        (["--goodput", "ttft"], "--goodput"),
        (["--goodput", "itl:3"], "--goodput"),
        (["--goodput", "ttft:-1"], "--goodput"),
        (["--extra-body", "[]"], "--extra-body"),
        (["--extra-body", "{"], "--extra-body"),
        (["--requests", "3", "--duration", "3"], "--duration"),
        (["--request-rate", "inf", "--duration", "3"], "--duration"),
        (["--model", "a,b"], "--model"),
    ],
)
def test_what_is_wrong_is_named(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings(*flags)
    assert caught.value.message.startswith(f"{named} (TERCET_{named[2:].replace('-', '_').upper()}): ")


def test_a_url_is_needed() -> None:
    with pytest.raises(ConfigurationError, match="--url"):
        parse(BenchSettings, []).check()


def test_spans_and_limits() -> None:
    assert Span.parse("64-256", name="x") == Span(64, 256)
    assert Span.parse("64", name="x") == Span(64, 64)
    assert settings("--goodput", "ttft:200,tpot:50", "--goodput", "e2e:1").limits == {"ttft": 200, "tpot": 50, "e2e": 1}
