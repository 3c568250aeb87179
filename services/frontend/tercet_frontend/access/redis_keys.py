"""API keys in Redis, for all front ends: a hash for each, under the SHA-256 of the key."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from tercet_frontend.access.keys import HASH_PREFIX, ApiKey
from tercet_shared.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tercet_frontend.access.redis_link import RedisLink

logger = logging.getLogger(__name__)

TTL = 5.0
"""Seconds for which what Redis said of a key counts: so long a change takes to have an effect everywhere."""

MAX_CACHED = 10_000
"""Keys, and as many again that are none, of which the last answer is remembered."""

_PREFIX = "tercet:1:api-key"


class _Answer(NamedTuple):
    key: ApiKey | None
    until: float


class RedisKeys:
    """The keys in Redis; each answer counts for a few seconds, and while Redis is away for longer.

    Args:
        link: to Redis.
        ttl: seconds, see `TTL`.
        clock: seconds, monotonic.
    """

    def __init__(self, link: RedisLink, *, ttl: float = TTL, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._ttl = ttl
        self._clock = clock
        # Apart, so that a flood of made-up keys does not drive out real ones.
        self._known: OrderedDict[bytes, _Answer] = OrderedDict()
        self._unknown: OrderedDict[bytes, _Answer] = OrderedDict()

    async def find(self, digest: bytes) -> ApiKey | None:
        """Returns the key with that SHA-256, or None.

        Raises:
            UnavailableError: Redis cannot be asked, and was never asked about this key.
        """
        last = self._known.get(digest) or self._unknown.get(digest)
        now = self._clock()
        if last is not None and now < last.until:
            return last.key
        try:
            fields = await self._link.reached(lambda: self._link.client.hgetall(redis_key(digest)))
        except UnavailableError as error:
            if last is not None:
                return last.key
            raise UnavailableError("API keys cannot be looked up now.", retry_after=error.retry_after) from None
        key = _parsed(digest, fields)
        self._remember(digest, _Answer(key, now + self._ttl))
        return key

    def forget(self) -> None:
        """Asks Redis anew about every key; while it is away, what it said last still counts."""
        for cache in (self._known, self._unknown):
            for digest, answer in cache.items():
                cache[digest] = _Answer(answer.key, 0.0)

    def _remember(self, digest: bytes, answer: _Answer) -> None:
        for cache in (self._known, self._unknown):
            cache.pop(digest, None)
        cache = self._unknown if answer.key is None else self._known
        cache[digest] = answer
        if len(cache) > MAX_CACHED:
            cache.popitem(last=False)


def redis_key(digest: bytes) -> str:
    """Returns where the key with that SHA-256 is in Redis."""
    return f"{_PREFIX}:{digest.hex()}"


def _parsed(digest: bytes, raw: Mapping[Any, Any]) -> ApiKey | None:
    """Returns the key in a hash of Redis, whose names and values are bytes."""
    if not raw:
        return None
    try:
        fields = {name.decode(): value.decode() for name, value in raw.items()}
        return ApiKey.model_validate({**fields, "hash": HASH_PREFIX + digest.hex()})
    except ValueError as error:
        # Refused: what was meant to limit the key may be what is wrong.
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        logger.warning("%s is refused, as it is wrong: %s", redis_key(digest), problem)
        return None
