"""The right to listen at a path of the file system.

A lock file beside the socket (``<path>.lock``, held with flock) says who may listen. The kernel drops the lock when its
holder ends, however it ends; the socket file, which survives a SIGKILL, is stale exactly when the lock is free, and is
then replaced. The lock file bears a mark that only its holder has: the janitor of a killed holder goes by it (see
`tercet_shared.lifecycle.sweeper`).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import stat
from typing import TYPE_CHECKING, Final, Self

from tercet_shared.errors import ConfigurationError
from tercet_shared.lifecycle.sweeper import lock_file, lock_path_of, remove_socket, turn

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)


MAX_PATH: Final = 107
"""Bytes of the longest socket path: sun_path has 108, one of them ends the string (unix(7))."""


def check_socket_path(path: Path) -> None:
    """Raises ConfigurationError if ``path`` is too long for a Unix socket."""
    length = len(os.fsencode(path))
    if length > MAX_PATH:
        raise ConfigurationError(
            f"the socket path {path} has {length} bytes; a Unix socket allows {MAX_PATH}; choose a shorter one"
        )


class SocketClaim:
    """One path, for one holder. ``take``, then bind, and ``release`` in the end; also a context manager.

    Args:
        path: the socket; its directory must exist when the claim is taken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mark = secrets.token_hex(16)
        """What stands in the lock file; known before it is taken, so that a janitor can be there first."""
        self._lock: int | None = None

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self) -> None:
        """Takes the lock and removes a stale socket.

        Raises:
            ConfigurationError: another process listens there, the path is too long or something else than a socket,
                or files cannot be made there; one sentence says which.
        """
        check_socket_path(self.path)
        path = os.fspath(self.path)
        try:
            with turn(path):
                self._lock = lock_file(lock_path_of(path), wait=False)
                os.ftruncate(self._lock, 0)
                os.write(self._lock, self.mark.encode())
            self._remove_stale()
        except BlockingIOError:
            raise ConfigurationError(f"cannot listen on {path}: another process already listens on it") from None
        except OSError as error:
            self._drop_lock()
            raise ConfigurationError(f"cannot listen on {path}: {error.strerror}") from error
        except ConfigurationError:
            self._drop_lock()
            raise

    def release(self) -> None:
        """Removes the socket and the lock file. Idempotent."""
        if self._lock is not None:
            remove_socket(os.fspath(self.path))
            self._drop_lock()

    def _drop_lock(self) -> None:
        if self._lock is not None:
            self.path.with_name(lock_path_of(self.path.name)).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def _remove_stale(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigurationError(f"{self.path} exists and is not a socket")
        if _is_alive(self.path):  # somebody who knows nothing of the lock
            raise ConfigurationError(f"cannot listen on {self.path}: another process already listens on it")
        _log.info("replacing the socket %s, which a killed process left behind", self.path)
        self.path.unlink()


def _is_alive(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            return True  # so many wait for it that no more can
        return True
