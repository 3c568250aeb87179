"""What a key may use: requests at once, requests per minute, tokens per minute.

    grant = Grant(key)
    await quotas.enter(grant)           before the body is read: counts the request
    await quotas.reserve(grant, 700)    before anything is tokenized: takes what it will cost, by a guess
    quotas.leave(grant, used=512)       at its end, in any case: what it did cost

Both rates are token buckets, which hold what a minute allows and are full at first. The bucket of tokens may fall below
zero when a guess was too low: then the key waits until it is back above. Refusals say after how many seconds.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tercet_shared.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tercet_frontend.access.keys import ApiKey

GUESSED_OUTPUT = 256
"""Output tokens that are reserved for a request that sets no limit."""

BYTES_PER_TOKEN = 4
"""Of a request's body, as a guess."""

_OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_MINUTE = 60.0
_FORGET = 10_000
"""Keys with a state, beyond which those that are full again are forgotten."""

# What a decision is about.
GRANTED, AT_ONCE, REQUESTS, TOKENS = 0, 1, 2, 3


class Decision(NamedTuple):
    """What became of one step of a grant.

    Attributes:
        outcome: GRANTED, or the limit that was reached.
        wait: seconds until that limit allows it.
        requests: level of that bucket.
        tokens: level of that bucket.
    """

    outcome: int
    wait: float
    requests: float
    tokens: float


class Grant:
    """One request's share of its key's quota.

    Attributes:
        key: whose.
        entered: whether it counts among the requests that run.
        reserved: tokens that were taken for it.
        lease: its name where several front ends count together; None where this process counts alone.
    """

    __slots__ = ("_requests", "_tokens", "entered", "key", "lease", "reserved")

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        self.entered = False
        self.reserved = 0
        self.lease: str | None = None
        self._requests: float | None = None
        self._tokens: float | None = None

    def apply(self, decision: Decision) -> None:
        """Notes what was decided.

        Raises:
            OverloadedError: a limit was reached.
        """
        key = self.key
        if key.requests_per_minute is not None:
            self._requests = decision.requests
        if key.tokens_per_minute is not None:
            self._tokens = decision.tokens
        if decision.outcome == GRANTED:
            return
        reached = {
            AT_ONCE: f"{key.max_concurrent} requests at once",
            REQUESTS: f"{key.requests_per_minute} requests per minute",
            TOKENS: f"{key.tokens_per_minute} tokens per minute",
        }[decision.outcome]
        raise OverloadedError(
            f"The limit of the API key {key.name!r} is reached: {reached}.", retry_after=max(decision.wait, 1.0)
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns OpenAI's ``x-ratelimit-`` headers, for the limits that there are."""
        found: list[tuple[bytes, bytes]] = []
        for name, limit, level in (
            (b"requests", self.key.requests_per_minute, self._requests),
            (b"tokens", self.key.tokens_per_minute, self._tokens),
        ):
            if limit is None or level is None:
                continue
            found += [
                (b"x-ratelimit-limit-" + name, str(limit).encode()),
                (b"x-ratelimit-remaining-" + name, str(max(int(level), 0)).encode()),
                (b"x-ratelimit-reset-" + name, _duration((limit - level) * _MINUTE / limit).encode()),
            ]
        return found


class Quotas(Protocol):
    """Counts what keys use. Keys without limits cost nothing."""

    async def enter(self, grant: Grant) -> None:
        """Counts a request. Raises `OverloadedError` when its key may not make it now."""

    async def reserve(self, grant: Grant, tokens: int) -> None:
        """Takes tokens for it, at most what a minute allows. Raises `OverloadedError` when there are not that many."""

    def leave(self, grant: Grant, used: int) -> None:
        """Ends a grant that had cost ``used`` tokens, however far it came; returns at once."""

    async def run(self) -> None:
        """Does what has to be done in the background, until it is cancelled; may return at once."""

    async def close(self) -> None:
        """Settles what is left. Nothing is counted afterwards."""


def guessed_tokens(raw: Mapping[str, Any], body_bytes: int) -> int:
    """Returns the tokens that a request will cost, by a guess: prompt by size, output as far as it may go.

    Args:
        raw: the body, unchecked.
        body_bytes: its size.
    """
    output = next((raw[name] for name in _OUTPUT_LIMITS if _is_count(raw.get(name))), GUESSED_OUTPUT)
    choices = raw["n"] if _is_count(raw.get("n")) else 1
    return int(body_bytes // BYTES_PER_TOKEN + output * choices)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


class LocalQuotas:
    """`Quotas` of this process alone.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._states: dict[str, _State] = {}

    async def enter(self, grant: Grant) -> None:
        """See `Quotas`."""
        self.enter_now(grant)

    def enter_now(self, grant: Grant) -> None:
        """See `Quotas.enter`."""
        key = grant.key
        if not key.limited:
            return
        state, now = self._state(key), self._clock()
        requests = state.requests.level(key.requests_per_minute, now)
        tokens = state.tokens.level(key.tokens_per_minute, now)
        outcome, wait = GRANTED, 0.0
        if key.max_concurrent is not None and state.running >= key.max_concurrent:
            outcome = AT_ONCE
        elif key.requests_per_minute is not None and requests < 1:
            outcome, wait = REQUESTS, _wait(1 - requests, key.requests_per_minute)
        elif key.tokens_per_minute is not None and tokens < 1:
            outcome, wait = TOKENS, _wait(1 - tokens, key.tokens_per_minute)
        else:
            state.running += 1
            grant.entered = True
            state.requests.take(1)
            requests -= 1
        grant.apply(Decision(outcome, wait, requests, tokens))

    async def reserve(self, grant: Grant, tokens: int) -> None:
        """See `Quotas`."""
        self.reserve_now(grant, tokens)

    def reserve_now(self, grant: Grant, tokens: int) -> None:
        """See `Quotas.reserve`."""
        key = grant.key
        if key.tokens_per_minute is None:
            return
        amount = min(tokens, key.tokens_per_minute)
        state, now = self._state(key), self._clock()
        requests = state.requests.level(key.requests_per_minute, now)
        level = state.tokens.level(key.tokens_per_minute, now)
        if level < amount:
            grant.apply(Decision(TOKENS, _wait(amount - level, key.tokens_per_minute), requests, level))
        state.tokens.take(amount)
        grant.reserved = amount
        grant.apply(Decision(GRANTED, 0.0, requests, level - amount))

    def leave(self, grant: Grant, used: int) -> None:
        """See `Quotas`."""
        if not grant.entered:
            return
        grant.entered = False
        state = self._states.get(grant.key.name)
        if state is None:
            return
        state.running -= 1
        state.tokens.level(grant.key.tokens_per_minute, self._clock())
        state.tokens.take(used - grant.reserved)

    async def run(self) -> None:
        """See `Quotas`: nothing."""

    async def close(self) -> None:
        """See `Quotas`: nothing."""

    def _state(self, key: ApiKey) -> _State:
        state = self._states.get(key.name)
        if state is None:
            if len(self._states) >= _FORGET:
                now = self._clock()
                self._states = {name: kept for name, kept in self._states.items() if not kept.idle(now)}
            state = self._states[key.name] = _State()
        return state


class _Bucket:
    """What is left of a rate; full at first. A negative level is a debt."""

    __slots__ = ("_at", "_capacity", "_level")

    def __init__(self) -> None:
        self._capacity = 0
        self._level = math.inf
        self._at = 0.0

    def level(self, capacity: int | None, now: float) -> float:
        """Returns the level at ``now`` of a bucket that holds a minute's ``capacity``."""
        if capacity is None:
            self._level = math.inf
            return 0.0
        self._capacity = capacity
        self._level = min(float(capacity), self._level + (now - self._at) * capacity / _MINUTE)
        self._at = now
        return self._level

    def take(self, amount: float) -> None:
        """Takes ``amount``; a negative one is given back."""
        self._level -= amount

    def full(self, now: float) -> bool:
        return self._level + (now - self._at) * self._capacity / _MINUTE >= self._capacity


class _State:
    __slots__ = ("requests", "running", "tokens")

    def __init__(self) -> None:
        self.running = 0
        self.requests = _Bucket()
        self.tokens = _Bucket()

    def idle(self, now: float) -> bool:
        """Returns whether nothing would be lost with it."""
        return not self.running and self.requests.full(now) and self.tokens.full(now)


def _wait(missing: float, per_minute: int) -> float:
    return missing * _MINUTE / per_minute


def _duration(seconds: float) -> str:
    """Returns a span of time as OpenAI's headers have it: ``120ms``, ``7.5s``, ``6m0s``."""
    if seconds < 1:
        return f"{max(math.ceil(seconds * 1000), 0)}ms"
    if seconds < _MINUTE:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
