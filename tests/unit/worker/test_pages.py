"""Pages of the KV cache are taken before they are written, and no more than come next."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

import pytest
import torch

from tercet_worker.attention.interface import KvStorage
from tercet_worker.attention.pages import PagesAhead
from tercet_worker.kernels.arena import HUGE_PAGE, Arena

LAYERS = 3
BLOCKS = 100
BLOCK_BYTES = 128 * 1024  # in a layer: 16 blocks are a huge page


def resident(memory: torch.Tensor) -> list[bool]:
    """Returns of every page whether it is in memory."""
    pages = -(-len(memory) // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(len(memory)), states) == 0
    return [bool(state & 1) for state in states]


def layers_resident(storage: KvStorage, blocks: int) -> bool:
    """Returns whether the first blocks of all layers are in memory."""
    layers = storage.memory.view(LAYERS, BLOCKS * BLOCK_BYTES)
    return all(all(resident(layer[: blocks * BLOCK_BYTES])) for layer in layers)


@pytest.fixture
def storage() -> KvStorage:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(23)  # MADV_POPULATE_WRITE
        except OSError:
            pytest.skip("this system takes no pages ahead of their use: Linux before 5.14")
    arena = Arena(LAYERS * BLOCKS * BLOCK_BYTES)
    return KvStorage(arena.memory, LAYERS, BLOCKS, arena.huge_pages_requested)


def test_what_comes_next_is_taken_and_the_rest_is_not(storage: KvStorage) -> None:
    storage.memory[5] = 7
    pages = PagesAhead(storage)
    pages.close()
    assert layers_resident(storage, 32)
    last = storage.memory[-(BLOCKS - 50) * BLOCK_BYTES :]
    assert not any(resident(last[HUGE_PAGE:]))
    assert storage.memory[5] == 7, "what is in them stays"


def test_it_goes_on_as_blocks_are_used(storage: KvStorage) -> None:
    pages = PagesAhead(storage)
    pages.reach(40)
    pages.reach(20)
    pages.close()
    assert layers_resident(storage, 64)
    pages = PagesAhead(storage)
    pages.reach(BLOCKS - 1)
    pages.close()
    assert all(resident(storage.memory))


def test_whole_runs_of_blocks_are_taken(storage: KvStorage) -> None:
    pages = PagesAhead(replace(storage, run_blocks=BLOCKS, parts=2))
    pages.close()
    assert all(resident(storage.memory)), "the first block has parts everywhere"


def test_a_block_is_in_every_part_of_its_run() -> None:
    memory = torch.zeros(LAYERS * 3 * 4 * 2 * 8, dtype=torch.uint8)  # three runs of two blocks, of which five count
    storage = KvStorage(memory, LAYERS, 5, huge_pages=False, run_blocks=2, parts=4)
    for block in range(5):
        storage.block(block).add_(block + 1)
    counts = torch.bincount(memory.long(), minlength=6).tolist()
    assert counts == [LAYERS * 4 * 8] * 6
    assert memory.view(LAYERS, 3, 4, 2, 8)[:, 2, :, 1].eq(0).all()


def test_the_thread_ends_with_its_owner(storage: KvStorage) -> None:
    pages = PagesAhead(storage)
    thread = pages._thread
    del pages
    thread.join(60)
    assert not thread.is_alive()
