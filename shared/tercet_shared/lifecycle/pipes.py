"""Reads lines from a pipe whose other end a child process holds, on the running event loop."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK: Final = 64 * 1024
_DRAIN_LIMIT: Final = 4 * 1024 * 1024  # bytes that one drain reads; a pipe that still has a writer might never end


class LineReader:
    """The reading end of a pipe. ``open``, then lines come until ``close`` or the end of the pipe.

    Args:
        fd: the descriptor; owned from here on.
        on_line: called on the loop with each line, without its newline. A line over ``max_line`` comes in pieces.
        max_line: bytes.
    """

    def __init__(self, fd: int, on_line: Callable[[bytes], None], max_line: int = 64 * 1024) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._on_line = on_line
        self._max_line = max_line
        self._partial = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def open(self) -> None:
        """Starts reading on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)

    def drain(self) -> None:
        """Hands over what is in the pipe now, without waiting for more."""
        for _ in range(_DRAIN_LIMIT // _CHUNK):
            if not self._read():
                return

    def close(self) -> None:
        """Hands over an unfinished last line and gives the descriptor back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
        os.close(self._fd)
        if self._partial:
            self._on_line(bytes(self._partial))
            self._partial.clear()

    def _read(self) -> bool:
        """Returns whether there may be more."""
        if self._closed:
            return False
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self._partial += data
        *lines, rest = self._partial.split(b"\n")
        while len(rest) > self._max_line:
            lines.append(rest[: self._max_line])
            rest = rest[self._max_line :]
        self._partial = rest
        for line in lines:
            self._on_line(bytes(line))
        return True
