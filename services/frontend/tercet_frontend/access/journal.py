"""Logs of one JSON object a line, written by a thread: a slow disk or reader costs lines, never a request's time."""

from __future__ import annotations

import logging
import os
import sys
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import orjson

from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

logger = logging.getLogger(__name__)

MAX_QUEUED = 20_000
"""Lines that wait for the thread; further ones are dropped and counted."""

LAST_WORDS = 2.0
"""Seconds that `Journal.close` waits for what is queued."""

_BATCH = 512
_MODE = 0o640
_REOPEN: Final = object()
_END: Final = object()


class Journal:
    """One log. Lines are appended whole, so that several processes can share a file.

    Attributes:
        dropped: lines that were not written, as too many waited or the file could not be written.
    """

    def __init__(self, path: Path | None, *, max_queued: int = MAX_QUEUED) -> None:
        """Opens the file, and starts the thread.

        Args:
            path: where to; None for standard error.
            max_queued: lines, see `MAX_QUEUED`.

        Raises:
            ConfigurationError: the file cannot be opened.
        """
        self.dropped = 0
        self._path = path
        self._max_queued = max_queued
        self._queue: SimpleQueue[Any] = SimpleQueue()
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise ConfigurationError(f"The log {path} cannot be written: {error.strerror}.", param="log") from None
        self._failing = False
        # A daemon: a reader of standard error that reads nothing must not keep the process from its end.
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Adds a line; returns at once."""
        if self._queue.qsize() >= self._max_queued:
            self.dropped += 1
            return
        self._queue.put(entry)

    def reopen(self) -> None:
        """Opens the file anew, after what was written so far: it may have been moved away."""
        if self._path is not None:
            self._queue.put(_REOPEN)

    def close(self, timeout: float = LAST_WORDS) -> None:
        """Writes what is queued and ends; gives up after ``timeout`` seconds."""
        self._queue.put(_END)
        self._thread.join(timeout)

    def _open(self) -> int:
        if self._path is None:
            return sys.stderr.fileno()
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)

    def _close_file(self) -> None:
        if self._path is not None:
            os.close(self._descriptor)

    def _write_all(self) -> None:
        item: Any = None
        while item is not _END:
            entries: list[Any] = []
            item = self._queue.get()
            while item is not _END and item is not _REOPEN:
                entries.append(item)
                if len(entries) >= _BATCH or self._queue.empty():
                    break
                item = self._queue.get()
            if entries:
                self._write_some(entries)
            if item is _REOPEN:
                self._replace_file()
        self._close_file()

    def _write_some(self, entries: list[Any]) -> None:
        try:
            rest = memoryview(b"".join([orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE) for entry in entries]))
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self.dropped += len(entries)
            if not self._failing:
                logger.warning("the log %s cannot be written: %s", self._path or "on standard error", error.strerror)
            self._failing = True
        else:
            self._failing = False

    def _replace_file(self) -> None:
        try:
            descriptor = self._open()
        except OSError as error:
            logger.warning("the log %s cannot be opened anew: %s", self._path, error.strerror)
            return
        self._close_file()
        self._descriptor = descriptor
