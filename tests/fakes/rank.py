"""One rank of a fake group as a process of its own: ``python -m tests.fakes.rank WHERE GROUP RANK RANKS``.

``WHERE`` is the core's socket, or the address of its gRPC port. The last rank answers. Prints how its link ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.fakes.worker import FakeWorker, rank_of


async def run(where: str, group: str, rank: int, ranks: int) -> None:
    """Serves until the core ends the link."""
    link = Path(where) if where.startswith("/") else where
    async with FakeWorker(link, **rank_of(group, rank, ranks)) as worker:
        worker.keep_plans = False
        reason = await worker.connection.wait_closed()
        print(f"{reason.kind}: {reason.text}", flush=True)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
