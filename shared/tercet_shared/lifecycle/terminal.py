"""The thread that owns the terminal.

A terminal can be slow, paused (Ctrl-S) or gone, and a pipe can be full; the supervisor must stop its children in time
whatever happens there. So the event loop only puts what is to be shown into a bounded queue, and one thread writes it.
Where the queue is full, lines are dropped and counted; when a stream breaks, it is silent from then on.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_shared.lifecycle.views import View

_QUEUE: Final = 10_000  # lines
_REFRESH_S: Final = 0.1


class Terminal:
    """Where a supervisor shows what happens. ``start``, then anything, then ``close``. Methods never block or raise.

    Args:
        out: where results go (standard output).
        err: where everything else goes (standard error); ``view`` writes to it.
        view: how things look.
    """

    def __init__(self, out: TextIO, err: TextIO, view: View) -> None:
        self._out = out
        self._err = err
        self._view = view
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_QUEUE)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def progress(self, name: str, stage: str, fraction: float | None) -> None:
        """Shows what a service is doing."""
        self._put(lambda: self._view.progress(name, stage, fraction))

    def ready(self, name: str) -> None:
        """Shows that a service is ready."""
        self._put(lambda: self._view.ready(name))

    def log(self, name: str, line: str) -> None:
        """Shows what a service logged."""
        self._put(lambda: self._view.line(line, name))

    def say(self, text: str) -> None:
        """Shows what the supervisor itself has to say."""
        self._put(lambda: self._view.line(text))

    def announce(self, text: str) -> None:
        """Ends the progress display and writes ``text`` to standard output."""
        self._put(self._view.finish)
        self._put(lambda: self._write_out(text))

    def close(self, timeout: float = 0.5) -> bool:
        """Writes what is left and ends the thread.

        Args:
            timeout: seconds that a stuck terminal is given.

        Returns:
            Whether the thread ended. If not, it still holds the lock of a stream, and the interpreter must not wait
            for that on its way out: leave with ``os._exit``.
        """
        self._put(self._view.finish)
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _put(self, action: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait(action)
        except queue.Full:
            self._dropped += 1

    def _run(self) -> None:
        while True:
            try:
                action = self._queue.get(timeout=_REFRESH_S)
            except queue.Empty:
                action = self._view.refresh
            if action is None:
                return
            try:
                action()
                if self._dropped and self._queue.empty():
                    dropped, self._dropped = self._dropped, 0
                    self._view.line(f"({dropped} lines could not be shown in time)")
            except (OSError, ValueError):
                _silence(self._err)

    def _write_out(self, text: str) -> None:
        try:
            self._out.write(f"{text}\n")
            self._out.flush()
        except (OSError, ValueError):
            _silence(self._out)


def _silence(stream: TextIO) -> None:
    """Points a broken stream to nowhere, also for the interpreter, which flushes it at exit."""
    try:
        target = stream.fileno()
    except (OSError, ValueError):
        return  # closed, or not a file: nothing that a flush at exit could fail on
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, target)
    os.close(null)
