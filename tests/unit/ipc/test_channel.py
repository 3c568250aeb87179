"""Rings on an event loop."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tercet_shared.ipc.channel import RingReceiver, RingSender
from tercet_shared.ipc.errors import CorruptRingError, FrameTooLargeError, LinkClosedError

from .conftest import Ring

if TYPE_CHECKING:
    from tercet_shared.errors import LinkError

MakeRing = Callable[..., Ring]


class Collector:
    """Keeps the frames it is given and lets a test wait for a number of them."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self._changed = asyncio.Event()

    def __call__(self, frames: list[bytes]) -> None:
        self.frames += frames
        self._changed.set()

    async def until(self, count: int) -> list[bytes]:
        async with asyncio.timeout(60):
            while len(self.frames) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.frames


def unexpected(error: LinkError) -> None:
    raise AssertionError(error)


def ends(ring: Ring) -> tuple[RingSender, RingReceiver, Collector]:
    """Returns both ends of a ring, of which no error is expected, and what collects."""
    return RingSender(ring.writer, unexpected), RingReceiver(ring.reader, unexpected), Collector()


def watched(fd: int) -> bool:
    """Whether the loop watches ``fd``; stops it if so."""
    return asyncio.get_running_loop().remove_reader(fd)


def mixed_frames(count: int) -> list[bytes]:
    sizes = random.Random(count)
    return [sizes.randbytes(sizes.choice([0, 20, 500, 1100, 9000])) for _ in range(count)]


async def test_frames_that_find_no_room_wait_and_arrive_in_order(make_ring: MakeRing) -> None:
    ring = make_ring()
    sender, receiver, collector = ends(ring)
    frames = mixed_frames(200)
    for frame in frames:
        sender.send(frame)
    assert sender.pending > 150
    receiver.start(collector)
    assert await collector.until(len(frames)) == frames
    assert sender.pending == 0
    # With nothing waiting, nothing is watched, so a consuming reader does not wake the sender.
    assert not any(watched(fd) for fd in ring.writer.space_doorbells)
    sender.close()
    receiver.close()


async def test_frames_sent_while_others_wait_keep_their_place(make_ring: MakeRing) -> None:
    ring = make_ring()
    sender, receiver, collector = ends(ring)
    frames = mixed_frames(300)

    def collect(received: list[bytes]) -> None:
        collector(received)
        if remaining:
            sender.send(remaining.pop(0))

    for frame in frames[:50]:
        sender.send(frame)
    remaining = frames[50:]
    receiver.start(collect)
    async with asyncio.timeout(60):
        while remaining:
            sender.send(remaining.pop(0))
            await asyncio.sleep(0)
    assert await collector.until(len(frames)) == frames
    sender.close()
    receiver.close()


async def test_a_waiting_frame_does_not_depend_on_the_callers_buffer(make_ring: MakeRing) -> None:
    ring = make_ring()
    sender, receiver, collector = ends(ring)
    buffer = bytearray(1000)
    for number in range(10):
        buffer[:] = bytes([number]) * 1000
        sender.send(buffer)
    receiver.start(collector)
    assert await collector.until(10) == [bytes([number]) * 1000 for number in range(10)]
    sender.close()
    receiver.close()


async def test_an_oversize_frame_is_refused_also_while_others_wait(make_ring: MakeRing) -> None:
    ring = make_ring(max_frame=2000)
    sender, receiver, collector = ends(ring)
    with pytest.raises(FrameTooLargeError):
        sender.send(bytes(2001))
    for _ in range(10):
        sender.send(bytes(900))
    with pytest.raises(FrameTooLargeError):
        sender.send(bytes(2001))
    receiver.start(collector)
    assert await collector.until(10) == [bytes(900)] * 10
    sender.close()
    receiver.close()


async def test_two_readers_on_one_loop_both_get_everything(make_ring: MakeRing) -> None:
    ring = make_ring(readers=2)
    sender = RingSender(ring.writer, unexpected)
    receivers = [RingReceiver(reader, unexpected) for reader in ring.readers]
    fast, slow = Collector(), Collector()
    frames = mixed_frames(100)
    receivers[0].start(fast)
    for frame in frames:
        sender.send(frame)
    await fast.until(1)
    assert sender.pending  # the other reader has not started, so the ring stays full
    receivers[1].start(slow)
    assert await fast.until(100) == frames
    assert await slow.until(100) == frames
    sender.close()
    for receiver in receivers:
        receiver.close()


async def test_closing_takes_the_doorbells_out_of_the_loop_first(make_ring: MakeRing) -> None:
    ring = make_ring()
    sender, receiver, collector = ends(ring)
    receiver.start(collector)
    for _ in range(20):
        sender.send(bytes(1000))
    # The other process's copies of the doorbells: they keep the eventfds alive, and ring, after we closed ours.
    data, space = os.dup(ring.descriptors.data[0]), os.dup(ring.descriptors.space[0])
    numbers = (ring.reader.data_doorbell, ring.descriptors.space[0])
    sender.close()
    receiver.close()
    os.eventfd_write(data, 16)
    os.eventfd_write(space, 16)
    reused = [os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(4)]
    assert set(numbers) <= set(reused)
    woken = asyncio.Event()
    asyncio.get_running_loop().add_reader(reused[-1], woken.set)
    async with asyncio.timeout(60):
        await woken.wait()
    asyncio.get_running_loop().remove_reader(reused[-1])
    assert collector.frames == []
    for fd in (data, space, *reused):
        os.close(fd)


async def test_frames_that_have_room_are_sent_from_any_thread(make_ring: MakeRing) -> None:
    ring = make_ring()
    sender, receiver, collector = ends(ring)
    receiver.start(collector)
    frames = [bytes([number]) * 100 for number in range(100)]
    for number, frame in enumerate(frames):
        if number % 3 or not await asyncio.to_thread(sender.try_send, frame):
            sender.send(frame)
        await collector.until(number + 1)
    assert collector.frames == frames
    assert await asyncio.to_thread(sender.try_send, b"there is room again")
    sender.close()
    receiver.close()


async def test_what_cannot_be_sent_at_once_is_left_to_the_loop(make_ring: MakeRing) -> None:
    ring = make_ring()
    sender, receiver, collector = ends(ring)
    assert not sender.try_send(bytes(ring.writer.max_piece + 1)), "it would be written in part"
    assert not sender.try_send(bytes(ring.writer.max_frame + 1)), "it is for `send` to say what is wrong"
    sent = []
    while sender.try_send(frame := bytes([len(sent) % 256]) * 500):
        sent.append(frame)
    assert sender.pending == 0, "nothing waits that nobody watches"
    sender.send(waits := b"w" * 500)
    assert sender.pending == 1
    assert not sender.try_send(b""), "it would overtake"
    receiver.start(collector)
    assert await collector.until(len(sent) + 1) == [*sent, waits]
    sender.close()
    assert not sender.try_send(b"late")
    receiver.close()


async def test_a_closed_channel_says_so(make_ring: MakeRing) -> None:
    ring = make_ring()
    sender, receiver = RingSender(ring.writer, unexpected), RingReceiver(ring.reader, unexpected)
    for _ in range(2):
        sender.close()
        receiver.close()
    with pytest.raises(LinkClosedError):
        sender.send(b"late")
    with pytest.raises(LinkClosedError):
        receiver.start(Collector())
    receiver.drain()


async def test_a_receiver_reports_a_corrupt_ring_once_and_stops_listening(make_ring: MakeRing) -> None:
    ring = make_ring()
    reported: asyncio.Future[LinkError] = asyncio.get_running_loop().create_future()
    receiver = RingReceiver(ring.reader, reported.set_result)
    receiver.start(Collector())
    ring.writer.try_write(b"12345")
    ring.poke(4096, bytes(16))
    async with asyncio.timeout(60):
        assert isinstance(await reported, CorruptRingError)
    assert not watched(ring.reader.data_doorbell)
    receiver.close()


async def test_a_sender_reports_a_corrupt_ring_once_and_stops_listening(make_ring: MakeRing) -> None:
    ring = make_ring()
    reported: asyncio.Future[LinkError] = asyncio.get_running_loop().create_future()
    sender = RingSender(ring.writer, reported.set_result)
    for _ in range(10):
        sender.send(bytes(1000))
    os.eventfd_write(ring.descriptors.space[0], 1 << 40)
    async with asyncio.timeout(60):
        assert isinstance(await reported, CorruptRingError)
    assert not watched(ring.writer.space_doorbells[0])
    sender.close()


async def test_a_fault_that_a_try_has_found_is_told_by_the_next_send(make_ring: MakeRing) -> None:
    ring = make_ring()
    sender = RingSender(ring.writer, unexpected)
    while sender.try_send(bytes(1000)):
        pass
    os.eventfd_write(ring.descriptors.space[0], 1 << 40)
    assert not sender.try_send(bytes(1000))
    for _ in range(2):
        with pytest.raises(CorruptRingError):
            sender.send(b"")
    sender.close()


async def test_a_receiver_can_be_started_once(make_ring: MakeRing) -> None:
    receiver = RingReceiver(make_ring().reader, unexpected)
    receiver.start(Collector())
    with pytest.raises(RuntimeError, match="started before"):
        receiver.start(Collector())
    receiver.close()
