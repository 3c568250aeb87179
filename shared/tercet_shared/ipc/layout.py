"""The memory of a ring: one memfd, a header page and the data.

All words are native (little-endian on every platform that Tercet runs on) and aligned; both ends are on one host.
One cache line (64 bytes) per writer of a word, so that ends do not contend::

    offset            size  field          written by
    0                    8  magic          creator, once: b"TERCETRG"
    8                    8  version        creator, once: 1
    16                   8  capacity       creator, once: bytes of data, a multiple of 4096
    24                   8  max_frame      creator, once: bytes of the largest frame
    32                   8  readers        creator, once: number of reader slots, 1 to 62
    64                   8  head           writer: bytes ever written (payload, record headers and padding)
    128 + 64·i           8  tail of i      reader i: bytes ever consumed
    4096          capacity  data           writer: position p lives at data[p mod capacity]

Positions count bytes since creation and never wrap in practice (2^64). The data is a sequence of records::

    0   4  length   payload bytes in this record
    4   2  flags    1 = first record of a frame, 2 = last; both = a whole frame, none = a middle fragment
    6   2  marker   0x7E4C
    8   8  frame    bytes of the whole frame, the same in all its records
    16  …  payload, then padding to the next multiple of 16

Records start at multiples of 16 and the capacity is one too, so a record header never wraps; a payload may.

**Doorbells carry positions.** The writer adds the bytes that it published to each reader's data doorbell (an eventfd,
whose counter sums); a reader adds the bytes that it consumed to its own space doorbell. An end therefore touches only
memory that a system call has already ordered before it, on every processor; ``head`` and the tails in the header
cross-check the doorbells and show the ring's state to whoever maps it.

The memfd is sealed against shrinking (the other end could otherwise be killed by SIGBUS), growing and further seals.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from contextlib import suppress
from typing import Final

from tercet_shared.errors import ConfigurationError
from tercet_shared.ipc.errors import CorruptRingError

PAGE: Final = 4096
ALIGNMENT: Final = 16
MAX_READERS: Final = (PAGE - 128) // 64
RECORD: Final = struct.Struct("=IHHQ")
RECORD_MARKER: Final = 0x7E4C
FIRST: Final = 1
LAST: Final = 2

_MAGIC: Final = b"TERCETRG"
_VERSION: Final = 1
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
# Indices of 8-byte words in the header page.
_WORD_VERSION, _WORD_CAPACITY, _WORD_MAX_FRAME, _WORD_READERS, _WORD_HEAD, _WORD_TAILS = 1, 2, 3, 4, 8, 16
_WORDS_PER_LINE: Final = 8


def record_size(payload: int) -> int:
    """Returns the bytes that a record with ``payload`` bytes takes in the ring: header, payload, padding."""
    return (RECORD.size + payload + ALIGNMENT - 1) & -ALIGNMENT


def create_ring_memory(name: str, *, capacity: int, max_frame: int, readers: int) -> int:
    """Makes a sealed, close-on-exec memfd with an empty ring in it.

    Args:
        name: shown in ``/proc/<pid>/fd`` and ``maps``; not a path, nothing appears in a file system.
        capacity: bytes of data; rounded up to whole pages.
        max_frame: bytes of the largest frame; may exceed the capacity (such frames travel in fragments).
        readers: number of readers that the ring will have.

    Returns:
        The descriptor, which the caller owns.

    Raises:
        ConfigurationError: a number is out of range.
        OSError: the system refuses the memory.
    """
    if capacity < 1 or max_frame < 1:
        raise ConfigurationError(f"a ring needs a positive capacity and frame limit, not {capacity} and {max_frame}")
    if not 1 <= readers <= MAX_READERS:
        raise ConfigurationError(f"a ring has 1 to {MAX_READERS} readers, not {readers}")
    capacity = (capacity + PAGE - 1) & -PAGE
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, PAGE + capacity)
        os.pwrite(fd, _MAGIC + struct.pack("=4Q", _VERSION, capacity, max_frame, readers), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


class RingMemory:
    """A mapped and validated ring. Does not own the descriptor it was mapped from; ``close`` drops the mapping.

    Attributes:
        capacity: bytes of data.
        max_frame: bytes of the largest frame.
        readers: number of reader slots.
        data: the data area, ``uint8[capacity]``.
    """

    __slots__ = ("_map", "_view", "_words", "capacity", "data", "max_frame", "readers")

    def __init__(self, fd: int) -> None:
        """Maps the ring in ``fd``.

        Raises:
            CorruptRingError: the descriptor is not a sealed memfd with a ring of this version in it.
        """
        size = _sealed_size(fd)
        # The mapping keeps a descriptor of its own (close-on-exec), so the caller may close fd at once.
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._view = memoryview(self._map)
        # Words through a native view: each load and store is one machine word. Struct codes with a byte order go
        # byte by byte.
        self._words = self._view[:PAGE].cast("Q")
        self.data = self._view[PAGE:]
        self.capacity = self._words[_WORD_CAPACITY]
        self.max_frame = self._words[_WORD_MAX_FRAME]
        self.readers = self._words[_WORD_READERS]
        try:
            self._check(size)
        except CorruptRingError:
            self.close()
            raise

    def _check(self, size: int) -> None:
        if self._map[: len(_MAGIC)] != _MAGIC:
            raise CorruptRingError("the shared memory does not hold a ring")
        version = self._words[_WORD_VERSION]
        if version != _VERSION:
            raise CorruptRingError(f"the ring has layout version {version}; this process speaks {_VERSION}")
        if self.capacity % PAGE or self.capacity != size - PAGE:
            raise CorruptRingError(f"the ring claims {self.capacity} bytes of data in {size} bytes of memory")
        if self.max_frame < 1 or not 1 <= self.readers <= MAX_READERS:
            raise CorruptRingError(f"the ring claims {self.readers} readers and frames of {self.max_frame} bytes")

    @property
    def head(self) -> int:
        """Bytes ever written, as the writer published them."""
        return self._words[_WORD_HEAD]

    @head.setter
    def head(self, position: int) -> None:
        self._words[_WORD_HEAD] = position

    def tail(self, reader: int) -> int:
        """Returns the bytes ever consumed by ``reader``, as it published them."""
        return self._words[_WORD_TAILS + _WORDS_PER_LINE * reader]

    def set_tail(self, reader: int, position: int) -> None:
        """Publishes the bytes ever consumed by ``reader``. Only that reader calls this."""
        self._words[_WORD_TAILS + _WORDS_PER_LINE * reader] = position

    def close(self) -> None:
        """Drops the mapping. Idempotent; the views are unusable afterwards."""
        self.data.release()
        self._words.release()
        self._view.release()
        self._map.close()


def _sealed_size(fd: int) -> int:
    seals = 0
    with suppress(OSError):  # not a memfd at all: the same finding as one without seals
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if seals & _SEALS != _SEALS:
        raise CorruptRingError("the descriptor of a ring is not a memfd sealed against shrinking and growing")
    size = os.fstat(fd).st_size
    if size < 2 * PAGE:
        raise CorruptRingError(f"the shared memory of a ring has only {size} bytes")
    return size
