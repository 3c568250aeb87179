"""Links within one process and between processes; every async test runs on asyncio's own loop and on uvloop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import grpc.aio
import pytest
import uvloop

from tercet_proto.v1.link_pb2_grpc import add_WorkerLinkServicer_to_server
from tercet_shared.ipc.connect import connect
from tercet_shared.ipc.connect_remote import connect_remote
from tercet_shared.ipc.listener import Accepted, LinkListener, Rejected
from tercet_shared.ipc.remote_listener import RemoteListener
from tercet_shared.ipc.settings import HeartbeatSettings, ListenerSettings, RingSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from tercet_shared.ipc.link import FrameLink

PATIENCE_S = 60.0
"""Bound of every wait; far above what is expected, so that a busy machine does not fail a test."""

# Silence long enough to be out of the picture where a test is about EOF.
CALM = HeartbeatSettings(interval_s=30.0, dead_after_s=90.0)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


def small(heartbeat: HeartbeatSettings = CALM, **changes: object) -> ListenerSettings:
    """Settings with rings small enough to fill."""
    rings = {name: RingSettings(capacity=64 * 1024, max_frame=1 << 20) for name in ("plan", "result", "mask")}
    return ListenerSettings(heartbeat=heartbeat, **(rings | changes))  # type: ignore[arg-type]  # a test's shorthand


class Collector:
    """Keeps the frames it is given and lets a test wait for a number of them."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self._changed = asyncio.Event()

    def __call__(self, frames: list[bytes]) -> None:
        self.frames += frames
        self._changed.set()

    async def until(self, count: int) -> list[bytes]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.frames) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.frames


class Core:
    """A listening core: accepts every hello but those in ``refuse``, and queues the connections it is given."""

    def __init__(self) -> None:
        self.connections: asyncio.Queue[tuple[Any, bytes]] = asyncio.Queue()
        self.refuse: dict[bytes, str] = {}
        self.reply = b""  # instead of the usual one
        self.hellos: list[bytes] = []
        self.results: Collector | None = None  # registered at once, for peers that are gone again a moment later
        self._made: list[FrameLink] = []

    def on_hello(self, hello: bytes) -> Accepted | Rejected:
        self.hellos.append(hello)
        reason = self.refuse.get(hello)
        return Accepted(self.reply or b"welcome, " + hello) if reason is None else Rejected(reason)

    def on_connection(self, connection: FrameLink, hello: bytes) -> None:
        self._made.append(connection)
        if self.results is not None:
            connection.on_frames(self.results)
        self.connections.put_nowait((connection, hello))

    async def connection(self) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return (await self.connections.get())[0]

    async def close_connections(self) -> None:
        for connection in self._made:
            await connection.close()


@asynccontextmanager
async def serving(
    path: Path, settings: ListenerSettings | None = None, kind: type[Core] | None = None
) -> AsyncIterator[Core]:
    with LinkListener(path, settings or small()) as listener:
        core = (kind or Core)()
        task = asyncio.create_task(listener.serve(core.on_hello, core.on_connection))
        try:
            yield core
        finally:
            task.cancel()
            await asyncio.wait([task])
            await core.close_connections()
        if not task.cancelled():
            task.result()


@asynccontextmanager
async def attaching(
    settings: ListenerSettings | None = None, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[tuple[Core, str]]:
    """A core that workers on other hosts attach to, and its address."""
    core = Core()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    listener = RemoteListener(core.on_hello, core.on_connection, settings or small())
    add_WorkerLinkServicer_to_server(listener, server)  # type: ignore[no-untyped-call]  # generated
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield core, f"127.0.0.1:{port}"
    finally:
        await core.close_connections()
        await server.stop(grace=PATIENCE_S)


@dataclass
class Pair:
    """Both ends of a link, and the core that it was made at."""

    core: Any
    worker: Any
    listening: Core


@asynccontextmanager
async def linked(transport: str, path: Path, settings: ListenerSettings | None = None) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        if transport == "rings":
            listening = await stack.enter_async_context(serving(path, settings))
            joined = await connect(path, b"a worker")
        else:
            listening, address = await stack.enter_async_context(attaching(settings))
            joined = await connect_remote(address, b"a worker")
        stack.push_async_callback(joined.connection.close)
        assert joined.reply == b"welcome, a worker"
        yield Pair(await listening.connection(), joined.connection, listening)


class Peer:
    """A process of its own with one end of a link; see ``peer.py`` for what it says."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer.py")), *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def _output(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    async def line(self) -> str:
        """The next line that the process prints; the loop goes on meanwhile."""
        async with asyncio.timeout(PATIENCE_S):
            return (await asyncio.to_thread(self._output.readline)).rstrip("\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._output.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "link.sock"


@pytest.fixture
def descriptors() -> Callable[[], set[str]]:
    """Names this process's open descriptors.

    Look at what came since: what earlier tests left to threads of gRPC or the garbage collector may go meanwhile.
    """

    def opened() -> set[str]:
        found = set()
        for number in names_in(Path("/proc/self/fd")):
            with suppress(FileNotFoundError):  # the one through which they were read
                found.add(f"{number} {Path('/proc/self/fd', number).readlink()}")
        return found

    return opened


def names_in(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())
