"""Rings and helpers for their tests; every async test runs on asyncio's own loop and on uvloop."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvloop

from tercet_shared.ipc.layout import RingMemory
from tercet_shared.ipc.ring import RingDescriptors, RingReader, RingWriter, create_ring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

CAPACITY = 4096


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


@dataclass
class Ring:
    """A ring with all its ends, and the memory mapped once more, as an observer (or vandal) sees it."""

    descriptors: RingDescriptors
    writer: RingWriter
    readers: list[RingReader]
    memory: RingMemory

    @property
    def reader(self) -> RingReader:
        return self.readers[0]

    def poke(self, offset: int, data: bytes) -> None:
        """Overwrites bytes of the shared memory: the header is at 0, the data at 4096."""
        os.pwrite(self.descriptors.memory, data, offset)


def open_descriptors() -> set[str]:
    """Returns the descriptors of memory and doorbells, and no others, which may come and go meanwhile."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if entry.readlink().as_posix().startswith(("/memfd:", "anon_inode:[eventfd]")):
                found.add(entry.name)
    return found


@contextmanager
def open_ring(capacity: int = CAPACITY, max_frame: int = 1 << 20, readers: int = 1) -> Iterator[Ring]:
    with ExitStack() as stack:
        descriptors = create_ring("test-ring", capacity=capacity, max_frame=max_frame, readers=readers)
        stack.callback(os.close, descriptors.memory)
        writer = RingWriter(RingMemory(descriptors.memory), descriptors.data, descriptors.space)
        stack.callback(writer.close)
        # In one process both ends would own the same doorbell numbers, so readers get duplicates, as if passed.
        ends = []
        for index in range(readers):
            data, space = os.dup(descriptors.data[index]), os.dup(descriptors.space[index])
            ends.append(RingReader(RingMemory(descriptors.memory), data, space, index))
            stack.callback(ends[-1].close)
        memory = RingMemory(descriptors.memory)
        stack.callback(memory.close)
        yield Ring(descriptors, writer, ends, memory)


@pytest.fixture
def make_ring() -> Iterator[Callable[..., Ring]]:
    with ExitStack() as stack:
        yield lambda **sizes: stack.enter_context(open_ring(**sizes))
