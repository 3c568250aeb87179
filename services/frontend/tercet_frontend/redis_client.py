"""Connections to Redis as all of the front end makes them."""

from __future__ import annotations

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tercet_shared.errors import ConfigurationError

_CONNECTIONS = 32


def redis_client(url: str, *, timeout: float) -> Redis:
    """Returns a client with connections of its own, of which none is made yet.

    Args:
        url: ``redis://[user:password@]host:port/database``, ``rediss://`` for TLS, or ``unix:///path``.
        timeout: seconds for a connection, for an answer, and for a free connection.

    Raises:
        ConfigurationError: the URL is none of these.
    """
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=timeout,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            # One more attempt: an idle connection may have been closed by the other side.
            retry=Retry(NoBackoff(), 1),
        )
    except ValueError:
        # What the library says repeats the URL, which may hold a password.
        raise ConfigurationError(
            "The address of Redis must be redis://host:port/database, rediss://… or unix:///path.",
            param="redis_url",
        ) from None
    return Redis(connection_pool=pool)
