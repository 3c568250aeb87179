"""Memory for KV blocks, taken from the system a little before the blocks are used.

Pages of the cache are taken when they are first written, so that a worker whose cache is hardly used takes little. But
the system clears a page before it gives it, two megabytes at a time, in the middle of the step that writes to it, and
in a virtual machine may first have to ask for it itself: six percent of the time to the first token were seen to go
there. The blocks that come next are known: the core gives unused ones out in ascending order.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tercet_worker.kernels.arena import HUGE_PAGE

if TYPE_CHECKING:
    from tercet_worker.attention.interface import KvStorage

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: takes the pages of a range as if they were written to; what is in them stays."""
_AHEAD = 2
"""Huge pages per layer that are taken ahead of the highest block in use."""
_NICE = 10
_PAGE = os.sysconf("SC_PAGE_SIZE")


class PagesAhead:
    """Takes the pages of a KV cache in a thread of its own, which ends with this object or where the system refuses.

    Args:
        storage: layer by layer, and run by run within a layer.
    """

    def __init__(self, storage: KvStorage) -> None:
        self._highest = -1
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        layer_bytes = storage.nbytes // storage.num_layers
        run_bytes = layer_bytes // -(-storage.num_blocks // storage.run_blocks)
        work = _Work(storage, layer_bytes, run_bytes)
        self._thread = threading.Thread(target=work.run, args=(self._wanted,), name="kv-pages", daemon=True)
        self._thread.start()
        # Also before the interpreter ends: it would end a thread that it meets then wherever that is.
        self._release = weakref.finalize(self, _end, self._wanted, self._thread)
        self.reach(0)

    def reach(self, block: int) -> None:
        """Takes note that blocks up to ``block`` are in use."""
        if block > self._highest:
            self._highest = block
            self._wanted.put(block)

    def close(self) -> None:
        """Returns when the thread has done what it was told, and has ended."""
        self._release()


def _end(wanted: queue.SimpleQueue[int | None], thread: threading.Thread) -> None:
    wanted.put(None)
    if thread is not threading.current_thread():  # whose turn it may be to collect garbage
        thread.join()


@dataclass(frozen=True, slots=True)
class _Work:
    storage: KvStorage  # kept: its pages are taken
    layer_bytes: int
    run_bytes: int  # in one layer

    def run(self, wanted: queue.SimpleQueue[int | None]) -> None:
        """Takes what ``wanted`` says, until that is None."""
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        except OSError as error:  # it may be as nice as that already, and not allowed less
            logger.debug("pages are taken with the priority of all: %s", error)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        done = 0  # bytes of every layer
        while (block := wanted.get()) is not None:
            runs = block // self.storage.run_blocks + 1
            end = min(runs * self.run_bytes + _AHEAD * HUGE_PAGE, self.layer_bytes)
            while done < end:
                part = min(HUGE_PAGE, self.layer_bytes - done)
                for layer in range(self.storage.num_layers):
                    begin = self.storage.memory.data_ptr() + layer * self.layer_bytes + done
                    page = begin // _PAGE * _PAGE
                    if libc.madvise(page, begin + part - page, _POPULATE_WRITE):
                        reason = os.strerror(ctypes.get_errno())
                        logger.debug("pages of the KV cache are taken as they are used: %s", reason)
                        return
                done += part
