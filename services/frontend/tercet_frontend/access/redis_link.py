"""The connection to Redis of what every request needs: short patience, and a pause after a failure."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, TypeVar

from tercet_shared.errors import UnavailableError
from tercet_shared.registry.client import REDIS_FAILURES, close_client, raise_if_cancelled, redis_client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)
T = TypeVar("T")

TIMEOUT = 0.5
"""Seconds for a connection, for an answer, and for a free connection."""

PAUSE = 1.0
"""Seconds after a failure in which nobody tries."""


class RedisLink:
    """A Redis that may be away. Building it connects to nothing.

    Attributes:
        client: for commands, which go through `reached`.
        failures: calls that did not reach Redis, those during a pause included.

    Raises:
        ConfigurationError: the URL is no address of Redis.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = TIMEOUT,
        pause: float = PAUSE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the address.

        Args:
            url: see `tercet_shared.registry.client`.
            timeout: seconds, see `TIMEOUT`.
            pause: seconds, see `PAUSE`.
            clock: seconds, monotonic.
        """
        self.client = redis_client(url, timeout=timeout)
        self.failures = 0
        self._pause = pause
        self._clock = clock
        self._failed_at = -math.inf

    async def reached(self, command: Callable[[], Awaitable[T]]) -> T:
        """Returns what ``command`` returns.

        Raises:
            UnavailableError: Redis cannot be reached, or could not a moment ago.
        """
        if self._clock() - self._failed_at < self._pause:
            self.failures += 1
            raise UnavailableError("Redis cannot be reached.", retry_after=self._pause)
        try:
            answer = await command()
        except REDIS_FAILURES as error:
            raise_if_cancelled()
            self.failures += 1
            self._failed_at = self._clock()
            logger.warning("Redis cannot be reached (%s)", type(error).__name__)
            raise UnavailableError("Redis cannot be reached.", retry_after=self._pause) from None
        raise_if_cancelled()
        return answer

    async def close(self) -> None:
        """Closes the connections."""
        await close_client(self.client)
