"""Quotas that all front ends count together, in Redis; while it is away, each counts for itself.

A key's requests that run are a sorted set of leases by the time when they lapse: front ends renew theirs, and those of
one that died are gone within a minute. Buckets are hashes that lapse when they would be full. Every step is one script,
so that it is atomic, and its clock is that of Redis.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

from tercet_frontend.access.quotas import Decision, LocalQuotas
from tercet_shared.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_frontend.access.keys import ApiKey
    from tercet_frontend.access.quotas import Grant
    from tercet_frontend.access.redis_link import RedisLink

logger = logging.getLogger(__name__)

LEASE = 60.0
"""Seconds after which a running request that nobody renews does not count any more."""

MAX_UNSETTLED = 100_000
"""Ends that wait to be told to Redis; the oldest beyond are dropped, and their leases lapse."""

_BATCH = 256
_PREFIX = "tercet:1:quota"

_COMMON = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local function level(key, capacity)
  if capacity <= 0 then return 0 end
  local state = redis.call('HMGET', key, 'level', 'at')
  if not state[1] then return capacity end
  return math.min(capacity, tonumber(state[1]) + (now - tonumber(state[2])) * capacity / 60)
end
local function keep(key, value, capacity)
  if capacity <= 0 then return end
  redis.call('HSET', key, 'level', string.format('%.6f', value), 'at', string.format('%.6f', now))
  redis.call('PEXPIRE', key, math.ceil((capacity - value) * 60000 / capacity) + 1000)
end
local function answer(outcome, wait, requests, tokens)
  return {outcome, string.format('%.6f', wait), string.format('%.6f', requests), string.format('%.6f', tokens)}
end
"""

_ENTER = (
    _COMMON
    + """
local at_once, per_minute, token_rate = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local requests, tokens = level(KEYS[2], per_minute), level(KEYS[3], token_rate)
if at_once > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
  if redis.call('ZCARD', KEYS[1]) >= at_once then return answer(1, 0, requests, tokens) end
end
if per_minute > 0 and requests < 1 then return answer(2, (1 - requests) * 60 / per_minute, requests, tokens) end
if token_rate > 0 and tokens < 1 then return answer(3, (1 - tokens) * 60 / token_rate, requests, tokens) end
if at_once > 0 then
  redis.call('ZADD', KEYS[1], now + tonumber(ARGV[5]), ARGV[4])
  redis.call('PEXPIRE', KEYS[1], math.ceil(tonumber(ARGV[5]) * 1000))
end
keep(KEYS[2], requests - 1, per_minute)
return answer(0, 0, requests - 1, tokens)
"""
)

_RESERVE = (
    _COMMON
    + """
local per_minute, token_rate, amount = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local requests, tokens = level(KEYS[1], per_minute), level(KEYS[2], token_rate)
if tokens < amount then return answer(3, (amount - tokens) * 60 / token_rate, requests, tokens) end
keep(KEYS[2], tokens - amount, token_rate)
return answer(0, 0, requests, tokens - amount)
"""
)

_LEAVE = (
    _COMMON
    + """
redis.call('ZREM', KEYS[1], ARGV[1])
local token_rate, amount = tonumber(ARGV[2]), tonumber(ARGV[3])
if token_rate > 0 and amount ~= 0 then
  keep(KEYS[2], math.min(token_rate, level(KEYS[2], token_rate) - amount), token_rate)
end
return 0
"""
)

_RENEW = (
    _COMMON
    + """
for index = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', now + tonumber(ARGV[1]), ARGV[index]) end
redis.call('PEXPIRE', KEYS[1], math.ceil(tonumber(ARGV[1]) * 1000))
return 0
"""
)


class RedisQuotas:
    """`Quotas` of all front ends together.

    Attributes:
        alone: requests that this process counted by itself, as Redis was away.
        dropped: ends that Redis was never told.
    """

    def __init__(
        self,
        link: RedisLink,
        *,
        local: LocalQuotas | None = None,
        lease: float = LEASE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the link to Redis; connects to nothing.

        Args:
            link: to Redis.
            local: counts while it is away.
            lease: seconds, see `LEASE`.
            clock: seconds, monotonic.
        """
        self.alone = 0
        self.dropped = 0
        self._link = link
        self._local = LocalQuotas(clock=clock) if local is None else local
        self._lease = lease
        self._clock = clock
        self._enter = link.client.register_script(_ENTER)
        self._reserve = link.client.register_script(_RESERVE)
        self._leave = link.client.register_script(_LEAVE)
        self._renew = link.client.register_script(_RENEW)
        self._leases: dict[str, ApiKey] = {}
        self._ended: deque[tuple[ApiKey, str, int]] = deque()
        self._wake = asyncio.Event()

    async def enter(self, grant: Grant) -> None:
        """See `Quotas`."""
        key = grant.key
        if not key.limited:
            return
        lease = token_hex(12)
        names = [_name(key, "running"), _name(key, "requests"), _name(key, "tokens")]
        limits = [_or_none(key.max_concurrent), _or_none(key.requests_per_minute), _or_none(key.tokens_per_minute)]
        try:
            raw = await self._link.reached(lambda: self._enter(names, [*limits, lease, self._lease]))
        except UnavailableError:
            self.alone += 1
            self._local.enter_now(grant)
            return
        except asyncio.CancelledError:
            self._end(key, lease, 0)  # it may have been counted
            raise
        decision = _decision(raw)
        if not decision.outcome:
            grant.entered = True
            grant.lease = lease
            self._leases[lease] = key
        grant.apply(decision)

    async def reserve(self, grant: Grant, tokens: int) -> None:
        """See `Quotas`."""
        key = grant.key
        if key.tokens_per_minute is None:
            return
        if grant.lease is None:
            self._local.reserve_now(grant, tokens)
            return
        amount = min(tokens, key.tokens_per_minute)
        names = [_name(key, "requests"), _name(key, "tokens")]
        limits = [_or_none(key.requests_per_minute), key.tokens_per_minute]
        try:
            raw = await self._link.reached(lambda: self._reserve(names, [*limits, amount]))
        except UnavailableError:
            # What it uses is charged at its end, if Redis is back by then.
            self.alone += 1
            return
        decision = _decision(raw)
        if not decision.outcome:
            grant.reserved = amount
        grant.apply(decision)

    def leave(self, grant: Grant, used: int) -> None:
        """See `Quotas`."""
        if grant.lease is None:
            self._local.leave(grant, used)
        elif grant.entered:
            grant.entered = False
            del self._leases[grant.lease]
            self._end(grant.key, grant.lease, used - grant.reserved)

    def _end(self, key: ApiKey, lease: str, amount: int) -> None:
        self._ended.append((key, lease, amount))
        if len(self._ended) > MAX_UNSETTLED:
            self._ended.popleft()
            self.dropped += 1
        self._wake.set()

    async def run(self) -> None:
        """Tells Redis of requests that ended, and renews the leases of those that run; until it is cancelled."""
        interval = self._lease / 3
        renewal = self._clock() + interval
        while True:
            try:
                async with asyncio.timeout(max(renewal - self._clock(), 0.0)):
                    await self._wake.wait()
            except TimeoutError:
                renewal = self._clock() + interval
                await self._renew_all()
            self._wake.clear()
            await self._settle()

    async def close(self) -> None:
        """Tells Redis of the last ends, if it is there."""
        try:
            await self._settle()
        finally:
            await self._link.close()

    async def _settle(self) -> None:
        while self._ended:
            batch = [self._ended.popleft() for _ in range(min(len(self._ended), _BATCH))]
            try:
                await self._link.reached(lambda batch=batch: self._send(batch))  # type: ignore[misc]
            except UnavailableError:
                # Leases lapse, and a bucket that was not given back what was guessed too high fills up by itself.
                self.dropped += len(batch) + len(self._ended)
                self._ended.clear()

    async def _send(self, batch: list[tuple[ApiKey, str, int]]) -> None:
        client = self._link.client
        # A pipeline over a cluster carries no scripts: there, each goes by itself.
        pipeline = client.pipeline(transaction=False) if isinstance(client, Redis) else None
        for key, lease, amount in batch:
            names = [_name(key, "running"), _name(key, "tokens")]
            await self._leave(names, [lease, _or_none(key.tokens_per_minute), amount], client=pipeline)
        if pipeline is not None:
            await pipeline.execute()

    async def _renew_all(self) -> None:
        by_key: dict[str, list[str]] = {}
        for lease, key in self._leases.items():
            if key.max_concurrent is not None:
                by_key.setdefault(_name(key, "running"), []).append(lease)
        try:
            for name, leases in by_key.items():
                await self._link.reached(
                    lambda name=name, leases=leases: self._renew([name], [self._lease, *leases])  # type: ignore[misc]
                )
        except UnavailableError:
            logger.warning("the leases of running requests could not be renewed")


def _name(key: ApiKey, what: str) -> str:
    # Braces: in a cluster of Redis, all that a script touches is in one place.
    return f"{_PREFIX}:{{{key.name}}}:{what}"


def _or_none(limit: int | None) -> int:
    """Returns the limit as scripts have it: 0 for none."""
    return 0 if limit is None else limit


def _decision(raw: Any) -> Decision:
    outcome, wait, requests, tokens = raw
    return Decision(int(outcome), float(wait), float(requests), float(tokens))
