"""Addresses of Redis: what they mean, and that a wrong one is refused without repeating its password."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis, RedisCluster

from tercet_shared.errors import ConfigurationError
from tercet_shared.registry.client import is_cluster, redis_client


def _arguments(url: str) -> dict[str, Any]:
    client = redis_client(url, timeout=1.5)
    assert isinstance(client, Redis)
    return dict(client.connection_pool.connection_kwargs)


def test_one_server() -> None:
    own = _arguments("redis://user:p%40ss@example:7000/3")
    assert (own["host"], own["port"], own["db"]) == ("example", 7000, 3)
    assert (own["username"], own["password"]) == ("user", "p@ss")
    assert (own["socket_timeout"], own["socket_connect_timeout"]) == (1.5, 1.5)
    assert _arguments("unix:///run/redis.sock?db=2")["path"] == "/run/redis.sock"
    assert _arguments("rediss://h?ssl_ca_certs=/ca.pem&ssl_check_hostname=no")["ssl_ca_certs"] == "/ca.pem"


def test_sentinels() -> None:
    client = redis_client(
        "redis+sentinel://user:pw@one,[::1]:7001/the-service/4?sentinel_username=s&sentinel_password=t", timeout=1.5
    )
    pool: Any = client.connection_pool  # type: ignore[union-attr]
    assert pool.service_name == "the-service"
    assert (pool.connection_kwargs["username"], pool.connection_kwargs["db"]) == ("user", 4)
    found = [each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in found] == [("one", 26379), ("::1", 7001)]
    assert {(each["username"], each["password"]) for each in found} == {("s", "t")}


async def test_cluster() -> None:
    client = redis_client("rediss+cluster://user:pw@one:7001,two/?ssl_ca_certs=/ca.pem", timeout=1.5)
    assert isinstance(client, RedisCluster)
    assert is_cluster(client)
    nodes = client.nodes_manager.startup_nodes.values()
    assert [(node.host, node.port) for node in nodes] == [("one", 7001), ("two", 6379)]
    assert {node.connection_kwargs["ssl_ca_certs"] for node in nodes} == {"/ca.pem"}
    assert {node.connection_kwargs["password"] for node in nodes} == {"pw"}


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://u:secret@h",
        "unix://",
        "redis://u:secret@h:port",
        "redis://u:secret@h?no_such_argument=1",
        "redis+sentinel://u:secret@h",
        "redis+sentinel://u:secret@h/service/x",
        "redis+sentinel://u:secret@,h/service",
        "redis+sentinel://u:secret@h/service?no_such=1",
        "redis+cluster://u:secret@h/3",
        "redis+cluster://u:secret@h:99999999",
        "other+cluster://u:secret@h",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        redis_client(url, timeout=1.0)
    assert "secret" not in str(caught.value)
    assert caught.value.param == "redis_url"
