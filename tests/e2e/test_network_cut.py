"""Two hosts, as far as one machine has them: a core in a network namespace of its own, whose cable is pulled.

Needs the rights to make a namespace (root, and ``ip``).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.bench.fleet import NAME, Ask, Fleet, Service, ask
from tests.fakes.checkpoints import write_tiny_llama
from tests.fakes.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(300)

IP = shutil.which("ip")
LONG = {"prompt": [5, 6, 7], "max_tokens": 3000, "ignore_eos": True, "n": 2, "temperature": 0.8, "seed": 5}


@dataclass(frozen=True)
class Cable:
    """A namespace, and the one link that leads to it."""

    name: str
    address: str  # of the far end

    def plug(self, state: str) -> None:
        """``down`` drops everything without a word, ``up`` heals it."""
        ip("link", "set", f"{self.name}a", state)


def ip(*arguments: str) -> None:
    assert IP is not None
    subprocess.run([IP, *arguments], check=True, capture_output=True, text=True)


@contextmanager
def another_host() -> Iterator[Cable]:
    name = f"tc{os.getpid() % 100_000}"
    subnet = f"10.231.{os.getpid() % 250}"
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace can be made here: {error}")
    try:
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("addr", "add", f"{subnet}.1/30", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("-n", name, "addr", "add", f"{subnet}.2/30", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield Cable(name, f"{subnet}.2")
    finally:
        ip("netns", "del", name)


@pytest.mark.skipif(IP is None, reason="ip (iproute2) is not installed")
async def test_a_cut_that_heals_is_a_pause(tmp_path: Path) -> None:
    model = str(write_tiny_llama(tmp_path / "tiny", max_len=4096))
    with another_host() as cable, tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as base:
        async with httpx.AsyncClient(timeout=120) as http:
            found = Fleet(model, Path(base), http, cores=2, front_ends=1)
            (front_end,), far, near = found.front_ends, *found.cores
            addresses = (f"{cable.address}:8100", f"127.0.0.1:{free_port()}")
            for core, address in zip((far, near), addresses, strict=True):
                kept = [flag for flag in core.arguments if not flag.startswith(("--redis-url", "--listen"))]
                core.arguments = [*kept, f"--listen={address}"]
            far.before = (str(IP), "netns", "exec", cable.name)
            front_end.arguments = [
                *(flag for flag in front_end.arguments if not flag.startswith("--redis-url")),
                *(f"--core={address}" for address in addresses), "--routing-policy=round_robin",
            ]  # fmt: skip
            try:
                for service in found.services:
                    await service.start()
                await found.wait_ready(front_end)
                one = Ask("/v1/completions", LONG, stream=True)
                expected = await ask(http, front_end.url, one, None)
                answer = asyncio.create_task(ask(http, front_end.url, one, None))  # a choice on each core
                await until_on(http, front_end.metrics_port, far)
                cable.plug("down")
                while not front_end.total:
                    assert not answer.done(), "it was over before the cut was noticed"
                    await front_end.count(http)
                cable.plug("up")
                assert await answer == expected
                await found.wait_ready(front_end)
                assert await ask(http, front_end.url, one, None) == expected
                await front_end.count(http)
                assert front_end.total == 1
                assert NAME in (await http.get(f"{front_end.url}/v1/models")).text
            finally:
                await found.end()


async def until_on(http: httpx.AsyncClient, port: int, core: Service) -> None:
    """Returns when the front end has a choice on ``core``."""
    name = core.name.replace(" ", "-")
    while True:
        text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
        on = [line for line in text.splitlines() if line.startswith("tercet_frontend_choices{") and f'"{name}"' in line]
        if any(float(line.split()[-1]) for line in on):
            return
