"""How many tokens of a stream travel together."""

from __future__ import annotations

from tercet_frontend.cores.pace import Pace


def feed(pace: Pace, rate: int, seconds: float, begin: float = 0.0) -> float:
    """Counts ``rate`` tokens per second, ten milliseconds' worth at a time; returns when it ended."""
    steps = round(seconds * 100)
    for step in range(steps):
        pace.count(rate // 100, begin + step / 100)
    return begin + steps / 100


def test_each_token_by_itself_where_there_are_few() -> None:
    pace = Pace(8_000)
    feed(pace, 8_000, 2.0)
    assert pace.steps == 1


def test_the_more_tokens_the_more_go_together() -> None:
    pace = Pace(8_000)
    end = feed(pace, 16_000, 1.0)
    assert pace.steps == 2
    end = feed(pace, 40_000, 1.0, end)
    assert pace.steps == 5
    feed(pace, 1_000, 1.0, end)
    assert pace.steps == 1


def test_a_pause_says_nothing_about_what_comes() -> None:
    pace = Pace(1_000)
    end = feed(pace, 5_000, 1.0)
    assert pace.steps == 5
    pace.count(1, end + 10.0)
    assert pace.steps == 1


def test_zero_never_lets_them() -> None:
    pace = Pace(0)
    feed(pace, 1_000_000, 1.0)
    assert pace.steps == 1
