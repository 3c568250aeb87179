"""Responses in Redis: any front end can answer what follows them, and they outlive the process."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, TypeVar

from tercet_frontend.conversations.interface import DEFAULT_TTL, MAX_RECORD_BYTES
from tercet_shared.errors import UnavailableError
from tercet_shared.registry.client import REDIS_FAILURES, close_client, raise_if_cancelled, redis_client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

TIMEOUT = 2.0
"""Seconds for a connection, for an answer, and for a free connection."""

PAUSE = 1.0
"""Seconds after a failure in which a check fails at once."""

_PREFIX = "tercet:1:response"


class RedisResponses:
    """`ResponseStore` in Redis. Building it connects to nothing; each call finds out anew whether Redis is there.

    Args:
        url: see `tercet_shared.registry.client`.
        ttl: seconds that a record is kept.
        max_record_bytes: bytes of one record.
        timeout: seconds, see `TIMEOUT`.
        clock: seconds, monotonic.

    Raises:
        ConfigurationError: the URL is none of these.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl: float = DEFAULT_TTL,
        max_record_bytes: int = MAX_RECORD_BYTES,
        timeout: float = TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis_client(url, timeout=timeout)
        self._ttl_ms = math.ceil(ttl * 1000)
        self._max_record_bytes = max_record_bytes
        self._clock = clock
        self._failed_at = -math.inf

    async def check(self) -> None:
        """See `ResponseStore`. Shortly after a failure nobody waits for another."""
        if self._clock() - self._failed_at < PAUSE:
            raise _gone()
        await self._reached(self._redis.ping())

    async def put(self, tenant: str, response_id: str, record: bytes) -> bool:
        """See `ResponseStore`."""
        if len(record) > self._max_record_bytes:
            return False
        await self._reached(self._redis.set(_key(tenant, response_id), record, px=self._ttl_ms))
        return True

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """See `ResponseStore`."""
        record = await self._reached(self._redis.get(_key(tenant, response_id)))
        return record if isinstance(record, bytes) else None  # it is: the client is not told to decode

    async def delete(self, tenant: str, response_id: str) -> bool:
        """See `ResponseStore`."""
        return bool(await self._reached(self._redis.delete(_key(tenant, response_id))))

    async def close(self) -> None:
        """See `ResponseStore`."""
        await close_client(self._redis)

    async def _reached(self, answer: Awaitable[T]) -> T:
        try:
            found = await answer
        except REDIS_FAILURES:
            raise_if_cancelled()
            self._failed_at = self._clock()
            raise _gone() from None
        raise_if_cancelled()
        return found


def _key(tenant: str, response_id: str) -> str:
    return f"{_PREFIX}:{tenant}:{response_id}"


def _gone() -> UnavailableError:
    return UnavailableError("The store of responses cannot be reached; try again.")
