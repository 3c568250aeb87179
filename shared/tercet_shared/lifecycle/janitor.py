"""Sees to it that a process which is killed leaves nothing in the file system: another, tiny one tidies up after it.

The janitor runs `tercet_shared.lifecycle.sweeper` in a session of its own, out of reach of the terminal and of signals
to its owner's process group, and with the signals blocked that ask a whole control group to end. It holds nothing of
its owner but the reading end of a pipe; the writing end is the owner's alone, and the kernel closes it however the
owner ends. An owner that ends properly removes its files itself.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tercet_shared.lifecycle import sweeper

if TYPE_CHECKING:
    from collections.abc import Iterable

_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

logger = logging.getLogger(__name__)


class Janitor:
    """From `start` on, the end of this process is the removal of what was named; also a context manager.

    `dismiss` it when the files are gone. Where no janitor can be started all goes on without one.
    """

    def __init__(self, *order: str) -> None:
        self._order = order
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()

    @classmethod
    def of_directory(cls, path: Path) -> Self:
        """Returns one for a run directory."""
        return cls("directory", str(path.absolute()))

    @classmethod
    def of_sockets(cls, sockets: Iterable[tuple[Path, str]]) -> Self:
        """Returns one for sockets, each with the mark in its lock file (see `tercet_shared.ipc.claim`)."""
        return cls("sockets", *(word for path, mark in sockets for word in (str(path.absolute()), mark)))

    @property
    def pid(self) -> int | None:
        """Its process id, while it runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts it; a matter of half a millisecond."""
        reading, self._pipe = os.pipe()  # close-on-exec, both
        # Blocked signals stay blocked in a program that is executed: so it is deaf from its first instruction on.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF_TO)
        try:
            self._process = subprocess.Popen(
                (sys.executable, "-I", "-S", str(Path(sweeper.__file__)), *self._order),
                stdin=reading,
                stdout=subprocess.DEVNULL,  # whoever reads the owner's output waits for its end
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            logger.debug("no janitor can be started, so a SIGKILL would leave files behind: %s", error)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(reading)

    def dismiss(self) -> None:
        """Ends it, because there is nothing left for it to do, and waits for its end. Idempotent."""
        if self._process is not None:
            # Killed rather than told: that works at any moment, while it still starts and when somebody has stopped
            # it. Before the pipe ends, which would wake it.
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
