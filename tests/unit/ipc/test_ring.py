"""The ring as its two ends see it, without an event loop."""

from __future__ import annotations

import fcntl
import os
import random
import select
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_shared.errors import ConfigurationError
from tercet_shared.ipc.errors import FrameTooLargeError, LinkClosedError
from tercet_shared.ipc.layout import RingMemory, record_size
from tercet_shared.ipc.ring import RingReader, RingWriter, create_ring

from .conftest import CAPACITY, Ring, open_descriptors, open_ring

MakeRing = Callable[..., Ring]


def frame(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1007, 1008])
def test_a_frame_arrives_as_it_was_written(make_ring: MakeRing, size: int) -> None:
    ring = make_ring()
    assert ring.writer.try_write(frame(1, size))
    assert ring.reader.read_available() == [frame(1, size)]
    assert ring.reader.read_available() == []


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_contiguous_buffer_can_be_written(make_ring: MakeRing, kind: Callable[[bytes], bytes]) -> None:
    ring = make_ring()
    assert ring.writer.try_write(kind(frame(1, 3000)))
    assert ring.writer.try_write(kind(b"short"))
    assert ring.reader.read_available() == [frame(1, 3000), b"short"]


def test_frames_wrap_around_at_every_alignment(make_ring: MakeRing) -> None:
    ring = make_ring()
    # 81 records of 400 bytes and 64 of 1,008 visit every 16-byte position of the ring, split payloads included.
    for number in range(600):
        size = 380 if number % 3 else 991
        assert ring.writer.try_write(frame(number, size))
        assert ring.reader.read_available() == [frame(number, size)]
    assert ring.memory.head > 20 * CAPACITY


def test_a_full_ring_refuses_and_loses_nothing(make_ring: MakeRing) -> None:
    ring = make_ring()
    accepted = 0
    while ring.writer.try_write(frame(accepted, 500)):
        accepted += 1
    assert accepted == CAPACITY // record_size(500)
    assert not ring.writer.try_write(frame(accepted, 500))
    assert ring.reader.read_available() == [frame(number, 500) for number in range(accepted)]
    assert ring.writer.try_write(b"now there is room")
    assert ring.reader.read_available() == [b"now there is room"]


def test_a_frame_can_fill_the_ring_to_the_last_byte(make_ring: MakeRing) -> None:
    ring = make_ring()
    for number in range(4):
        assert ring.writer.try_write(frame(number, CAPACITY // 4 - 16))
    assert not ring.writer.try_write(b"")
    assert len(ring.reader.read_available()) == 4


def test_a_reader_that_starts_late_misses_nothing() -> None:
    descriptors = create_ring("late", capacity=CAPACITY, max_frame=CAPACITY)
    writer = RingWriter(RingMemory(descriptors.memory), descriptors.data, descriptors.space)
    assert writer.try_write(b"first")
    assert writer.try_write(b"second")
    data, space = os.dup(descriptors.data[0]), os.dup(descriptors.space[0])
    reader = RingReader(RingMemory(descriptors.memory), data, space)
    os.close(descriptors.memory)
    writer.close()  # and what was written outlives the writer
    assert reader.read_available() == [b"first", b"second"]
    reader.close()


def test_a_frame_above_a_quarter_travels_in_fragments_between_others(make_ring: MakeRing) -> None:
    ring = make_ring()
    big = frame(7, 5 * CAPACITY + 3)
    assert ring.writer.try_write(b"before")
    assert ring.writer.try_write(big)
    assert ring.writer.unfinished
    assert not ring.writer.try_write(b"after")  # nothing may overtake or cut into it
    received = ring.reader.read_available()
    for _ in range(10):
        if ring.writer.pump():
            break
        received += ring.reader.read_available()
    assert ring.writer.try_write(b"after")
    assert received + ring.reader.read_available() == [b"before", big, b"after"]
    assert not ring.writer.unfinished


def test_the_rest_of_a_fragmented_frame_does_not_depend_on_the_callers_buffer(make_ring: MakeRing) -> None:
    ring = make_ring()
    buffer = bytearray(frame(7, 2 * CAPACITY))
    assert ring.writer.try_write(buffer)
    buffer[:] = bytes(len(buffer))
    received = ring.reader.read_available()
    while not ring.writer.pump():
        received += ring.reader.read_available()
    assert received + ring.reader.read_available() == [frame(7, 2 * CAPACITY)]


def test_a_big_frame_is_refused_whole_when_not_even_a_fragment_fits(make_ring: MakeRing) -> None:
    ring = make_ring()
    while ring.writer.try_write(frame(0, 700)):
        pass
    head = ring.memory.head
    assert not ring.writer.try_write(frame(1, 2000))
    assert not ring.writer.unfinished
    assert ring.memory.head == head


def test_a_frame_over_the_limit_is_the_senders_error_and_harms_nothing(make_ring: MakeRing) -> None:
    ring = make_ring(max_frame=5000)
    with pytest.raises(FrameTooLargeError, match="5001 bytes is over the ring's limit of 5000"):
        ring.writer.try_write(bytes(5001))
    assert ring.memory.head == 0
    assert ring.writer.try_write(frame(1, 5000))
    received = ring.reader.read_available()
    assert ring.writer.pump()
    assert received + ring.reader.read_available() == [frame(1, 5000)]


def test_each_reader_has_doorbells_of_its_own(make_ring: MakeRing) -> None:
    ring = make_ring(readers=2)
    first, second = ring.readers
    ring.writer.try_write(b"to both")
    assert readable(first.data_doorbell)
    assert readable(second.data_doorbell)
    assert first.read_available() == [b"to both"]
    assert not readable(first.data_doorbell)
    assert readable(second.data_doorbell)
    assert [readable(fd) for fd in ring.writer.space_doorbells] == [True, False]
    assert second.read_available() == [b"to both"]
    assert [readable(fd) for fd in ring.writer.space_doorbells] == [True, True]


def test_the_slowest_live_reader_is_the_limit(make_ring: MakeRing) -> None:
    ring = make_ring(readers=2)
    fast, slow = ring.readers
    for number in range(4):
        assert ring.writer.try_write(frame(number, 1000))
    fast.read_available()
    assert not ring.writer.try_write(b"more")
    assert len(slow.read_available()) == 4
    assert ring.writer.try_write(b"more")
    assert fast.read_available() == slow.read_available() == [b"more"]


def test_a_detached_reader_no_longer_holds_the_others_back(make_ring: MakeRing) -> None:
    ring = make_ring(readers=2)
    while ring.writer.try_write(frame(0, 1000)):
        pass
    ring.readers[0].read_available()
    ring.writer.detach_reader(1)
    assert ring.writer.try_write(b"on")
    assert ring.readers[0].read_available() == [b"on"]
    ring.writer.detach_reader(0)
    with pytest.raises(LinkClosedError, match="no reader"):
        ring.writer.try_write(b"to nobody")


@settings(deadline=None, max_examples=150)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 300), st.integers(900, 1100), st.integers(0, 3 * CAPACITY)), max_size=40),
    turns=st.lists(st.sampled_from(["write", "read 0", "read 1"]), max_size=200),
)
def test_any_interleaving_delivers_the_identical_sequence_to_every_reader(sizes: list[int], turns: list[str]) -> None:
    with open_ring(max_frame=3 * CAPACITY, readers=2) as ring:
        check_interleaving(ring, sizes, turns)


def check_interleaving(ring: Ring, sizes: list[int], turns: list[str]) -> None:
    writer, readers = ring.writer, ring.readers
    frames = [frame(number, size) for number, size in enumerate(sizes)]
    waiting = deque(frames)
    received: list[list[bytes]] = [[], []]

    def turn(what: str) -> None:
        if what == "write":
            if writer.pump() and waiting and writer.try_write(waiting[0]):
                waiting.popleft()
        else:
            reader = int(what[-1])
            received[reader] += readers[reader].read_available()

    for what in turns:
        turn(what)
    # Whatever happened before, fair turns from here on deliver everything: 40 frames of at most 13 fragments each.
    for _ in range(40 * 13 + 2):
        for what in ("write", "read 0", "read 1"):
            turn(what)
    assert not waiting
    assert not writer.unfinished
    assert received == [frames, frames]


def test_the_memory_is_sealed_and_no_descriptor_survives_exec(make_ring: MakeRing) -> None:
    ring = make_ring()
    memory = ring.descriptors.memory
    for size in (4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(memory, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    for fd in (memory, *ring.descriptors.data, *ring.descriptors.space):
        assert not os.get_inheritable(fd)


def test_closing_is_idempotent_and_final(make_ring: MakeRing) -> None:
    before = open_descriptors()
    descriptors = create_ring("closing", capacity=CAPACITY, max_frame=CAPACITY, readers=3)
    writer = RingWriter(RingMemory(descriptors.memory), descriptors.data, descriptors.space)
    os.close(descriptors.memory)
    for _ in range(2):
        writer.close()
    assert open_descriptors() <= before
    with pytest.raises(LinkClosedError):
        writer.try_write(b"")
    ring = make_ring()
    for _ in range(2):
        ring.reader.close()
    with pytest.raises(LinkClosedError):
        ring.reader.read_available()


@pytest.mark.parametrize(
    ("capacity", "max_frame", "readers"), [(0, 1, 1), (4096, 0, 1), (4096, 1, 0), (4096, 1, 63), (-1, 1, 1)]
)
def test_impossible_sizes_are_refused(capacity: int, max_frame: int, readers: int) -> None:
    before = open_descriptors()
    with pytest.raises(ConfigurationError):
        create_ring("impossible", capacity=capacity, max_frame=max_frame, readers=readers)
    assert open_descriptors() <= before
