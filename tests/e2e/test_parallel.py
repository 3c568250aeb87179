"""Workers of several ranks, as users start them: they answer like one, and a rank that is lost is a pause."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tercet_shared.lifecycle.readiness import wait_until_ready
from tests.e2e.conftest import Serving, commands, serve
from tests.e2e.test_recovery import Streams
from tests.fakes.checkpoints import write_tiny_llama
from tests.fakes.ports import free_ports

FLAGS = ("--dtype=float32", "--served-model-name=smollm2")


def ranks(running: Serving) -> dict[int, psutil.Process]:
    """Returns the processes of the worker's ranks by their number."""
    found = {}
    for child, command in commands(running.process.pid):
        match = re.search(r"--local-rank=(\d+)", command)
        if match:
            found[int(match[1])] = child
    return found


@pytest.mark.timeout(400)
def test_a_lost_rank_is_a_pause_and_the_group_comes_back_as_one(smollm2: Path) -> None:
    async def streams(running: Serving, *, lose: tuple[int, signal.Signals] | None = None) -> list[str]:
        streams = Streams(running.url)
        task = asyncio.create_task(streams.run())
        if lose is not None:
            await streams.begun.wait()
            before = ranks(running)
            before[lose[0]].send_signal(lose[1])
        texts = await task
        if lose is not None:
            assert streams.longest_pause > 0.5, "the worker was there all the time"
            assert not any(process.is_running() for process in before.values()), "all ranks were started again"
        return texts

    with serve(smollm2, *FLAGS) as running:
        alone = asyncio.run(streams(running))
        assert running.stop() == 0
    with serve(smollm2, *FLAGS, "--tensor-parallel-size=2", "--pipeline-parallel-size=2") as running:
        assert sorted(ranks(running)) == [0, 1, 2, 3]
        assert asyncio.run(streams(running)) == alone
        assert asyncio.run(streams(running, lose=(1, signal.SIGKILL))) == alone
        assert asyncio.run(streams(running, lose=(2, signal.SIGSTOP))) == alone
        assert asyncio.run(streams(running)) == alone, "and afterwards all is as before"
        assert running.stop() == 0, "nothing of it was a failure"


def end(process: subprocess.Popen[str]) -> None:
    """Lets a service end by itself: what a killed core leaves, another process removes, perhaps after the test."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()


class Hosts:
    """Services of one model as several hosts would run them, each a command of its own."""

    def __init__(self, model: Path, base: Path, stack: ExitStack) -> None:
        engine, self.http, meeting = free_ports(3)
        self._stack = stack
        self._model = str(model)
        self._link, self._engine = f"--link={base / 'w.sock'}", f"127.0.0.1:{engine}"
        # A core goes on only with a worker that offers what the one before it did.
        self._flags = ("--dtype=float32", "--num-kv-blocks=64", "--threads=1")
        self._parallel = ("--tensor-parallel-size=2", "--nodes=2", f"--rendezvous=127.0.0.1:{meeting}")
        self.start("core", f"--listen={self._engine}", self._link, "--remote-workers")
        self.start("frontend", self._model, f"--core={self._engine}", f"--port={self.http}")

    def start(self, service: str, *arguments: str) -> subprocess.Popen[str]:
        """Starts one; it ends with the test."""
        command = [sys.executable, "-m", f"tercet_{service}", *arguments]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._stack.enter_context(process)
        self._stack.callback(end, process)
        return process

    def worker(self) -> subprocess.Popen[str]:
        """Starts a worker of one rank, beside the core."""
        return self.start("worker", self._model, *self._flags, self._link)

    def group(self) -> list[subprocess.Popen[str]]:
        """Starts a rank beside the core, and another one that is told the core's address."""
        flags = (self._model, *self._flags, *self._parallel)
        return [
            self.start("worker", *flags, "--node-rank=0", self._link),
            self.start("worker", *flags, "--node-rank=1", f"--core-address={self._engine}"),
        ]

    async def ask(self) -> str:
        """Waits until requests are served, and returns a text."""
        await wait_until_ready("127.0.0.1", self.http, timeout_s=90)
        body: dict[str, Any] = {"prompt": [5, 6, 7, 8], "temperature": 0, "max_tokens": 24, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=60) as http:
            reply = await http.post(f"http://127.0.0.1:{self.http}/v1/completions", json=body | {"model": "tiny"})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])


@pytest.mark.timeout(300)
async def test_a_group_on_two_hosts(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny")
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as base, ExitStack() as stack:
        hosts = Hosts(model, Path(base), stack)
        single = hosts.worker()
        expected = await hosts.ask()
        single.terminate()
        assert await asyncio.to_thread(single.wait, 30) == 0
        first, second = hosts.group()
        assert await hosts.ask() == expected
        # The second host is gone, and its rank with it; the first one ends too, and says why.
        second.kill()
        _, said = await asyncio.to_thread(first.communicate, timeout=60)
        assert first.returncode == 1
        assert "rank 1 of 2" in said.splitlines()[-1]
        first, second = hosts.group()
        assert await hosts.ask() == expected
        for host in (first, second):
            host.terminate()
        assert [await asyncio.to_thread(host.wait, 30) for host in (first, second)] == [0, 0]
