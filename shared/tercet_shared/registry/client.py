"""Clients of Redis and Valkey as all of Tercet makes them, for every way in which such a server is run.

| address | server |
|---|---|
| ``redis://user:password@host:6379/0`` | one server |
| ``rediss://…?ssl_ca_certs=ca.pem`` | one server, over TLS |
| ``unix:///run/redis.sock?db=0`` | one server on this machine |
| ``redis+sentinel://user:password@h1:26379,h2:26379/service/0`` | the primary of a service that Sentinels watch |
| ``redis+cluster://user:password@h1:6379,h2:6379`` | a cluster, found through any of its nodes |

``rediss+sentinel`` and ``rediss+cluster`` do the same over TLS. What follows ``?`` are arguments of redis-py's
connections (``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``, ``ssl_check_hostname``, …); Sentinels take their own
``sentinel_username`` and ``sentinel_password``. Characters of a password that mean something in a URL are written as
``%xx``.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from tercet_shared.errors import ConfigurationError

RedisClient: TypeAlias = Redis | RedisCluster

REDIS_FAILURES = (RedisError, RedisClusterException, OSError, TimeoutError)
"""What a command raises when the server cannot be reached, is too slow, or refuses."""

_CONNECTIONS = 32
_CLUSTER_CONNECTIONS = 256
"""Per node; they are made as they are needed, and where all are in use a call fails instead of waiting."""

_DEFAULT_PORT = 6379
_SENTINEL_PORT = 26379


class _SentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the primary; who finds all in use waits for one."""


def redis_client(url: str, *, timeout: float) -> RedisClient:
    """Returns a client with connections of its own, of which none is made yet.

    Args:
        url: see the module.
        timeout: seconds for a connection, for an answer, and for a free connection.

    Raises:
        ConfigurationError: the URL is none of these.
    """
    try:
        scheme = urlsplit(url).scheme
        if scheme.endswith("+sentinel"):
            return _of_sentinels(url, timeout)
        if scheme.endswith("+cluster"):
            return _of_cluster(url, timeout)
        return _of_server(url, timeout)
    except (ValueError, TypeError):
        # What the library says repeats the URL, which may hold a password.
        raise ConfigurationError(
            "The address of Redis must be redis://host:port/database, rediss://…, unix:///path, "
            "redis+sentinel://host:port,host:port/service/database or redis+cluster://host:port,host:port; "
            "after ? only arguments of redis-py's connections may follow.",
            param="redis_url",
        ) from None


async def close_client(client: RedisClient) -> None:
    """Closes all connections."""
    if not isinstance(client, Redis):
        await client.aclose()
        return
    await client.aclose(close_connection_pool=True)
    if isinstance(client.connection_pool, _SentinelPool):
        for sentinel in client.connection_pool.sentinel_manager.sentinels:
            await sentinel.aclose(close_connection_pool=True)


def raise_if_cancelled() -> None:
    """Raises `CancelledError` if the current task is to end; to be called after commands.

    redis-py sends them under `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that comes just when
    it is done. A loop would go on for ever then.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def is_cluster(client: RedisClient) -> bool:
    """Returns whether commands may name keys of one hash slot only."""
    return isinstance(client, RedisCluster)


def _common(timeout: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        # One more attempt: an idle connection may have been closed by the other side.
        "retry": Retry(NoBackoff(), 1),
    }


def _of_server(url: str, timeout: float) -> Redis:
    own = cast("dict[str, Any]", parse_url(url))
    kind = own.pop("connection_class", Connection)
    kind(**own)  # connects to nothing, but refuses arguments that it does not know
    if kind is UnixDomainSocketConnection and not own.get("path"):
        raise ValueError
    pool = BlockingConnectionPool(
        connection_class=kind, max_connections=_CONNECTIONS, timeout=timeout, **_common(timeout) | own
    )
    return Redis(connection_pool=pool)


def _of_sentinels(url: str, timeout: float) -> Redis:
    scheme, user, hosts, path, query = _parts(url, _SENTINEL_PORT)
    service, _, database = path.partition("/")
    if not service or "/" in database:
        raise ValueError
    arguments = dict(parse_qsl(query))
    sentinel = {
        name: arguments.pop(f"sentinel_{name}") for name in ("username", "password") if f"sentinel_{name}" in arguments
    }
    own = _arguments(scheme, user, database, arguments)
    tls = {name: value for name, value in own.items() if name.startswith("ssl")}
    if scheme == "rediss":
        tls["ssl"] = True
    manager = Sentinel(hosts, sentinel_kwargs=_common(timeout) | tls | sentinel)  # type: ignore[no-untyped-call]
    pool = _SentinelPool(
        service,
        manager,
        max_connections=_CONNECTIONS,
        timeout=timeout,
        **_common(timeout) | own | ({"ssl": True} if scheme == "rediss" else {}),
    )  # type: ignore[no-untyped-call]
    # The pool has only a weak reference to itself in its connections; the client keeps it.
    return Redis(connection_pool=pool)


def _of_cluster(url: str, timeout: float) -> RedisCluster:
    scheme, user, hosts, path, query = _parts(url, _DEFAULT_PORT)
    if path not in {"", "0"}:  # a cluster has one database
        raise ValueError
    own = _arguments(scheme, user, "", dict(parse_qsl(query)))
    own.pop("db", None)
    return RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in hosts],
        ssl=scheme == "rediss",
        max_connections=_CLUSTER_CONNECTIONS,
        **_common(timeout) | own,
    )


def _arguments(scheme: str, user: str, database: str, query: dict[str, str]) -> dict[str, Any]:
    """Returns arguments of connections. Raises `ValueError` or `TypeError` where one does not exist."""
    own = cast("dict[str, Any]", parse_url(f"{scheme}://{user}localhost/{database}?{urlencode(query)}"))
    if database and own.get("db") != int(database):
        raise ValueError
    (SSLConnection if scheme == "rediss" else Connection)(
        **{name: value for name, value in own.items() if name != "connection_class"}
    )
    for name in ("host", "port", "connection_class"):
        own.pop(name, None)
    return own


def _parts(url: str, default_port: int) -> tuple[str, str, list[tuple[str, int]], str, str]:
    """Returns scheme, user (with ``@``), hosts, path and query. Raises `ValueError`."""
    parts = urlsplit(url)
    scheme = parts.scheme.partition("+")[0]
    if scheme not in {"redis", "rediss"}:
        raise ValueError
    user, at, hosts = parts.netloc.rpartition("@")
    found = []
    for item in hosts.split(","):
        each = urlsplit(f"//{item}")
        if not each.hostname:
            raise ValueError
        found.append((each.hostname, each.port or default_port))
    return scheme, user + at, found, parts.path.strip("/"), parts.query
