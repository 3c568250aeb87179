"""Keys and quotas in a real Redis, and without one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tercet_frontend.access import redis_keys
from tercet_frontend.access.quotas import Grant
from tercet_frontend.access.redis_keys import RedisKeys, redis_key
from tercet_frontend.access.redis_link import RedisLink
from tercet_frontend.access.redis_quotas import RedisQuotas
from tercet_shared.errors import ConfigurationError, OverloadedError, UnavailableError
from tests.fakes.deaf import Deaf
from tests.fakes.redis_server import RedisServer
from tests.unit.frontend.access.conftest import Clock, make_key

TIMEOUT = 60.0


@asynccontextmanager
async def linked(redis: RedisServer, **options: Any) -> AsyncIterator[RedisLink]:
    link = RedisLink(redis.url, timeout=5.0, **options)
    try:
        yield link
    finally:
        await link.close()


def test_addresses_that_are_none() -> None:
    with pytest.raises(ConfigurationError) as caught:
        RedisLink("http://user:secret@host")
    assert "secret" not in str(caught.value)


async def test_keys(redis: RedisServer, clock: Clock) -> None:
    digest = make_key().digest
    async with linked(redis) as link:
        keys = RedisKeys(link, clock=clock)
        assert await keys.find(digest) is None
        fields = {"name": "alice", "models": "a, b-*", "max_concurrent": "3", "disabled": "false"}
        await link.client.hset(redis_key(digest), mapping={**fields, "expires": "2030-01-01T00:00:00Z"})
        assert await keys.find(digest) is None  # what was said counts for a while
        clock.now += 5.1
        key = await keys.find(digest)
        assert key is not None
        assert (key.name, key.models, key.max_concurrent, key.digest) == ("alice", ("a", "b-*"), 3, digest)
        await link.client.hset(redis_key(digest), "disabled", "true")
        assert (await keys.find(digest)) is key
        keys.forget()
        changed = await keys.find(digest)
        assert changed is not None
        assert changed.disabled
        await link.client.delete(redis_key(digest))
        clock.now += 5.1
        assert await keys.find(digest) is None


@pytest.mark.parametrize(
    "fields", [{"name": "a", "max_concurrent": "many"}, {"name": "a", "limit": "5"}, {"models": "a"}, {"name": b"\xff"}]
)
async def test_an_entry_with_a_mistake_is_refused(
    redis: RedisServer, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    digest = make_key().digest
    async with linked(redis) as link:
        await link.client.hset(redis_key(digest), mapping=fields)
        with caplog.at_level(logging.WARNING):
            assert await RedisKeys(link).find(digest) is None
    assert "is refused" in caplog.text


async def test_keys_while_redis_is_away(redis: RedisServer, clock: Clock) -> None:
    known, unknown = make_key("alice").digest, make_key("bob").digest
    async with linked(redis, clock=clock) as link:
        await link.client.hset(redis_key(known), "name", "alice")
        keys = RedisKeys(link, clock=clock)
        assert await keys.find(known) is not None
        assert await keys.find(unknown) is None
        await redis.stop()
        clock.now += 60
        keys.forget()
        assert await keys.find(known) is not None
        assert await keys.find(unknown) is None
        with pytest.raises(UnavailableError, match="cannot be looked up"):
            await keys.find(make_key("carol").digest)
        assert link.failures == 3
        await redis.start()
        clock.now += 1.1
        assert await keys.find(known) is None  # it came back empty


async def test_a_flood_of_made_up_keys_drives_no_real_one_out(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_keys, "MAX_CACHED", 3)
    digest = make_key().digest
    async with linked(redis) as link:
        await link.client.hset(redis_key(digest), "name", "alice")
        keys = RedisKeys(link)
        await keys.find(digest)
        for number in range(10):
            await keys.find(make_key(f"x{number}").digest)
        await redis.stop()
        keys.forget()
        assert await keys.find(digest) is not None
        assert len(keys._unknown) == 3


@asynccontextmanager
async def two_front_ends(redis: RedisServer, **options: Any) -> AsyncIterator[tuple[RedisQuotas, RedisQuotas]]:
    both = [RedisQuotas(RedisLink(redis.url, timeout=5.0), **options) for _ in range(2)]
    try:
        yield both[0], both[1]
    finally:
        for quotas in both:
            await quotas.close()


async def test_requests_at_once_over_two_front_ends(redis: RedisServer) -> None:
    key = make_key(max_concurrent=2)
    async with two_front_ends(redis) as (one, two):
        grants = [Grant(key), Grant(key)]
        await one.enter(grants[0])
        await two.enter(grants[1])
        for quotas in (one, two):
            with pytest.raises(OverloadedError, match="2 requests at once"):
                await quotas.enter(Grant(key))
        one.leave(grants[0], 0)
        await one._settle()
        await two.enter(Grant(key))


async def test_requests_per_minute_over_two_front_ends(redis: RedisServer) -> None:
    key = make_key(requests_per_minute=4)
    async with two_front_ends(redis) as (one, two):
        grants = [Grant(key) for _ in range(6)]
        outcomes = await asyncio.gather(
            *((one, two)[number % 2].enter(grant) for number, grant in enumerate(grants)), return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if outcome is not None]
        assert [type(outcome) for outcome in refused] == [OverloadedError] * 2
        assert all(isinstance(outcome, OverloadedError) and 0 < (outcome.retry_after or 0) <= 15 for outcome in refused)
        left = sorted(dict(grant.headers())[b"x-ratelimit-remaining-requests"] for grant in grants)
        assert left == [b"0", b"0", b"0", b"1", b"2", b"3"]
    async with linked(redis) as link:
        seconds = await link.client.ttl("tercet:1:quota:{alice}:requests")
        assert 55 < seconds <= 61  # nothing stays for ever


async def test_tokens_per_minute_over_two_front_ends(redis: RedisServer) -> None:
    key = make_key(tokens_per_minute=6_000)
    async with two_front_ends(redis) as (one, two):
        grant, other = Grant(key), Grant(key)
        await one.enter(grant)
        await one.reserve(grant, 5_000)
        await two.enter(other)
        with pytest.raises(OverloadedError, match="tokens per minute") as caught:
            await two.reserve(other, 2_000)
        assert 0 < (caught.value.retry_after or 0) <= 10
        one.leave(grant, 1_000)
        await one._settle()
        await two.reserve(other, 4_500)
        two.leave(other, 12_000)
        await two._settle()
        with pytest.raises(OverloadedError, match="tokens per minute") as caught:
            await one.enter(Grant(key))
        assert 10 < (caught.value.retry_after or 0) < 80


RUNNING = "tercet:1:quota:{alice}:running"


async def test_the_requests_of_a_front_end_that_died_lapse(redis: RedisServer) -> None:
    key = make_key(max_concurrent=1)
    async with two_front_ends(redis) as (one, two), linked(redis) as link:
        grant = Grant(key)
        await one.enter(grant)
        assert grant.lease is not None
        seconds, micros = await link.client.time()
        now = seconds + micros / 1e6
        assert 55 < await link.client.zscore(RUNNING, grant.lease) - now <= 60
        assert 55 < await link.client.ttl(RUNNING) <= 60
        await link.client.zadd(RUNNING, {grant.lease: now})  # as if a minute had passed
        await two.enter(Grant(key))
        await one._renew_all()  # one that has lapsed does not come back
        assert await link.client.zscore(RUNNING, grant.lease) is None


async def test_leases_are_renewed_and_ends_are_told(redis: RedisServer, clock: Clock) -> None:
    key = make_key(max_concurrent=1, tokens_per_minute=1_000)
    async with two_front_ends(redis, lease=60.0, clock=clock) as (one, two), linked(redis) as link:
        grant = Grant(key)
        await one.enter(grant)
        assert grant.lease is not None
        first = await link.client.zscore(RUNNING, grant.lease)
        one._lease = 90.0
        await one._renew_all()
        second = await link.client.zscore(RUNNING, grant.lease)
        assert second > first + 29
        one._lease = 180.0
        background = asyncio.create_task(one.run())
        async with asyncio.timeout(TIMEOUT):
            while await link.client.zscore(RUNNING, grant.lease) < second + 89:
                clock.now += 61.0  # more than a third of the lease: the next renewal is due
                one._wake.set()
        one.leave(grant, 500)
        async with asyncio.timeout(TIMEOUT):
            while await link.client.zcard(RUNNING):
                pass
        background.cancel()
        await asyncio.wait([background])
        other = Grant(key)
        await two.enter(other)
        level = int(dict(other.headers())[b"x-ratelimit-remaining-tokens"])
        assert 500 <= level < 1_000


async def test_while_redis_is_away_each_counts_for_itself(redis: RedisServer) -> None:
    key = make_key(max_concurrent=1, tokens_per_minute=600)
    async with two_front_ends(redis) as (one, two):
        early = Grant(key)
        await one.enter(early)
        await one.reserve(early, 100)
        await redis.stop()
        grants = [Grant(key), Grant(key)]
        for quotas, grant in zip((one, two), grants, strict=True):
            await quotas.enter(grant)
            await quotas.reserve(grant, 500)
            with pytest.raises(OverloadedError, match="at once"):
                await quotas.enter(Grant(key))
            with pytest.raises(OverloadedError, match="tokens per minute"):
                await quotas.reserve(Grant(key), 500)
            quotas.leave(grant, 500)
            await quotas.enter(Grant(key))
        assert one.alone == two.alone == 3
        one.leave(early, 100)
        await one._settle()
        assert one.dropped == 1
        assert not one._leases


async def test_keys_without_limits_never_ask_redis() -> None:
    quotas = RedisQuotas(RedisLink("unix:///nowhere/redis.sock"))
    grant = Grant(make_key())
    await quotas.enter(grant)
    await quotas.reserve(grant, 5)
    quotas.leave(grant, 5)
    assert quotas._link.failures == 0
    await quotas.close()


async def test_cancelled_after_redis_has_counted(redis: RedisServer) -> None:
    key = make_key(max_concurrent=1)
    async with two_front_ends(redis) as (one, two):
        counted, enter = asyncio.Event(), one._enter

        async def answers_late(*arguments: Any) -> Any:
            await enter(*arguments)
            counted.set()
            await asyncio.Event().wait()

        one._enter = answers_late  # type: ignore[assignment]
        call = asyncio.create_task(one.enter(Grant(key)))
        await counted.wait()
        with pytest.raises(OverloadedError):
            await two.enter(Grant(key))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await one._settle()
        await two.enter(Grant(key))


@pytest.mark.parametrize("answer", [b"1", OSError("gone")], ids=["answers", "fails"])
async def test_who_gives_up_is_not_answered(redis: RedisServer, answer: Any) -> None:
    async with linked(redis) as link:
        command = Deaf(answer)
        call = asyncio.create_task(link.reached(command))
        await command.called.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
