"""The registry works on servers of every kind that can be addressed, with the rights that the documentation names."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tercet_shared.registry.client import close_client, redis_client
from tercet_shared.registry.interface import RouteRecord
from tests.fakes.ports import free_port
from tests.integration.registry import servers
from tests.integration.registry.conftest import KEYS, Core, found, joined, record, until, watching

DOCS = Path(__file__).resolve().parents[3] / "docs" / "fleet.md"


async def _live(core_url: str, front_url: str) -> None:
    """All that a core and a front end do."""
    core = Core(record("a"))
    core.fill(KEYS[:30])
    other = Core(record("b"))
    route = RouteRecord(core_id="a", front_end="f", attempt=0, traceparent="", state="running")
    async with watching(front_url) as view, joined(core_url, core), joined(core_url, other):
        await until(lambda: view.mirrors_of(core) and view.known("a") == core.own and view.known("b") == other.own)
        core.fill(KEYS[40:80])
        other.fill(KEYS[50:55])
        await until(lambda: view.mirrors_of(core) and view.mirrors_of(other))
        view.fleet.note_route("r", route)
        async with watching(front_url) as late:
            await until(lambda: late.mirrors_of(core) and late.mirrors_of(other))
            await found(late.fleet, "r", route)
        assert view.fleet.failures == 0
    async with watching(front_url) as view:
        await until(lambda: view.fleet.healthy)
        assert view.fleet.cores() == {}


async def test_cluster() -> None:
    async with servers.cluster() as url:
        await _live(url, url)


async def test_sentinel(tmp_path: Path) -> None:
    async with servers.sentinel(tmp_path) as url:
        await _live(url, url)


async def test_tls(tmp_path: Path) -> None:
    async with servers.over_tls(tmp_path) as url:
        await _live(url, url)


def _documented_rights() -> dict[str, list[str]]:
    lines = [line.split() for line in DOCS.read_text().splitlines() if line.startswith("ACL SETUSER")]
    return {line[2]: line[3:] for line in lines}


async def test_rights_that_the_documentation_names() -> None:
    rights = _documented_rights()
    assert set(rights) == {"tercet-core", "tercet-frontend"}
    async with servers.one() as port, Redis(port=port) as client:
        for user, rules in rights.items():
            ours = [rule.replace("~tercet:", "~test:") for rule in rules]
            await client.execute_command("ACL", "SETUSER", user, *ours, ">p@ss/word")
        await client.execute_command("ACL", "SETUSER", "default", "off")
        await _live(
            f"redis://tercet-core:p%40ss%2Fword@127.0.0.1:{port}/0",
            f"redis://tercet-frontend:p%40ss%2Fword@127.0.0.1:{port}",
        )


@pytest.mark.parametrize("kind", ["redis+sentinel", "redis+cluster", "redis"])
async def test_a_server_that_is_not_there_is_a_failure_like_others(kind: str) -> None:
    url = f"{kind}://127.0.0.1:{free_port()}" + ("/service" if "sentinel" in kind else "")
    core = Core(record("a"))
    working: AbstractAsyncContextManager[object] = joined(url, core)
    async with watching(url) as view, working as member:
        await until(lambda: view.fleet.failures > 1)
        assert not view.fleet.healthy
        assert member is not None


async def test_a_client_is_closed_without_having_connected() -> None:
    for url in ("redis://h", "unix:///x", "redis+sentinel://h/s", "redis+cluster://h", "rediss+cluster://h"):
        await close_client(redis_client(url, timeout=1.0))
