"""Waiting for processes that are not children of the test, and finding those that are left."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path


async def ended(pidfd: int) -> None:
    """Waits until the process is gone, and closes the descriptor."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.add_reader(pidfd, lambda: done.done() or done.set_result(None))
    try:
        await asyncio.wait_for(done, 60)
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def runs(pid: int) -> bool:
    """Whether the process exists and is more than a zombie that its parent has not reaped yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
