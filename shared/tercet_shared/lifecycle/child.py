"""Runs a program that must not outlive its parent: ``python -I -S child.py PARENT_PID PROGRAM [ARGUMENT …]``.

The supervisor starts every service through this file. It asks the kernel to kill the process when the parent's thread
ends (prctl(2), PR_SET_PDEATHSIG), and becomes the program. The request survives execve, so it need not be made between
fork and exec, where Python code is not safe in a process with threads. SIGKILL rather than SIGTERM: when the supervisor
is gone, nobody is left to watch whether a service does end.

Only the standard library is imported here, and the interpreter skips ``site``: this costs every start some
milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends.

    Args:
        parent: the parent's process id, taken by the parent itself before it forked.

    Raises:
        OSError: the kernel refused.
        SystemExit: the parent has ended already, so that no signal would come.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent:
        raise SystemExit(1)


def main(argv: list[str]) -> None:
    """Becomes the program in ``argv[1:]``, tied to the parent ``argv[0]``. Does not return."""
    die_with_parent(int(argv[0]))
    os.execv(argv[1], argv[1:])  # noqa: S606  # the point of this file


if __name__ == "__main__":
    main(sys.argv[1:])
