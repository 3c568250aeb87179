"""The one thread that touches the device: what is given to it runs in order, beside the event loop.

torch's thread pool belongs to the thread that first uses it, so loading and stepping share this one.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class DeviceThread:
    """Runs callables one after another. ``start`` it; ``stop`` ends it after what is queued.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str = "device") -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        # A daemon: a step cannot be interrupted, and the process does not wait longer than `stop` does.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queues ``work`` and returns a future of what it returns or raises. May be called from any thread."""
        future: Future[T] = Future()
        self._queue.put((future, work))
        return future

    def stop(self, timeout: float) -> bool:
        """Lets the thread end after what is queued; returns whether it did within ``timeout`` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001  # whoever holds the future gets it, as from any executor
                future.set_exception(error)
            else:
                future.set_result(result)
            # An idle thread must not keep the last result alive.
            del item, future, work


def end_process(code: int) -> None:
    """Ends the process with ``code``, also while a device thread is in the middle of a step.

    The interpreter's own way out would take such a thread down from inside native code, which aborts the process.
    """
    if any(thread.name in {"device", "results"} and thread.is_alive() for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
