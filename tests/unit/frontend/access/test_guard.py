"""From settings to what guards the front end."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import orjson
import pytest

from tercet_frontend.access.guard import Guard, _allow_files
from tercet_frontend.access.quotas import LocalQuotas
from tercet_frontend.access.redis_quotas import RedisQuotas
from tercet_shared.config import FrontendSettings, parse
from tercet_shared.errors import AuthenticationError, ConfigurationError
from tests.unit.frontend.access.conftest import hash_of


def settings(*arguments: str) -> FrontendSettings:
    return parse(FrontendSettings, ["model", *arguments])


def _write(path: Path, *names: str) -> None:
    path.write_text(json.dumps({"keys": [{"name": name, "hash": hash_of(name)} for name in names]}))


async def test_the_defaults() -> None:
    before = signal.getsignal(signal.SIGHUP)
    guard = Guard(settings())
    assert not guard.keys.asked_for
    assert isinstance(guard.quotas, LocalQuotas)
    assert guard.tls is None
    assert not guard.notes.wanted
    assert guard.edge.heartbeat == 15
    async with guard.reloading():
        assert signal.getsignal(signal.SIGHUP) is before  # a closed terminal ends it
    await guard.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-keys-file", "none.json"], "none.json cannot be read"),
        (["--api-keys-redis"], "need --redis-url"),
        (["--redis-url", "http://x"], "redis://"),
        (["--tls-cert", "x.pem"], "belong together"),
        (["--tls-key", "x.pem"], "belong together"),
        (["--tls-client-ca", "x.pem"], "needs --tls-cert"),
        (["--tls-cert", "x.pem", "--tls-key", "y.pem"], "No such file"),
        (["--cors-origin", "page.example"], "no origin"),
        (["--cors-origin", "https://page.example/"], "no origin"),
        (["--trusted-proxy", "proxy"], "no address or network"),
        (["--access-log", "none/log"], "none/log cannot be written"),
        (["--audit-log", "none/log"], "none/log cannot be written"),
    ],
)
async def test_settings_that_cannot_work(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        Guard(settings(*arguments))
    assert caught.value.param


async def test_redis() -> None:
    guard = Guard(settings("--redis-url", "unix:///nowhere/redis.sock", "--api-keys-redis"))
    assert isinstance(guard.quotas, RedisQuotas)
    assert guard.keys.asked_for
    await guard.close()


async def test_a_signal_reloads_everything(tmp_path: Path) -> None:
    keys, access, audit = tmp_path / "keys.json", tmp_path / "access", tmp_path / "audit"
    _write(keys, "alice")
    guard = Guard(settings("--api-keys-file", str(keys), "--access-log", str(access), "--audit-log", str(audit)))
    async with guard.reloading():
        assert (await guard.keys.find(b"Bearer alice")).name == "alice"
        _write(keys, "bob")
        audit.rename(tmp_path / "audit.1")
        reloaded = asyncio.Event()
        original = guard.notes.reopen

        def reopen() -> None:
            original()
            reloaded.set()

        guard.notes.reopen = reopen  # type: ignore[method-assign]  # the last thing that a reload does
        os.kill(os.getpid(), signal.SIGHUP)
        await reloaded.wait()
        assert (await guard.keys.find(b"Bearer bob")).name == "bob"
        with pytest.raises(AuthenticationError):
            await guard.keys.find(b"Bearer alice")
        guard.notes.event("stop", "Now.")
    await guard.close()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    moved: list[Any] = [orjson.loads(line) for line in (tmp_path / "audit.1").read_bytes().splitlines()]
    assert [line["event"] for line in moved] == ["keys"]
    assert [orjson.loads(line)["event"] for line in audit.read_bytes().splitlines()] == ["stop"]


def test_files_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, limits: set_to.append(limits))
    for limits, wanted, expected in (
        ((1_024, 1_000_000), 9_000, [(9_000, 1_000_000)]),
        ((1_024, 4_096), 9_000, [(4_096, 4_096)]),
        ((10_000, 1_000_000), 9_000, []),
        ((1_024, resource.RLIM_INFINITY), 9_000, [(9_000, resource.RLIM_INFINITY)]),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 9_000, []),
    ):
        set_to.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, limits=limits: limits)
        _allow_files(wanted)
        assert set_to == expected
