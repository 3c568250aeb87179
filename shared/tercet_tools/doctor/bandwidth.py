"""How fast memory is read: what decoding is limited by.

``python -m tercet_tools.doctor.bandwidth THREADS BYTES SECONDS`` measures; in a process of its own, since the linear
algebra library must be told before it is loaded that these threads are all there are.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

_ENOUGH: Final = 512 * 1024 * 1024
"""Bytes that are read: more than caches hold, so that it is memory which is measured."""
_SECONDS: Final = 1.0
_TIMEOUT: Final = 20.0
_HUGE_PAGE: Final = 2 * 1024 * 1024


def measure(threads: int, available: int) -> float | None:
    """Returns bytes per second that ``threads`` threads read together; None where that could not be measured.

    Args:
        threads: one for each processor.
        available: bytes of memory that may be taken; an eighth of it at most is.
    """
    size = min(_ENOUGH, available // 8)
    if size < threads * 4 * _HUGE_PAGE:
        return None
    alone = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "BLIS_NUM_THREADS"), "1")
    command = [sys.executable, "-m", __name__, str(threads), str(size), str(_SECONDS)]
    try:
        done = subprocess.run(
            command, env=os.environ | alone, capture_output=True, text=True, timeout=_TIMEOUT, check=True
        )
        return float(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def read_speed(threads: int, size: int, seconds: float) -> float:
    """Reads ``size`` bytes again and again for ``seconds``; returns the bytes per second of the fastest time."""
    import numpy as np  # noqa: PLC0415  # not before the environment is set, and only in the process that measures

    def buffer() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        mapping = mmap.mmap(-1, size // threads)
        with contextlib.suppress(OSError, AttributeError):  # small pages, then
            mapping.madvise(mmap.MADV_HUGEPAGE)
        values = np.frombuffer(mapping, dtype=np.float32)
        values.fill(1.0)  # every page is there before the clock runs
        return values

    buffers = [buffer() for _ in range(threads)]
    nbytes = sum(values.nbytes for values in buffers)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        end = time.perf_counter() + seconds
        while (begin := time.perf_counter()) < end:
            # The dot product with itself reads once, in the widest loads there are, and releases the interpreter lock.
            list(pool.map(lambda values: float(np.dot(values, values)), buffers))
            best = max(best, nbytes / (time.perf_counter() - begin))
    return best


if __name__ == "__main__":
    sys.stdout.write(f"{read_speed(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))}\n")
