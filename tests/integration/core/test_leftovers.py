"""What a core process of its own leaves in the file system: nothing, however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from tests.fakes.processes import ended, runs
from tests.fakes.stream_client import Client
from tests.fakes.worker import TIMEOUT, FakeWorker


@asynccontextmanager
async def core_process(run_dir: Path, *flags: str, fds: tuple[int, ...] = ()) -> AsyncIterator[Process]:
    """`tercet core` in a process, once it waits for its worker."""
    command = (sys.executable, "-m", "tercet_core", "--log-level=debug", *flags)
    process = await asyncio.create_subprocess_exec(
        *command, f"--listen=unix:{run_dir}/core.sock", f"--link={run_dir}/worker.sock",
        stdin=DEVNULL, stderr=PIPE, pass_fds=fds,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def waits_for_its_worker(process: Process) -> None:
    assert process.stderr is not None
    async with asyncio.timeout(TIMEOUT):
        while b"waiting for the worker" not in (line := await process.stderr.readline()):
            assert line, "it has ended"


def janitors_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children() if any("sweeper" in part for part in child.cmdline())]


FILES = ["core.sock", "core.sock.lock", "worker.sock", "worker.sock.lock"]


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


async def test_a_killed_core_leaves_no_file_and_the_next_starts_at_once(run_dir: Path) -> None:
    async with core_process(run_dir) as killed:
        await waits_for_its_worker(killed)
        assert names(run_dir) == FILES
        (pid,) = janitors_of(killed.pid)
        janitor = os.pidfd_open(pid)
        async with FakeWorker(run_dir / "worker.sock"), Client(f"unix:{run_dir}/core.sock"):
            killed.kill()
            await killed.wait()  # it has let go of its paths; its janitor may not have come to its turn
            async with core_process(run_dir) as following:
                await waits_for_its_worker(following)
                await ended(janitor)
                assert names(run_dir) == FILES
                for name in ("core.sock", "worker.sock"):
                    with socket.socket(socket.AF_UNIX) as client:
                        client.connect(str(run_dir / name))
                (pid,) = janitors_of(following.pid)
                janitor = os.pidfd_open(pid)
                following.kill()
                await ended(janitor)
    assert names(run_dir) == []


async def test_a_core_that_stops_takes_its_janitor_along(run_dir: Path) -> None:
    async with core_process(run_dir) as process:
        await waits_for_its_worker(process)
        (janitor,) = janitors_of(process.pid)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), TIMEOUT)
        assert process.returncode == 0
    assert not runs(janitor)
    assert names(run_dir) == []


async def test_under_a_supervisor_the_janitor_is_the_supervisor_s(run_dir: Path) -> None:
    reading, writing = os.pipe()
    async with core_process(run_dir, f"--report-fd={writing}", fds=(writing,)) as process:
        os.close(writing)
        events = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(events), os.fdopen(reading, "rb", buffering=0)
        )
        assert b"waiting for the worker" in await asyncio.wait_for(events.readline(), TIMEOUT)
        assert janitors_of(process.pid) == []
        assert names(run_dir) == FILES
        transport.close()
