"""What an end does with memory and doorbells that no correct peer writes: a clear error, at once."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_shared.ipc.errors import CorruptRingError
from tercet_shared.ipc.layout import RingMemory, create_ring_memory
from tercet_shared.ipc.ring import RingReader, RingWriter

from .conftest import CAPACITY, Ring, open_descriptors, open_ring

MakeRing = Callable[..., Ring]

DATA = 4096
HEAD = 64
TAIL = 128


def word(value: int) -> bytes:
    return struct.pack("=Q", value)


def record(length: int, flags: int, frame: int, marker: int = 0x7E4C) -> bytes:
    return struct.pack("=IHHQ", length, flags, marker, frame)


@pytest.mark.parametrize(
    ("offset", "data", "complaint"),
    [
        (0, b"NOTARING", "does not hold a ring"),
        (8, word(2), "layout version 2"),
        (16, word(1 << 40), "claims 1099511627776 bytes of data"),
        (16, word(100), "claims 100 bytes of data"),
        (24, word(0), "frames of 0 bytes"),
        (32, word(0), "claims 0 readers"),
        (32, word(1000), "claims 1000 readers"),
    ],
)
def test_a_header_that_makes_no_sense_is_not_mapped(offset: int, data: bytes, complaint: str) -> None:
    before = open_descriptors()
    memory = create_ring_memory("corrupt", capacity=CAPACITY, max_frame=CAPACITY, readers=1)
    os.pwrite(memory, data, offset)
    with pytest.raises(CorruptRingError, match=complaint):
        RingMemory(memory)
    os.close(memory)
    assert open_descriptors() <= before


def test_memory_that_could_shrink_under_us_is_not_mapped() -> None:
    memory = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 8192)
    with pytest.raises(CorruptRingError, match="sealed"):
        RingMemory(memory)
    os.close(memory)
    doorbell = os.eventfd(0, os.EFD_CLOEXEC)
    with pytest.raises(CorruptRingError, match="sealed"):
        RingMemory(doorbell)
    os.close(doorbell)


@pytest.mark.parametrize(
    ("offset", "data", "complaint"),
    [
        (DATA, record(5, 3, 5, marker=0), "no valid record"),
        (DATA, record(5, 8, 5), "no valid record"),
        (DATA, record(0xFFFFFFFF, 3, 0xFFFFFFFF), "no valid record"),
        (DATA, record(17, 3, 17), "no valid record"),  # longer than what was released
        (DATA, record(5, 3, 1 << 60), "of a frame of"),
        (DATA, record(5, 3, 4), "of a frame of 4"),
        (DATA, record(5, 3, 6), "does not continue"),
        (DATA, record(5, 0, 5), "does not continue"),
        (DATA, record(5, 2, 5), "does not continue"),
        (DATA, record(5, 1, 5), "does not continue"),
        (DATA, record(0, 1, 9), "does not continue"),
        (HEAD, word(0), "the writer claims 32 bytes"),
        (HEAD, word(CAPACITY + 16), "the writer claims"),
    ],
)
def test_a_reader_refuses_records_and_positions_that_make_no_sense(
    make_ring: MakeRing, offset: int, data: bytes, complaint: str
) -> None:
    ring = make_ring()
    ring.writer.try_write(b"12345")
    ring.poke(offset, data)
    with pytest.raises(CorruptRingError, match=complaint):
        ring.reader.read_available()


def test_a_frame_within_a_fragmented_frame_is_refused(make_ring: MakeRing) -> None:
    ring = make_ring()
    ring.writer.try_write(bytes(1500))  # a record of 1024 bytes and one of the rest
    ring.poke(DATA + 1024, record(492, 3, 492))
    with pytest.raises(CorruptRingError, match="does not continue"):
        ring.reader.read_available()


@pytest.mark.parametrize("amount", [8, 48, CAPACITY + 16, 1 << 63])
def test_a_reader_refuses_a_doorbell_that_announces_what_was_not_written(make_ring: MakeRing, amount: int) -> None:
    ring = make_ring()
    ring.writer.try_write(b"12345")
    os.eventfd_write(ring.descriptors.data[0], amount)
    with pytest.raises(CorruptRingError, match=r"announces|claims"):
        ring.reader.read_available()


@pytest.mark.parametrize(("tail", "amount"), [(0, 1008), (1 << 40, 1008), (1 << 40, 1 << 40), (0, 24)])
def test_a_writer_refuses_a_reader_that_consumed_what_it_cannot_have(
    make_ring: MakeRing, tail: int, amount: int
) -> None:
    ring = make_ring()
    while ring.writer.try_write(bytes(990)):
        pass
    ring.poke(TAIL, word(tail))
    os.eventfd_write(ring.descriptors.space[0], amount)
    with pytest.raises(CorruptRingError, match=r"claims|announces"):
        ring.writer.try_write(bytes(990))


def test_a_doorbell_that_a_peer_filled_up_does_not_block_the_writer(make_ring: MakeRing) -> None:
    ring = make_ring()
    os.eventfd_write(ring.descriptors.data[0], (1 << 64) - 2)
    with pytest.raises(CorruptRingError, match="full"):
        ring.writer.try_write(b"12345")


def test_ends_that_do_not_fit_the_ring_are_refused(make_ring: MakeRing) -> None:
    ring = make_ring()
    memory = RingMemory(ring.descriptors.memory)
    with pytest.raises(CorruptRingError, match="reader 1 of a ring with 1"):
        RingReader(memory, -1, -1, 1)
    with pytest.raises(CorruptRingError, match=r"2\+1 doorbells"):
        RingWriter(memory, (1, 2), (3,))
    memory.close()


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 1 << 32), wounds=st.integers(1, 200))
def test_random_damage_ends_in_frames_or_an_error_never_in_a_crash_or_a_loop(seed: int, wounds: int) -> None:
    damage = random.Random(seed)
    with open_ring() as ring:
        for size in (10, 1500, 0, 700):
            ring.writer.try_write(bytes(size))
        for _ in range(wounds):
            ring.poke(damage.randrange(64, DATA + CAPACITY), damage.randbytes(1))
        try:
            frames = ring.reader.read_available()
        except CorruptRingError:
            return
        assert [len(frame) for frame in frames] == [10, 1500, 0, 700]
