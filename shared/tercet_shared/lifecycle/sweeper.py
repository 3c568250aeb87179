"""Removes what another process leaves in the file system when it is killed: ``python -I -S sweeper.py WHAT …``.

    directory PATH                   a run directory, with all that is in it
    sockets PATH MARK [PATH MARK …]  sockets with their lock files, where these still bear the mark (see below)

Its standard input is a pipe whose other end that process alone holds, so that its end is the end of that process,
however it came. `tercet_shared.lifecycle.janitor` starts it and, when nothing is left to remove, kills it.

Sockets change hands: a core may be started on the paths of a killed one before this program has come to its turn. The
lock file beside a socket (``<path>.lock``) is locked by whoever may listen and bears a mark that it alone has. It
changes only within a `turn`. So what is removed here, within a turn and only under the mark of the dead, cannot be what
somebody made since. Comparing inode numbers would not do: file systems hand them out again at once.

Only the standard library is imported here, and the interpreter skips ``site``: it is there after some milliseconds,
whose length nobody waits for.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_MARK = 64
"""Bytes of the longest mark."""


def lock_path_of(path: str) -> str:
    """Returns the path of the lock file of the socket ``path``."""
    return path + ".lock"


def lock_file(path: str, *, wait: bool) -> int:
    """Makes the file if it is missing, locks it, and returns its descriptor; closing that unlocks it.

    Whoever removes such a file does so while the lock is held: then nobody holds a lock on a file without a name.

    Raises:
        BlockingIOError: it is locked, and ``wait`` is not set.
        OSError: it cannot be opened.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before us may have removed the file between our open and our lock; then we locked nothing.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):  # noqa: PTH116  # pathlib takes time to import
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


@contextmanager
def turn(path: str) -> Iterator[None]:
    """Waits until nobody else changes who holds the socket ``path``, and keeps it so. A matter of microseconds.

    Raises:
        OSError: files cannot be made there.
    """
    guard = path + ".turn"
    fd = lock_file(guard, wait=True)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(guard)  # noqa: PTH108  # pathlib takes time to import
        os.close(fd)


def remove_socket(path: str) -> None:
    """Removes the socket ``path``, if there is one; anything else stays.

    Raises:
        OSError: it cannot be removed.
    """
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)  # noqa: PTH108  # pathlib takes time to import


def sweep_socket(path: str, mark: bytes) -> None:
    """Removes a socket and its lock file if that bears the mark.

    Raises:
        OSError: they cannot be removed.
    """
    lock_path = lock_path_of(path)
    with turn(path):
        fd = os.open(lock_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.read(fd, MAX_MARK + 1) == mark:
                remove_socket(path)
                os.unlink(lock_path)  # noqa: PTH108  # pathlib takes time to import
        finally:
            os.close(fd)


def sweep_directory(path: str) -> None:
    """Removes a run directory of this user once nobody holds its lock any more; follows no link.

    Raises:
        OSError: it cannot be removed.
    """
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    if os.fstat(directory).st_uid != os.geteuid():
        return
    with suppress(FileNotFoundError):  # killed while it removed the directory itself
        lock = os.open("lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
        fcntl.flock(lock, fcntl.LOCK_EX)  # the services hold it too, and some may take a while to end
    for _, directories, files, fd in os.fwalk(".", topdown=False, dir_fd=directory):
        for name in files:
            os.unlink(name, dir_fd=fd)
        for name in directories:
            if stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=fd)
            else:
                os.rmdir(name, dir_fd=fd)
    os.rmdir(path)  # noqa: PTH106  # pathlib takes time to import


def main(argv: list[str]) -> None:
    """Waits for the end of the pipe, then removes what ``argv`` names. What cannot be removed, nobody would hear of."""
    os.read(0, 1)
    what, *names = argv
    if what == "directory":
        with suppress(OSError):
            sweep_directory(names[0])
    for path, mark in zip(names[::2], names[1::2], strict=False):
        with suppress(OSError):
            sweep_socket(path, os.fsencode(mark))


if __name__ == "__main__":
    main(sys.argv[1:])
