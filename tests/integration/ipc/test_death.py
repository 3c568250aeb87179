"""Peers that die, stop, or are killed: real processes, real signals."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from tercet_shared.ipc.connect import connect
from tercet_shared.ipc.link import CloseKind, CloseReason, FrameLink, Stream
from tercet_shared.ipc.settings import HeartbeatSettings

from .conftest import PATIENCE_S, Collector, Peer, names_in, serving, small

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


async def closed(link: FrameLink) -> CloseReason:
    async with asyncio.timeout(PATIENCE_S):
        return await link.wait_closed()


@pytest.fixture(params=["asyncio", "uvloop"])
def peer_loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_worker_process_gets_plans_and_masks_and_its_death_is_noticed_by_eof(
    path: Path, peer_loop: str, descriptors: Callable[[], set[str]]
) -> None:
    async with serving(path) as core:
        before = descriptors()
        with Peer("worker", str(path), peer_loop) as worker:
            connection = await core.connection()
            results = Collector()
            connection.on_frames(results)
            big = bytes(range(256)) * 2000
            connection.send(b"plan")
            connection.send(big)
            assert await results.until(2) == [b"plan", big]
            connection.send(b"1", Stream.MASKS)
            assert await results.until(3) == [b"plan", big, b"mask 1"]
            worker.process.kill()
            # Heartbeats are 30 s apart here, so only EOF can be what tells.
            reason = await closed(connection)
        assert reason.kind is CloseKind.PEER_DIED
        assert "the worker is gone" in reason.text
        assert not descriptors() - before


async def test_a_core_process_that_is_killed_is_noticed_by_its_worker(path: Path, peer_loop: str) -> None:
    with Peer("core", str(path), peer_loop) as core:
        assert await core.line() == "listening"
        connection = (await connect(path, b"")).connection
        plans = Collector()
        connection.on_frames(plans)
        connection.send(b"result")
        assert await plans.until(1) == [b"result"]
        core.process.kill()
        reason = await closed(connection)
    assert reason.kind is CloseKind.PEER_DIED
    assert "the core is gone" in reason.text


async def test_a_socket_left_by_a_killed_core_is_replaced(path: Path, peer_loop: str) -> None:
    with Peer("core", str(path), peer_loop) as killed:
        assert await killed.line() == "listening"
        killed.process.kill()
        killed.process.wait()
    assert names_in(path.parent) == ["link.sock", "link.sock.lock"]
    async with serving(path) as core:
        with Peer("worker", str(path), peer_loop) as worker:
            await core.connection()
            assert await worker.line() == "joined"
    assert names_in(path.parent) == []


async def test_what_a_worker_sent_before_it_was_killed_is_read(path: Path, peer_loop: str) -> None:
    async with serving(path) as core:
        core.results = results = Collector()
        with Peer("worker", str(path), peer_loop, "500"):
            connection = await core.connection()
            assert (await closed(connection)).kind is CloseKind.PEER_DIED
    assert results.frames == [number.to_bytes(4, "little") for number in range(500)]


async def test_a_stopped_worker_is_noticed_by_its_silence_and_learns_of_it_later(path: Path, peer_loop: str) -> None:
    async with serving(path, small(HeartbeatSettings(0.2, 1.0))) as core:
        with Peer("worker", str(path), peer_loop) as worker:
            connection = await core.connection()
            assert await worker.line() == "joined"
            worker.process.send_signal(signal.SIGSTOP)
            reason = await closed(connection)
            assert reason.kind is CloseKind.HEARTBEAT_LOST
            assert "the worker has shown no life" in reason.text
            worker.process.send_signal(signal.SIGCONT)
            line = await worker.line()
            assert line.startswith("closed: goodbye: the worker has shown no life")


async def test_a_worker_that_only_sends_heartbeats_stays(path: Path, peer_loop: str) -> None:
    async with serving(path, small(HeartbeatSettings(0.05, 5.0))) as core:
        with Peer("worker", str(path), peer_loop) as worker:
            connection = await core.connection()
            assert await worker.line() == "joined"
            heard = asyncio.Event()
            beats: list[float] = []
            take = connection._take_messages

            def count() -> None:
                beats.append(asyncio.get_running_loop().time())
                take()
                if len(beats) == 10:
                    heard.set()

            connection._take_messages = count  # type: ignore[method-assign]  # an observer
            async with asyncio.timeout(PATIENCE_S):
                await heard.wait()
            assert connection.close_reason is None
            await connection.close("enough")
            assert await worker.line() == "closed: goodbye: enough"
            assert worker.process.wait() == 0
