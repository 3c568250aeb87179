"""`tercet serve` as a process of its own, with played services: signals, sudden death, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tercet_shared.lifecycle.pipes import LineReader
from tests.fakes.processes import ended, runs

SUPERVISE = Path(__file__).parents[3] / "tests/fakes/services/supervise.py"
ORDER = ["front end", "core", "worker"]


class Run:
    """One `tercet serve`, with the notes of its services read as they come (through a FIFO)."""

    def __init__(self, tmp_path: Path) -> None:
        self.notes = tmp_path / "notes"
        self.base = tmp_path / "run"
        os.mkfifo(self.notes)
        # Also open for writing: then it has no end when the last service closes it.
        self._reader = LineReader(os.open(self.notes, os.O_RDWR | os.O_CLOEXEC), self._on_line)
        self._lines: list[str] = []
        self._changed = asyncio.Event()

    def open(self) -> None:
        self._reader.open()

    def close(self) -> None:
        self._reader.close()

    def _on_line(self, line: bytes) -> None:
        self._lines.append(line.decode())
        self._changed.set()

    async def until(self, what: str, count: int = 1) -> None:
        """Waits until ``what`` was noted ``count`` times."""
        async with asyncio.timeout(60):
            while len(self.noted(what)) < count:
                self._changed.clear()
                await self._changed.wait()

    @asynccontextmanager
    async def started(self, *flags: str, port: int = 0) -> AsyncIterator[asyncio.subprocess.Process]:
        root = SUPERVISE.parents[3]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(SUPERVISE), str(self.notes), str(self.base), str(port), *flags),
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def announced(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        if b"Tercet listens" not in line:
            assert process.stderr is not None
            pytest.fail(f"not announced: {(await process.stderr.read()).decode()}")

    def noted(self, what: str) -> list[str]:
        self._reader.drain()
        return [line.removeprefix(what + " ") for line in self._lines if line.startswith(what + " ")]

    def pids(self) -> list[int]:
        return [int(line.rsplit(" ", 1)[1]) for line in self.noted("start")]

    def pid(self, name: str) -> int:
        """Returns the process id of a service; they start side by side, and note it in any order."""
        (found,) = self.noted(f"start {name}")
        return int(found)

    def left(self) -> list[object]:
        """Processes, and entries of the directory for run directories, that are still there."""
        return [*(pid for pid in self.pids() if runs(pid)), *self.base.iterdir()]


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path)
    run.open()
    yield run
    run.close()


@pytest.fixture
def hears_hangups() -> Iterator[None]:
    """Lets what is started hear SIGHUP, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hears_hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_stops_all_in_order_and_leaves_nothing(run: Run, number: signal.Signals) -> None:
    async with run.started() as process:
        await run.announced(process)
        assert [path.name for path in sorted(next(run.base.iterdir()).iterdir())] == [
            "core.sock", "fron.sock", "lock", "work.sock",
        ]  # fmt: skip
        assert next(run.base.iterdir()).stat().st_mode & 0o777 == 0o700
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    assert run.noted("end") == ORDER
    assert run.left() == []


async def test_the_second_interrupt_kills_at_once(run: Run) -> None:
    async with run.started(*(f"{name}=--stubborn" for name in ORDER)) as process:
        await run.announced(process)
        front = os.pidfd_open(run.pid("front end"))
        process.send_signal(signal.SIGINT)
        await run.until("term")
        process.send_signal(signal.SIGINT)
        await ended(front)
        assert await asyncio.wait_for(process.wait(), 60) == 130
    assert run.noted("end") == []
    assert run.left() == []


def janitor_of(pid: int) -> psutil.Process:
    """Returns the process that tidies up after ``pid``."""
    (found,) = (child for child in psutil.Process(pid).children() if any("sweeper" in part for part in child.cmdline()))
    return found


async def test_a_killed_supervisor_leaves_no_process_and_no_file(run: Run) -> None:
    async with run.started("worker=--stubborn") as process:
        await run.announced(process)
        janitor = janitor_of(process.pid)
        pidfds = [os.pidfd_open(pid) for pid in (*run.pids(), janitor.pid)]
        process.kill()
        await process.wait()
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.read(), 60)  # nobody else holds it
        for pidfd in pidfds:
            await ended(pidfd)
    assert run.left() == []


async def test_the_directory_of_a_killed_supervisor_stays_until_its_last_service_has_ended(run: Run) -> None:
    go = run.base.with_name("go")
    os.mkfifo(go)
    async with run.started(f"worker=--outlives {go}") as process:
        await run.announced(process)
        janitor = os.pidfd_open(janitor_of(process.pid).pid)
        worker = os.pidfd_open(run.pid("worker"))
        process.kill()
        await process.wait()
        tidied = asyncio.create_task(ended(janitor))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(tidied), 0.3)
        (directory,) = run.base.iterdir()
        assert (directory / "work.sock").exists()
        go.write_text("end")
        await ended(worker)
        await tidied
    assert run.left() == []


async def test_a_stop_takes_the_janitor_along(run: Run) -> None:
    async with run.started() as process:
        await run.announced(process)
        janitor = janitor_of(process.pid).pid
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
    assert not runs(janitor)
    assert run.left() == []


async def test_the_next_start_removes_what_a_killed_janitor_has_left(run: Run) -> None:
    async with run.started() as process:
        await run.announced(process)
        pidfds = [os.pidfd_open(pid) for pid in run.pids()]
        janitor_of(process.pid).kill()
        process.kill()
        await process.wait()
        for pidfd in pidfds:
            await ended(pidfd)
    (stale,) = run.base.iterdir()
    async with run.started() as process:
        await run.announced(process)
        assert not stale.exists()
        process.terminate()
        await process.wait()
    assert run.left() == []


async def test_a_failure_is_the_last_line_and_exit_code_1(run: Run) -> None:
    async with run.started("worker=--fatal 'The checkpoint is truncated.'") as process:
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert out == b""
    assert err.decode().splitlines()[-1] == "error: The checkpoint is truncated."
    assert b"Traceback" not in err
    assert run.left() == []


async def test_a_port_in_use_ends_before_anything_starts(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with run.started(port=port) as process:
            _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert err.decode().splitlines() == [
        f"error: Port {port} on 127.0.0.1 is in use by another program; choose another with --port."
    ]
    assert run.noted("start") == []


async def test_broken_outputs_do_not_end_it(run: Run) -> None:
    read, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SUPERVISE), str(run.notes), str(run.base), "0", "core=--log hello"),
        stdout=write,
        stderr=write,
        env={**os.environ, "PYTHONPATH": str(SUPERVISE.parents[3])},
    )
    os.close(write)
    os.close(read)  # nobody reads, from the first line on
    await run.until("start", 3)
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 60) == 0
    assert run.left() == []


async def test_a_stuck_terminal_does_not_hold_up_the_stop(run: Run) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with suppress(BlockingIOError):  # the pipe is full, and nobody reads it
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SUPERVISE), str(run.notes), str(run.base), "0", "core=--log hello"),
        stdout=subprocess.DEVNULL,
        stderr=write,
        env={**os.environ, "PYTHONPATH": str(SUPERVISE.parents[3])},
    )
    os.close(write)
    await run.until("start", 3)
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 60) == 0
    os.close(read)
    assert run.left() == []
