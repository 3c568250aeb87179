"""A single-writer ring in shared memory with one doorbell pair per reader. The memory is described in ``layout``.

Nothing here waits: a full ring is ``False``, an empty one an empty list. ``channel`` puts both ends on an event loop.
An eventfd wakes one waiter per write, so each reader has a data doorbell of its own, and rings a space doorbell of its
own. The slowest live reader is the limit. Each end belongs to one thread.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, TypeAlias

from tercet_shared.ipc.errors import CorruptRingError, FrameTooLargeError, LinkClosedError
from tercet_shared.ipc.layout import (
    ALIGNMENT,
    FIRST,
    LAST,
    RECORD,
    RECORD_MARKER,
    RingMemory,
    create_ring_memory,
    record_size,
)

Frame: TypeAlias = bytes | bytearray | memoryview
"""What a sender may hand over: contiguous bytes."""

_DOORBELL_FLAGS: Final = os.EFD_CLOEXEC | os.EFD_NONBLOCK
# A frame whose record would take more than this share of the ring is fragmented, so it neither needs the ring to
# be nearly empty nor holds the readers' space back until all of it was read.
_FRAGMENT_SHARE: Final = 4


@dataclass(slots=True)
class RingDescriptors:
    """The descriptors of a ring as its creator holds them, to be handed to the ends. All are close-on-exec.

    Attributes:
        memory: the memfd; needed until both ends have mapped it.
        data: one data doorbell per reader, rung by the writer.
        space: one space doorbell per reader, rung by that reader.
    """

    memory: int
    data: tuple[int, ...]
    space: tuple[int, ...]

    def close(self) -> None:
        """Closes all of them. Only for a ring whose doorbells no end has taken over."""
        for fd in (self.memory, *self.data, *self.space):
            os.close(fd)


def create_ring(name: str, *, capacity: int, max_frame: int, readers: int = 1) -> RingDescriptors:
    """Makes an empty ring and its doorbells.

    Raises:
        ConfigurationError: a number is out of range (see ``create_ring_memory``).
        OSError: out of descriptors or memory; nothing is left behind.
    """
    opened: list[int] = [create_ring_memory(name, capacity=capacity, max_frame=max_frame, readers=readers)]
    try:
        for _ in range(2 * readers):
            opened.append(os.eventfd(0, _DOORBELL_FLAGS))  # noqa: PERF401  # what was opened must be known when one fails
    except OSError:
        for fd in opened:
            os.close(fd)
        raise
    return RingDescriptors(opened[0], tuple(opened[1 : 1 + readers]), tuple(opened[1 + readers :]))


@dataclass(slots=True)
class _Unfinished:
    """A fragmented frame of which a part still has to be written."""

    frame: memoryview
    written: int = 0


class RingWriter:
    """The writing end. Owns the mapping and the doorbells; ``close`` gives both back.

    Args:
        memory: the mapped ring.
        data: the readers' data doorbells, one per reader slot.
        space: the readers' space doorbells, in the same order.
    """

    def __init__(self, memory: RingMemory, data: tuple[int, ...], space: tuple[int, ...]) -> None:
        if not len(data) == len(space) == memory.readers:
            raise CorruptRingError(f"a ring for {memory.readers} readers came with {len(data)}+{len(space)} doorbells")
        self._memory = memory
        self._data = data
        self._space = space
        self._head = 0
        self._tails = dict.fromkeys(range(memory.readers), 0)  # live readers only
        self._largest_record = memory.capacity // _FRAGMENT_SHARE
        self._unfinished: _Unfinished | None = None
        self._closed = False

    @property
    def max_frame(self) -> int:
        """Bytes of the largest frame that the ring takes."""
        return self._memory.max_frame

    @property
    def max_piece(self) -> int:
        """Bytes of the largest frame that is written in one piece, if there is room for it."""
        return self._largest_record - RECORD.size

    @property
    def unfinished(self) -> bool:
        """Whether an accepted frame still has fragments to write: ``pump`` must be called when space appears."""
        return self._unfinished is not None

    @property
    def space_doorbells(self) -> tuple[int, ...]:
        """Descriptors that become readable when a reader that counts has consumed something."""
        return tuple(self._space[reader] for reader in self._tails)

    def try_write(self, frame: Frame) -> bool:
        """Takes ``frame`` if there is room, and rings the readers.

        Returns:
            True: the frame is accepted, and will arrive whole and in order. A frame above a quarter of the ring may be
            written only in part yet; ``unfinished`` says so, and ``pump`` goes on. False: no room; nothing was written.

        Raises:
            FrameTooLargeError: the frame is over ``max_frame``; nothing was written.
            CorruptRingError: a reader's position makes no sense; the ring is unusable.
            LinkClosedError: no reader is left, or the writer is closed.
        """
        view = memoryview(frame).cast("B")
        size = view.nbytes
        if size > self.max_frame:
            raise FrameTooLargeError(f"a frame of {size} bytes is over the ring's limit of {self.max_frame} bytes")
        if not self.pump():
            return False
        if record_size(size) <= self._largest_record:
            if not self._has_room(record_size(size)):
                return False
            self._put(view, FIRST | LAST, size)
            return True
        if not self._has_room(self._largest_record):
            return False
        # The rest outlives this call, so it must not change under us.
        self._unfinished = _Unfinished(memoryview(frame if isinstance(frame, bytes) else bytes(view)))
        self.pump()
        return True

    def pump(self) -> bool:
        """Writes what fits of an unfinished frame.

        Returns:
            True: nothing is left to write.

        Raises:
            CorruptRingError: a reader's position makes no sense.
            LinkClosedError: no reader is left, or the writer is closed.
        """
        if self._closed:
            raise LinkClosedError("the ring is closed")
        rest = self._unfinished
        if rest is None:
            return True
        frame = rest.frame
        payload = self._largest_record - RECORD.size
        while rest.written < frame.nbytes:
            part = frame[rest.written : rest.written + payload]
            if not self._has_room(record_size(part.nbytes)):
                return False
            end = rest.written + part.nbytes
            flags = (FIRST if rest.written == 0 else 0) | (LAST if end == frame.nbytes else 0)
            self._put(part, flags, frame.nbytes)
            rest.written = end
        self._unfinished = None
        return True

    def detach_reader(self, reader: int) -> None:
        """Stops counting a dead reader's tail. Its frames are lost; the caller decides whether the others may go on.

        Its space doorbell is not answered any more, so nobody must watch it.
        """
        self._tails.pop(reader, None)

    def answer_space(self) -> None:
        """Answers the space doorbells: takes note of what was consumed.

        Raises:
            CorruptRingError: a reader's position makes no sense.
        """
        for reader, tail in self._tails.items():
            consumed = _answer(self._space[reader])
            if not consumed:
                continue
            position = tail + consumed
            in_header = self._memory.tail(reader)
            if not position <= in_header <= self._head:
                raise CorruptRingError(
                    f"reader {reader} claims to have consumed {position} bytes (header: {in_header}) of {self._head}"
                )
            self._tails[reader] = position

    def _has_room(self, size: int) -> bool:
        if self._free() < size:
            self.answer_space()
        return self._free() >= size

    def _free(self) -> int:
        if not self._tails:
            raise LinkClosedError("the ring has no reader any more")
        return self._memory.capacity - self._head + min(self._tails.values())

    def _put(self, payload: memoryview, flags: int, frame_size: int) -> None:
        memory = self._memory
        data, capacity = memory.data, memory.capacity
        size = payload.nbytes
        at = self._head % capacity
        RECORD.pack_into(data, at, size, flags, RECORD_MARKER, frame_size)
        start = (at + RECORD.size) % capacity
        until_end = min(size, capacity - start)
        data[start : start + until_end] = payload[:until_end]
        data[: size - until_end] = payload[until_end:]
        published = record_size(size)
        self._head += published
        memory.head = self._head
        # Payload and header first, doorbell after: the system call orders them for the reader that answers it.
        for reader in self._tails:
            _ring(self._data[reader], published)

    def close(self) -> None:
        """Drops the mapping and closes the doorbells. Idempotent. Readers can still read what was written."""
        if self._closed:
            return
        self._closed = True
        self._unfinished = None
        self._memory.close()
        for fd in (*self._data, *self._space):
            os.close(fd)


class RingReader:
    """A reading end. Owns the mapping and its two doorbells; ``close`` gives both back.

    Args:
        memory: the mapped ring.
        data: this reader's data doorbell.
        space: this reader's space doorbell.
        index: which reader slot of the ring this is.
    """

    def __init__(self, memory: RingMemory, data: int, space: int, index: int = 0) -> None:
        if not 0 <= index < memory.readers:
            raise CorruptRingError(f"reader {index} of a ring with {memory.readers} readers")
        self._memory = memory
        self._data = data
        self._space = space
        self._index = index
        self._released = 0  # bytes that answered doorbells have released to us
        self._tail = 0
        self._parts: list[bytes] = []  # fragments of the frame being put together
        self._parts_size = 0
        self._parts_total = 0  # size of that frame
        self._closed = False

    @property
    def data_doorbell(self) -> int:
        """Descriptor that becomes readable when something was written."""
        return self._data

    def read_available(self) -> list[bytes]:
        """Answers the doorbell, takes everything released so far out of the ring, and frees its space.

        Returns:
            The frames that are complete now, in order; possibly none.

        Raises:
            CorruptRingError: what the ring holds makes no sense; it is unusable from now on.
            LinkClosedError: the reader is closed.
        """
        if self._closed:
            raise LinkClosedError("the ring is closed")
        rung = _answer(self._data)
        if not rung:
            return []
        self._released += rung
        memory = self._memory
        head = memory.head
        if not self._released <= head <= self._tail + memory.capacity:
            raise CorruptRingError(
                f"the writer claims {self._released} bytes (header: {head}) in a ring of {memory.capacity}, "
                f"of which {self._tail} are consumed"
            )
        frames: list[bytes] = []
        start = self._tail
        while self._tail < self._released:
            frame = self._take()
            if frame is not None:
                frames.append(frame)
        memory.set_tail(self._index, self._tail)
        _ring(self._space, self._tail - start)
        return frames

    def _take(self) -> bytes | None:
        """Takes one record; returns the frame that it completes, if it does."""
        data, capacity = self._memory.data, self._memory.capacity
        at = self._tail % capacity
        # One read into locals: what is checked is what is used, even if the other side keeps writing.
        size, flags, marker, frame_size = RECORD.unpack_from(data, at)
        taken = record_size(size)
        if marker != RECORD_MARKER or flags & ~(FIRST | LAST) or taken > self._released - self._tail:
            raise CorruptRingError(
                f"no valid record at position {self._tail}: length {size}, flags {flags}, marker {marker:#x}"
            )
        if frame_size > self._memory.max_frame or size > frame_size:
            raise CorruptRingError(f"a record at position {self._tail} claims {size} bytes of a frame of {frame_size}")
        start = (at + RECORD.size) % capacity
        end = start + size
        payload = bytes(data[start:end]) if end <= capacity else b"".join((data[start:], data[: end - capacity]))
        self._tail += taken
        if flags == FIRST | LAST and not self._parts_total and size == frame_size:
            return payload
        return self._assemble(payload, flags, frame_size)

    def _assemble(self, payload: bytes, flags: int, frame_size: int) -> bytes | None:
        first, last = bool(flags & FIRST), bool(flags & LAST)
        if first:
            consistent = not self._parts_total
            self._parts_total = frame_size
        else:
            consistent = self._parts_total == frame_size and frame_size > 0
        self._parts_size += len(payload)
        # Every fragment carries something, so a frame is at most as many fragments as it has bytes.
        if not consistent or not payload or last != (self._parts_size == frame_size) or self._parts_size > frame_size:
            raise CorruptRingError(
                f"a fragment does not continue its frame: {self._parts_size} of {frame_size} bytes, flags {flags}"
            )
        self._parts.append(payload)
        if not last:
            return None
        frame = b"".join(self._parts)
        self._parts.clear()
        self._parts_size = self._parts_total = 0
        return frame

    def close(self) -> None:
        """Drops the mapping and closes the doorbells. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._parts.clear()
        self._memory.close()
        os.close(self._data)
        os.close(self._space)


def _answer(doorbell: int) -> int:
    """Returns the bytes announced since the last answer; 0 if none."""
    try:
        amount = os.eventfd_read(doorbell)
    except BlockingIOError:
        return 0
    if amount % ALIGNMENT:
        raise CorruptRingError(f"a doorbell announces {amount} bytes, which is not a whole number of records")
    return amount


def _ring(doorbell: int, amount: int) -> None:
    try:
        os.eventfd_write(doorbell, amount)
    except BlockingIOError:
        # Only a peer that writes nonsense into the counter can bring it near 2^64.
        raise CorruptRingError("the counter of a doorbell is full") from None
