"""Quotas of this process: buckets, places, guesses, headers."""

from __future__ import annotations

from typing import Any

import pytest

from tercet_frontend.access import quotas as module
from tercet_frontend.access.quotas import Grant, LocalQuotas, guessed_tokens
from tercet_shared.errors import OverloadedError
from tests.unit.frontend.access.conftest import Clock, make_key


def _headers(grant: Grant) -> dict[str, str]:
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in grant.headers()}


async def _refused(quotas: LocalQuotas, key: Any, message: str) -> float:
    grant = Grant(key)
    with pytest.raises(OverloadedError, match=message) as caught:
        await quotas.enter(grant)
    quotas.leave(grant, 0)  # of a grant that was refused: nothing
    assert caught.value.retry_after is not None
    return caught.value.retry_after


async def test_requests_at_once(clock: Clock) -> None:
    quotas, key = LocalQuotas(clock=clock), make_key(max_concurrent=2)
    grants = [Grant(key), Grant(key)]
    for grant in grants:
        await quotas.enter(grant)
    assert await _refused(quotas, key, "'alice' is reached: 2 requests at once") == 1
    await quotas.enter(Grant(make_key("bob", max_concurrent=2)))  # another's
    quotas.leave(grants[0], 0)
    quotas.leave(grants[0], 0)  # counts once
    await quotas.enter(Grant(key))
    await _refused(quotas, key, "at once")
    assert grants[0].headers() == []


async def test_requests_per_minute(clock: Clock) -> None:
    quotas, key = LocalQuotas(clock=clock), make_key(requests_per_minute=3)
    for left in (2, 1, 0):
        grant = Grant(key)
        await quotas.enter(grant)
        assert _headers(grant)["remaining-requests"] == str(left)
        quotas.leave(grant, 0)
    assert _headers(grant) == {"limit-requests": "3", "remaining-requests": "0", "reset-requests": "1m0s"}
    assert await _refused(quotas, key, "3 requests per minute") == pytest.approx(20)
    clock.now += 5
    assert await _refused(quotas, key, "per minute") == pytest.approx(15)
    clock.now += 15
    await quotas.enter(Grant(key))
    await _refused(quotas, key, "per minute")
    clock.now += 1_000  # it never holds more than a minute's
    for _ in range(3):
        await quotas.enter(Grant(key))
    await _refused(quotas, key, "per minute")


async def test_tokens_per_minute(clock: Clock) -> None:
    quotas, key = LocalQuotas(clock=clock), make_key(tokens_per_minute=600)
    grant = Grant(key)
    await quotas.enter(grant)
    await quotas.reserve(grant, 400)
    assert _headers(grant) == {"limit-tokens": "600", "remaining-tokens": "200", "reset-tokens": "40s"}
    other = Grant(key)
    await quotas.enter(other)
    with pytest.raises(OverloadedError, match="600 tokens per minute") as caught:
        await quotas.reserve(other, 250)
    assert caught.value.retry_after == pytest.approx(5)
    assert _headers(other)["remaining-tokens"] == "200"
    quotas.leave(other, 0)
    quotas.leave(grant, 100)  # 300 less than was guessed
    third = Grant(key)
    await quotas.enter(third)
    await quotas.reserve(third, 500)
    quotas.leave(third, 1_100)  # 600 more: a debt
    assert await _refused(quotas, key, "tokens per minute") == pytest.approx(60.1)
    clock.now += 61
    await quotas.enter(Grant(key))


async def test_a_request_beyond_a_minutes_tokens_takes_them_all(clock: Clock) -> None:
    quotas, key = LocalQuotas(clock=clock), make_key(tokens_per_minute=600)
    grant = Grant(key)
    await quotas.enter(grant)
    await quotas.reserve(grant, 10**9)
    assert _headers(grant)["remaining-tokens"] == "0"
    quotas.leave(grant, 300)
    await quotas.enter(Grant(key))


async def test_limits_that_change(clock: Clock) -> None:
    quotas = LocalQuotas(clock=clock)
    for _ in range(2):
        await quotas.enter(Grant(make_key(requests_per_minute=2)))
    await _refused(quotas, make_key(requests_per_minute=2), "2 requests per minute")
    await quotas.enter(Grant(make_key()))  # none any more
    clock.now += 60
    await quotas.enter(Grant(make_key(requests_per_minute=1)))
    await _refused(quotas, make_key(requests_per_minute=1), "1 requests per minute")


async def test_keys_that_are_full_again_are_forgotten(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FORGET", 2)
    quotas = LocalQuotas(clock=clock)
    running = Grant(make_key("a", max_concurrent=1))
    await quotas.enter(running)
    spent = Grant(make_key("b", requests_per_minute=1))
    await quotas.enter(spent)
    quotas.leave(spent, 0)
    await quotas.enter(Grant(make_key("c", requests_per_minute=1)))
    await _refused(quotas, make_key("b", requests_per_minute=1), "per minute")
    await _refused(quotas, make_key("a", max_concurrent=1), "at once")
    clock.now += 61
    await quotas.enter(Grant(make_key("d", max_concurrent=1)))
    assert set(quotas._states) == {"a", "c", "d"}


@pytest.mark.parametrize(
    ("raw", "size", "tokens"),
    [
        ({}, 400, 100 + 256),
        ({"max_tokens": 50}, 400, 150),
        ({"max_completion_tokens": 60, "max_tokens": 50}, 0, 60),
        ({"max_output_tokens": 7}, 0, 7),
        ({"max_tokens": 50, "n": 3}, 40, 160),
        ({"max_tokens": True, "n": "3"}, 0, 256),
        ({"max_tokens": -1, "n": -1}, 0, 256),
        ({"max_tokens": 10**30}, 0, 256),
        ({"max_tokens": None, "n": None}, 0, 256),
    ],
)
def test_guesses(raw: dict[str, Any], size: int, tokens: int) -> None:
    assert guessed_tokens(raw, size) == tokens


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (-1, "0ms"), (0.0301, "31ms"), (1, "1s"), (7.5, "7.5s"), (59.999, "59.999s"), (360, "6m0s")],
)
def test_spans_of_time(seconds: float, text: str) -> None:
    assert module._duration(seconds) == text
