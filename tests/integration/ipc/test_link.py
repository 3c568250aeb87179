"""Links whose both ends are in this process: frames, streams, closing, failing. Over both transports unless it says."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tercet_shared.errors import ProtocolError
from tercet_shared.ipc.connect import connect
from tercet_shared.ipc.control import Kind, encode
from tercet_shared.ipc.errors import FrameTooLargeError, LinkClosedError
from tercet_shared.ipc.link import CloseKind, CloseReason, FrameLink, Stream

from .conftest import PATIENCE_S, Collector, Pair, linked, names_in, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@pytest.fixture(params=["rings", "grpc"])
async def pair(request: pytest.FixtureRequest, path: Path) -> AsyncIterator[Pair]:
    async with linked(request.param, path) as pair:
        yield pair


@pytest.fixture
async def ring_pair(path: Path) -> AsyncIterator[Pair]:
    async with linked("rings", path) as pair:
        yield pair


async def closed(link: FrameLink) -> CloseReason:
    async with asyncio.timeout(PATIENCE_S):
        return await link.wait_closed()


async def test_plans_masks_and_results_arrive_in_order(pair: Pair) -> None:
    plans, masks, results = Collector(), Collector(), Collector()
    pair.worker.on_frames(plans)
    pair.worker.on_frames(masks, Stream.MASKS)
    pair.core.on_frames(results)
    for number in range(100):
        pair.core.send(b"plan %d" % number)
        pair.core.send(b"mask %d" % number, Stream.MASKS)
        pair.worker.send(b"result %d" % number)
    assert await plans.until(100) == [b"plan %d" % number for number in range(100)]
    assert await masks.until(100) == [b"mask %d" % number for number in range(100)]
    assert await results.until(100) == [b"result %d" % number for number in range(100)]


async def test_a_full_ring_holds_back_and_loses_nothing(pair: Pair) -> None:
    sizes = random.Random(1)
    frames = [sizes.randbytes(sizes.choice([10, 5_000, 200_000])) for _ in range(100)]
    for frame in frames:
        pair.core.send(frame)
    assert pair.core.pending() > 90
    assert pair.core.pending(Stream.MASKS) == 0
    plans, masks = Collector(), Collector()
    pair.core.send(b"a mask does not wait for plans", Stream.MASKS)
    pair.worker.on_frames(masks, Stream.MASKS)
    assert await masks.until(1) == [b"a mask does not wait for plans"]
    pair.worker.on_frames(plans)  # a reader that starts late
    assert await plans.until(len(frames)) == frames
    assert pair.core.pending() == 0


async def test_an_oversize_frame_is_the_senders_error_and_the_link_lives_on(pair: Pair) -> None:
    with pytest.raises(FrameTooLargeError):
        pair.core.send(bytes((1 << 20) + 1))
    plans = Collector()
    pair.worker.on_frames(plans)
    pair.core.send(b"next")
    assert await plans.until(1) == [b"next"]


async def test_each_side_has_its_streams(pair: Pair) -> None:
    for wrong in (
        lambda: pair.worker.send(b"", Stream.MASKS),
        lambda: pair.worker.pending(Stream.MASKS),
        lambda: pair.core.on_frames(print, Stream.MASKS),
    ):
        with pytest.raises(ValueError, match="this side of the link"):
            wrong()


async def test_a_goodbye_reaches_the_other_side_as_text_after_the_last_frames(pair: Pair) -> None:
    results = Collector()
    pair.core.on_frames(results)
    told: asyncio.Future[CloseReason] = asyncio.get_running_loop().create_future()
    pair.core.on_closed(told.set_result)
    pair.worker.send(b"the last result")
    await pair.worker.close("out of memory: 3 GB asked, 2 GB free — größer")
    reason = await closed(pair.core)
    assert reason == CloseReason(CloseKind.GOODBYE, "out of memory: 3 GB asked, 2 GB free — größer")
    assert results.frames == [b"the last result"]
    assert await told == reason == pair.core.close_reason
    assert (await closed(pair.worker)).kind is CloseKind.LOCAL
    with pytest.raises(LinkClosedError, match="out of memory"):
        pair.core.send(b"too late")
    with pytest.raises(LinkClosedError, match="out of memory"):
        pair.core.on_frames(results)
    assert pair.core.pending() == 0


async def test_closing_is_idempotent_and_late_listeners_are_told(pair: Pair) -> None:
    await pair.core.close("first")
    await pair.core.close("second")
    told: asyncio.Future[CloseReason] = asyncio.get_running_loop().create_future()
    pair.core.on_closed(told.set_result)
    async with asyncio.timeout(PATIENCE_S):
        assert await told == CloseReason(CloseKind.LOCAL, "first")


async def test_a_long_goodbye_is_cut(pair: Pair) -> None:
    await pair.worker.close("x" * 100_000)
    reason = await closed(pair.core)
    assert reason == CloseReason(CloseKind.GOODBYE, "x" * 4096)


async def test_one_who_waits_for_the_end_can_be_cancelled_without_harm(pair: Pair) -> None:
    impatient = asyncio.create_task(pair.core.wait_closed())
    await asyncio.wait([impatient], timeout=0)
    impatient.cancel()
    await asyncio.wait([impatient])
    assert pair.core.close_reason is None
    await pair.worker.close("done")
    assert (await closed(pair.core)).text == "done"


async def test_a_frame_that_its_reader_refuses_ends_the_link_on_both_sides_with_the_reason(pair: Pair) -> None:
    def refuse(frames: list[bytes]) -> None:
        raise ProtocolError(f"{frames[0]!r} is no plan")

    pair.worker.on_frames(refuse)
    pair.core.send(b"rubbish")
    assert (await closed(pair.worker)).kind is CloseKind.PROTOCOL
    reason = await closed(pair.core)
    assert reason.kind is CloseKind.GOODBYE
    assert "b'rubbish' is no plan" in reason.text


async def test_a_bug_in_a_handler_ends_the_link_and_is_shown(pair: Pair) -> None:
    shown: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: shown.set_result(context))

    def fail(_: list[bytes]) -> None:
        raise ZeroDivisionError

    pair.worker.on_frames(fail)
    pair.core.send(b"plan")
    assert "failed" in (await closed(pair.core)).text
    async with asyncio.timeout(PATIENCE_S):
        assert isinstance((await shown)["exception"], ZeroDivisionError)


async def test_a_corrupt_ring_ends_the_link_on_both_sides(ring_pair: Pair) -> None:
    results = Collector()
    ring_pair.core.on_frames(results)
    ring = ring_pair.worker._senders[Stream.STEPS]._writer
    ring._memory.data[:16] = bytes(16)
    ring._memory.head = 32
    os.eventfd_write(ring._data[0], 32)
    reason = await closed(ring_pair.core)
    assert reason.kind is CloseKind.PROTOCOL
    assert "no valid record" in reason.text
    assert (await closed(ring_pair.worker)).text == reason.text


async def test_a_ring_found_corrupt_while_sending_ends_the_link(ring_pair: Pair) -> None:
    ring = ring_pair.core._senders[Stream.STEPS]._writer
    os.eventfd_write(ring._space[0], 1 << 40)
    for _ in range(5):
        ring_pair.core.send(bytes(11_000))
    with pytest.raises(LinkClosedError, match="consumed"):
        ring_pair.core.send(bytes(11_000))
    assert (await closed(ring_pair.core)).kind is CloseKind.PROTOCOL


@pytest.mark.parametrize(
    "nonsense",
    [b"GET / HTTP/1.1\r\n\r\n", encode(Kind.HELLO), encode(Kind.HEARTBEAT, b"x"), encode(Kind.GOODBYE, bytes(5000))],
)
async def test_nonsense_on_the_open_socket_ends_the_link(ring_pair: Pair, nonsense: bytes) -> None:
    ring_pair.worker._sock.send(nonsense)
    assert (await closed(ring_pair.core)).kind is CloseKind.PROTOCOL
    assert (await closed(ring_pair.worker)).kind is CloseKind.GOODBYE


async def test_control_messages_in_pieces_are_put_together(ring_pair: Pair) -> None:
    message = encode(Kind.HEARTBEAT) + encode(Kind.GOODBYE, b"in pieces")
    for at in range(len(message)):
        ring_pair.worker._sock.send(message[at : at + 1])
        ring_pair.core._on_readable()
    assert (await closed(ring_pair.core)) == CloseReason(CloseKind.GOODBYE, "in pieces")


async def test_a_side_that_did_not_run_does_not_blame_the_peer_for_that_time(pair: Pair) -> None:
    assert pair.core._timer is not None
    pair.core._timer.cancel()
    pair.core._last_tick -= 1000.0  # as if this process had been stopped, and the peer with it, for a long time
    pair.core._tick()
    assert pair.core.close_reason is None


async def test_only_silence_counts_and_what_waits_in_the_socket_is_heard_before_the_verdict(ring_pair: Pair) -> None:
    for _ in range(5):
        assert ring_pair.core._timer is not None
        ring_pair.core._timer.cancel()
        ring_pair.core._last_tick -= 40.0
        ring_pair.worker._write(encode(Kind.HEARTBEAT))
        ring_pair.core._tick()
        assert ring_pair.core.close_reason is None
    for _ in range(3):
        assert ring_pair.core.close_reason is None
        assert ring_pair.core._timer is not None
        ring_pair.core._timer.cancel()
        ring_pair.core._last_tick -= 40.0
        ring_pair.core._tick()
    assert (await closed(ring_pair.core)).kind is CloseKind.HEARTBEAT_LOST
    assert (await closed(ring_pair.worker)).kind is CloseKind.GOODBYE


def open_files_of_a_child() -> str:
    """What a program started now, without closing anything for it, has open."""
    script = "import os; [print(os.readlink(e)) for e in os.scandir('/proc/self/fd') if os.path.lexists(e)]"
    arguments = [sys.executable, "-c", script]
    return subprocess.run(arguments, close_fds=False, check=True, capture_output=True, text=True).stdout


async def test_a_program_that_either_side_starts_inherits_no_descriptor(ring_pair: Pair) -> None:
    shown = open_files_of_a_child()
    assert "/proc/" in shown
    for kind in ("memfd", "eventfd", "socket"):
        assert kind not in shown


def named_memory() -> list[str]:
    """Returns the shared memory with a name that this process has mapped, by whatever tests ran before, too."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]


async def test_nothing_is_left_behind(path: Path, descriptors: Callable[[], set[str]]) -> None:
    before, mapped = descriptors(), named_memory()
    for _ in range(3):
        async with serving(path) as listening:
            worker = (await connect(path, b"")).connection
            core = await listening.connection()
            core.on_frames(Collector())
            worker.on_frames(Collector())
            for _ in range(20):
                core.send(bytes(10_000))
            assert named_memory() == mapped  # memory that has no name needs no removal
            await worker.close()
            await closed(core)
        assert names_in(path.parent) == []
    assert not descriptors() - before
