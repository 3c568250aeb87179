"""`tercet chat` as a process, through pipes and at a terminal, before a real front end with a fake core behind it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import struct
import sys
import termios
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tercet_tools.chat.reader import MARK

# Fixtures, and what they need.
from tests.contract.frontend.conftest import TIMEOUT, model_path, says, text  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

_CHAT = (sys.executable, "-W", "error", "-m", "tercet_shared.cli", "chat")

# The terminal becomes the one from which Ctrl-C reaches the process.
_ON_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[=>()][0B]?")


class Done(NamedTuple):
    """How a process ended."""

    code: int
    out: str
    err: str


class Piped:
    """A `tercet chat` whose question came through a pipe."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def end(self) -> Done:
        """Returns what it wrote, at its end."""
        async with asyncio.timeout(TIMEOUT):
            out, err = await self.process.communicate()
        return Done(self.process.returncode or 0, out.decode(), err.decode())


class Terminal:
    """A `tercet chat` at a terminal of 100 columns and 30 lines."""

    def __init__(self, process: asyncio.subprocess.Process, master: int, reader: asyncio.StreamReader) -> None:
        self.process = process
        self._master = master
        self._reader = reader
        self.raw = ""
        self._seen = 0  # characters of `shown` that were waited for

    @property
    def shown(self) -> str:
        """All that was shown, without colours and movements."""
        return _ESCAPES.sub("", self.raw).replace("\r", "")

    def type(self, keys: str) -> None:
        """Presses keys; Enter is ``\\r``."""
        os.write(self._master, keys.encode())

    async def say(self, keys: str) -> None:
        """Waits until a message is asked for, and presses keys."""
        await self.sees(MARK)
        self.type(keys)

    async def sees(self, expected: str) -> str:
        """Waits until a text is shown after what was waited for before; returns what was shown up to its end."""
        async with asyncio.timeout(TIMEOUT):
            while (found := self.shown.find(expected, self._seen)) < 0:
                data = await self._reader.read(65_536)
                assert data, f"it ended before it showed {expected!r}:\n{self.shown}"
                self.raw += data.decode(errors="replace")
        before, self._seen = self._seen, found + len(expected)
        return self.shown[before : self._seen]

    async def end(self) -> int:
        """Returns the exit code."""
        async with asyncio.timeout(TIMEOUT):
            return await self.process.wait()


def _environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TERCET_")}
    # Nobody at this terminal answers where the cursor is.
    fixed = {"HOME": str(home), "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONIOENCODING": "utf-8"}
    return {**kept, **fixed, "XDG_STATE_HOME": str(home / "state"), **more}


@pytest.fixture
def piped(tmp_path: Path):
    """Starts `tercet chat` with a question on standard input."""

    async def start(question: str | bytes, *arguments: str, **environment: str) -> Piped:
        process = await asyncio.create_subprocess_exec(
            *_CHAT, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, env=_environment(tmp_path, **environment),
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(question.encode() if isinstance(question, str) else question)
        process.stdin.close()
        return Piped(process)

    return start


@pytest.fixture
def terminal(tmp_path: Path):
    """Starts `tercet chat` at a terminal."""

    @asynccontextmanager
    async def start(*arguments: str, **environment: str) -> AsyncIterator[Terminal]:
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _ON_TERMINAL, *_CHAT, *arguments, stdin=slave, stdout=slave, stderr=slave,
                start_new_session=True, env=_environment(tmp_path, **environment),
            )  # fmt: skip
        finally:
            os.close(slave)

        def pump() -> None:
            try:
                data = os.read(master, 65_536)
            except OSError:  # the other side is closed
                data = b""
            if data:
                reader.feed_data(data)
            else:
                reader.feed_eof()
                loop.remove_reader(master)

        loop.add_reader(master, pump)
        try:
            yield Terminal(process, master, reader)
        finally:
            loop.remove_reader(master)
            if process.returncode is None:
                process.kill()
                await process.wait()
            os.close(master)

    return start
