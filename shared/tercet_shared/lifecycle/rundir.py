"""The private directory in which one `tercet serve` keeps its sockets.

It is made under ``--run-dir``, else ``$XDG_RUNTIME_DIR``, else the temporary directory, with mode 0700 and a name that
nobody can guess, and removed at the end. A supervisor that is killed with SIGKILL cannot do that; its janitor does.
Each directory holds a lock file, locked by the supervisor and all its services; the kernel unlocks it when the last of
them has ended, however they did, and only then the janitor removes what they can no longer use. Should it be killed too
(with a whole container or control group), the next start removes the directories of this user whose lock is free.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from tercet_shared.errors import ConfigurationError
from tercet_shared.lifecycle.janitor import Janitor
from tercet_shared.lifecycle.plan import socket_paths

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

MAX_SOCKET_PATH: Final = 107
"""Bytes of the longest path of a Unix socket: ``sun_path`` has 108, one of which ends the string (unix(7))."""

_PREFIX: Final = "tercet-"
_UNFINISHED: Final = ".tercet-"
_LOCK: Final = "lock"
_RANDOM: Final = "x" * 8  # as long as what mkdtemp appends

logger = logging.getLogger(__name__)


class RunDirectory:
    """A context manager: makes the directory, and removes it with all that is in it.

    Args:
        base: the directory to make it in; it must be one that `base_directory` returned.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._path: Path | None = None
        self._lock: int | None = None
        self._janitor: Janitor | None = None

    @property
    def path(self) -> Path:
        """The directory, while the context is open."""
        if self._path is None:
            raise RuntimeError("the run directory is not open")
        return self._path

    @property
    def lock(self) -> int:
        """The descriptor of the lock file, while the context is open: whoever holds it keeps the directory."""
        if self._lock is None:
            raise RuntimeError("the run directory is not open")
        return self._lock

    def __enter__(self) -> Self:
        """Removes what earlier runs left, then makes the directory.

        Raises:
            ConfigurationError: it cannot be made.
        """
        remove_stale(self._base)
        try:
            unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self._base))  # mode 0700
            try:
                self._lock = os.open(unfinished / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Only a locked directory gets the name that others look for: nobody can take a fresh one for stale.
                self._path = unfinished.rename(self._base / (_PREFIX + unfinished.name.removeprefix(_UNFINISHED)))
            except BaseException:
                self._unlock()
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
        except OSError as error:
            raise ConfigurationError(f"No run directory can be made in {self._base}: {error.strerror}.") from error
        self._janitor = Janitor.of_directory(self._path)
        self._janitor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Removes the directory. Does not raise for what cannot be removed: it is logged."""
        path, self._path = self._path, None
        if path is not None:
            _remove(path)
        self._unlock()
        if self._janitor is not None:
            self._janitor.dismiss()
            self._janitor = None

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def base_directory(chosen: Path | None, environ: Mapping[str, str]) -> Path:
    """Returns the directory in which run directories are made.

    Args:
        chosen: the user's ``--run-dir``, which is made if it is missing.
        environ: consulted for ``XDG_RUNTIME_DIR`` when nothing is chosen.

    Raises:
        ConfigurationError: the chosen directory cannot be used: no directory, or too long a path for a socket in it.
    """
    if chosen is not None:
        base = chosen.expanduser().absolute()
        if not _short_enough(base):
            raise ConfigurationError(
                f"The path {base} is too long for a Unix socket in it; choose a shorter --run-dir.",
                param="run_dir",
            )
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--run-dir {base}: {error.strerror}.", param="run_dir") from error
        return base
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    for base in (Path(runtime), Path(tempfile.gettempdir())):
        if base.is_absolute() and _short_enough(base) and base.is_dir() and os.access(base, os.W_OK | os.X_OK):
            return base
    return Path("/tmp")  # noqa: S108  # the last resort where TMPDIR is too long; the directory in it is private


def remove_stale(base: Path) -> None:
    """Removes the run directories of this user in ``base`` whose supervisor is gone."""
    for path in base.glob(f"{_PREFIX}*"):
        try:
            info = path.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # it went away meanwhile, or is not a run directory
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # in use
        else:
            _remove(path)
        finally:
            os.close(lock)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("the run directory %s cannot be removed: %s", path, error)


def _short_enough(base: Path) -> bool:
    return all(len(path) <= MAX_SOCKET_PATH for path in socket_paths(base / (_PREFIX + _RANDOM)))
