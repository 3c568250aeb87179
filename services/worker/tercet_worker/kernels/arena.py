"""One anonymous mapping for memory that is streamed in every step: on 2 MiB pages where the system grants them.

On 4 KiB pages the same stream runs at half the speed: every page costs a walk of the page tables and ends the
prefetcher's run.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

HUGE_PAGE = 2 * 1024 * 1024


class Arena:
    """Zeroed memory, aligned to 2 MiB.

    Pages are taken from the system at first touch, and given back when the last view is gone.

    Args:
        nbytes: usable size in bytes, above 0.

    Raises:
        OSError: the address space cannot be had.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.huge_pages_requested = _ask_for_huge_pages(mapping)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        self._mapping = mapping
        self._start = -whole.data_ptr() % HUGE_PAGE
        self.memory = whole[self._start : self._start + nbytes]
        """uint8[nbytes]; it and every view of it keep the mapping alive."""

    def give_back(self, begin: int) -> None:
        """Returns what lies behind byte ``begin`` to the system, in whole huge pages, where that can be; it is lost."""
        first = -(-begin // HUGE_PAGE) * HUGE_PAGE
        if first >= self.nbytes or not hasattr(mmap, "MADV_DONTNEED"):
            return
        with suppress(OSError):  # of a process whose memory is locked
            self._mapping.madvise(mmap.MADV_DONTNEED, self._start + first, self.nbytes - first)


def _ask_for_huge_pages(mapping: mmap.mmap) -> bool:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without transparent huge pages: 4 KiB pages it is
        return False
    return True
