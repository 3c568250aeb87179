"""Several workers that read the same rings."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tercet_shared.ipc.connect import connect
from tercet_shared.ipc.connection import LinkConnection
from tercet_shared.ipc.control import Kind, encode
from tercet_shared.ipc.errors import FrameTooLargeError, LinkClosedError, LinkRejectedError
from tercet_shared.ipc.group import GroupEnd, GroupRings, Place
from tercet_shared.ipc.layout import MAX_READERS, record_size
from tercet_shared.ipc.link import CloseKind, CloseReason, FrameLink, Stream
from tercet_shared.ipc.listener import Accepted, Rejected
from tercet_shared.ipc.settings import HeartbeatSettings

from .conftest import PATIENCE_S, Collector, Core, names_in, serving, small
from .test_handshake import dial, read_to_end

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


class GroupCore(Core):
    """Takes a hello "GROUP INDEX PLACES" for what it says."""

    def on_hello(self, hello: bytes) -> Accepted | Rejected:
        self.hellos.append(hello)
        group, index, places = hello.decode().split()
        return Accepted(self.reply, Place(group, int(index), int(places)))


@asynccontextmanager
async def listening(path: Path, heartbeat: HeartbeatSettings | None = None) -> AsyncIterator[GroupCore]:
    settings = small() if heartbeat is None else small(heartbeat)
    async with serving(path, settings, GroupCore) as core:
        assert isinstance(core, GroupCore)
        yield core


async def join(core: Core, path: Path, index: int, places: int, group: str = "g") -> tuple[FrameLink, LinkConnection]:
    """Returns the worker's end and the core's."""
    joined = await connect(path, f"{group} {index} {places}".encode())
    return joined.connection, await core.connection()


async def closed(link: FrameLink) -> CloseReason:
    async with asyncio.timeout(PATIENCE_S):
        return await link.wait_closed()


def rings_of(link: LinkConnection) -> GroupRings:
    rings = link.audience
    assert isinstance(rings, GroupRings)
    return rings


@pytest.fixture
async def core(path: Path) -> AsyncIterator[GroupCore]:
    async with listening(path) as core:
        yield core


@pytest.mark.parametrize("places", [2, 5, MAX_READERS])
async def test_a_frame_is_written_once_and_reaches_all(core: GroupCore, path: Path, places: int) -> None:
    async with AsyncExitStack() as leaving:
        plans, masks, ends = [], [], []
        for index in range(places):
            worker, end = await join(core, path, index, places)
            leaving.push_async_callback(worker.close)
            plans.append(Collector())
            masks.append(Collector())
            worker.on_frames(plans[-1])
            worker.on_frames(masks[-1], Stream.MASKS)
            ends.append(end)
        assert len({id(end.audience) for end in ends}) == 1
        frames = [os.urandom(1 + 100 * number) for number in range(20)]
        for frame in frames:
            ends[1].send(frame)
        ends[0].send(b"mask", Stream.MASKS)
        for index in range(places):
            assert await plans[index].until(20) == frames
            assert await masks[index].until(1) == [b"mask"]
        sender = ends[0]._senders[Stream.STEPS]
        assert isinstance(sender, GroupEnd)
        assert sender._sender._writer._head == sum(record_size(len(frame)) for frame in frames)


async def test_each_has_results_of_its_own(core: GroupCore, path: Path) -> None:
    pairs = [await join(core, path, index, 3) for index in range(3)]
    results = [Collector() for _ in pairs]
    for (worker, end), collector in zip(pairs, results, strict=True):
        end.on_frames(collector)
        worker.send(b"result %d" % pairs.index((worker, end)))
    for index, collector in enumerate(results):
        assert await collector.until(1) == [b"result %d" % index]
    for worker, _ in pairs:
        await worker.close()


async def test_the_slowest_holds_all_back_and_nothing_is_lost(core: GroupCore, path: Path) -> None:
    pairs = [await join(core, path, index, 3) for index in range(3)]
    quick, slow = [Collector(), Collector()], Collector()
    for (worker, _), collector in zip(pairs, quick, strict=False):
        worker.on_frames(collector)
    sizes = random.Random(2)
    frames = [sizes.randbytes(sizes.choice([10, 5_000, 200_000])) for _ in range(60)]
    core_end = pairs[0][1]
    for frame in frames:
        core_end.send(frame)
    assert core_end.pending() == pairs[2][1].pending() > 40
    assert pairs[2][1].pending(Stream.MASKS) == 0
    pairs[2][0].on_frames(slow)
    for collector in (*quick, slow):
        assert await collector.until(len(frames)) == frames
    assert core_end.pending() == 0
    with pytest.raises(FrameTooLargeError):
        core_end.send(bytes((1 << 20) + 1))
    for worker, _ in pairs:
        await worker.close()


async def test_one_that_is_gone_holds_nobody_back(core: GroupCore, path: Path) -> None:
    pairs = [await join(core, path, index, 3) for index in range(3)]
    quick = [Collector(), Collector()]
    for (worker, _), collector in zip(pairs, quick, strict=False):
        worker.on_frames(collector)
    frames = [os.urandom(20_000) for _ in range(20)]
    for frame in frames:
        pairs[0][1].send(frame)
    assert pairs[0][1].pending() > 10
    await pairs[2][0].close("enough")
    assert await closed(pairs[2][1]) == CloseReason(CloseKind.GOODBYE, "enough")
    for collector in quick:
        assert await collector.until(len(frames)) == frames
    with pytest.raises(LinkClosedError, match="enough"):
        pairs[2][1].send(b"?")
    with pytest.raises(LinkRejectedError, match="has begun to work"):
        await connect(path, b"g 2 3")
    for worker, _ in pairs[:2]:
        await worker.close()


async def test_places_that_nobody_took_do_not_count(core: GroupCore, path: Path) -> None:
    worker, end = await join(core, path, 1, 3)
    plans = Collector()
    worker.on_frames(plans)
    frames = [os.urandom(30_000) for _ in range(20)]  # far more than the ring has room for
    for frame in frames:
        end.send(frame)
    assert await plans.until(len(frames)) == frames
    with pytest.raises(LinkRejectedError, match="has begun to work"):
        await connect(path, b"g 0 3")
    await worker.close()


async def test_a_broken_ring_is_the_end_for_all(core: GroupCore, path: Path) -> None:
    pairs = [await join(core, path, index, 2) for index in range(2)]
    sender = pairs[0][1]._senders[Stream.STEPS]
    assert isinstance(sender, GroupEnd)
    pairs[1][1].send(bytes(200_000))  # it does not fit, so the doorbells are watched
    os.eventfd_write(sender._sender._writer._space[1], 1 << 40)
    for worker, end in pairs:
        reason = await closed(end)
        assert reason.kind is CloseKind.PROTOCOL
        assert "reader 1 claims to have consumed" in reason.text
        assert (await closed(worker)).text == reason.text


async def test_a_place_is_given_once_and_again_when_it_is_free(core: GroupCore, path: Path) -> None:
    first, first_end = await join(core, path, 0, 2)
    with pytest.raises(LinkRejectedError, match="place 0 of the group is taken"):
        await connect(path, b"g 0 2")
    with pytest.raises(LinkRejectedError, match="no place 2 of 3 in a group of 2"):
        await connect(path, b"g 2 3")
    other, other_end = await join(core, path, 1, 2)
    rings = rings_of(first_end)
    await first.close()
    await closed(first_end)
    again, again_end = await join(core, path, 0, 2)
    assert rings_of(again_end) is rings_of(other_end) is rings
    plans = [Collector(), Collector()]
    again.on_frames(plans[0])
    other.on_frames(plans[1])
    again_end.send(b"plan")
    for collector in plans:
        assert await collector.until(1) == [b"plan"]
    for worker in (again, other):
        await worker.close()


async def test_groups_do_not_hear_of_each_other(core: GroupCore, path: Path) -> None:
    left, left_end = await join(core, path, 0, 2, "left")
    right, right_end = await join(core, path, 0, 2, "right")
    assert left_end.audience is not right_end.audience
    heard = {"left": Collector(), "right": Collector()}
    left.on_frames(heard["left"])
    right.on_frames(heard["right"])
    left_end.send(b"to the left")
    right_end.send(b"to the right")
    assert await heard["left"].until(1) == [b"to the left"]
    assert await heard["right"].until(1) == [b"to the right"]
    for worker in (left, right):
        await worker.close()


async def test_nothing_is_left_of_a_group_however_it_ends(
    core: GroupCore, path: Path, descriptors: Callable[[], set[str]]
) -> None:
    before = descriptors()
    # Half gathered, and the last one leaves.
    worker, end = await join(core, path, 0, 3)
    await worker.close()
    await closed(end)
    assert not descriptors() - before
    # Complete, at work with frames that wait, closed by the core one by one.
    pairs = [await join(core, path, index, 3) for index in range(3)]
    for _ in range(30):
        pairs[0][1].send(bytes(10_000))
    assert pairs[0][1].pending()
    for worker, end in pairs:
        await end.close("over")
        assert (await closed(worker)).text == "over"
    assert not descriptors() - before
    # One whose handshake fails when it has its place already: a reply that is too large.
    core.reply = bytes(2 << 20)
    sock = await dial(path)
    sock.send(encode(Kind.HELLO, b"g 0 2"))
    assert await read_to_end(sock) == b""
    assert not descriptors() - before
    assert names_in(path.parent) == ["link.sock", "link.sock.lock"]


async def test_a_worker_refused_for_its_place_leaves_the_group_as_it_was(
    core: GroupCore, path: Path, descriptors: Callable[[], set[str]]
) -> None:
    worker, end = await join(core, path, 0, 2)
    before = descriptors()
    for _ in range(3):
        with pytest.raises(LinkRejectedError):
            await connect(path, b"g 0 2")
    assert not descriptors() - before
    assert end.close_reason is None
    await worker.close()


def test_a_place_lies_in_its_group() -> None:
    for index, places in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(ValueError, match="no place"):
            Place("g", index, places)
