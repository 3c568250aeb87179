"""A core on its real transports: gRPC over a Unix socket towards front ends, the ring towards a fake worker."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tercet_core.core import serve
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.config import CoreSettings, parse
from tercet_shared.lifecycle.report import Reporter
from tests.fakes.stream_client import Client
from tests.fakes.worker import FakeWorker

TIMEOUT = 60.0


class RecordingReporter:
    def __init__(self) -> None:
        self.is_ready = asyncio.Event()
        self.stages: list[str] = []
        self.restarts: asyncio.Queue[tuple[str, int, str]] = asyncio.Queue()

    def progress(self, stage: str, fraction: float | None = None) -> None:
        self.stages.append(stage)

    def ready(self, **detail: Any) -> None:
        self.is_ready.set()

    def fatal(self, message: str) -> None:
        raise AssertionError(message)

    def restart(self, child: str, pid: int, message: str) -> None:
        self.restarts.put_nowait((child, pid, message))


@dataclass
class RunningCore:
    settings: CoreSettings
    task: asyncio.Task[None]
    stop: asyncio.Event
    reporter: RecordingReporter

    @property
    def link(self) -> Path:
        return self.settings.link

    async def ready(self) -> None:
        await asyncio.wait_for(self.reporter.is_ready.wait(), TIMEOUT)

    async def ended(self) -> None:
        """Waits for the core's end and raises what it ended with."""
        await asyncio.wait_for(asyncio.shield(self.task), TIMEOUT)


@asynccontextmanager
async def at_work(
    core: RunningCore, worker: FakeWorker | None = None, **offer: Any
) -> AsyncIterator[tuple[Client, FakeWorker]]:
    """A worker and a front end of a core; by the end the worker may be gone and the core too."""
    worker = FakeWorker(core.link, **offer) if worker is None else worker
    async with worker:
        async with Client(core.settings.listen) as client:
            yield client, worker


async def info(client: Client) -> pb.InfoReply:
    reply: pb.InfoReply = await client.stub.Info(pb.InfoRequest())
    return reply


async def until(client: Client, condition: Callable[[pb.InfoReply], bool]) -> pb.InfoReply:
    """Asks until the condition holds; what is asked for has no event at a front end."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            reply = await info(client)
            if condition(reply):
                return reply


StartCore = Callable[..., AbstractAsyncContextManager[RunningCore]]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    # Not tmp_path: its name is too long for a Unix socket.
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def start_core(run_dir: Path) -> StartCore:
    @asynccontextmanager
    async def start(**changes: Any) -> AsyncIterator[RunningCore]:
        base = {
            "listen": f"unix:{run_dir}/core.sock",
            "link": run_dir / "worker.sock",
            "heartbeat_interval": 0.1,
            "remote_workers": True,
        }
        settings = parse(CoreSettings, []).model_copy(update=base | changes)
        reporter: Any = RecordingReporter()
        checked: Reporter = reporter
        stop = asyncio.Event()
        task = asyncio.create_task(serve(settings, checked, stop))
        core = RunningCore(settings, task, stop, reporter)
        while "waiting for the worker" not in reporter.stages:
            if task.done():
                break
            await asyncio.sleep(0)  # the next turn of the loop: listening takes no time of its own
        try:
            yield core
        finally:
            stop.set()
            await asyncio.wait({task}, timeout=TIMEOUT)
            if not task.cancelled() and task.done():
                task.exception()

    return start
