"""`tercet serve` with a worker of several ranks: it answers like one, and a rank that is lost is a pause."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Serving, serve
from tests.e2e.test_recovery import Streams

FLAGS = ("--dtype=float32", "--served-model-name=smollm2")


def ranks(running: Serving) -> dict[int, psutil.Process]:
    """Returns the processes of the worker's ranks by their number."""
    found = {}
    for child in psutil.Process(running.process.pid).children(recursive=True):
        match = re.search(r"--local-rank=(\d+)", " ".join(child.cmdline()))
        if match:
            found[int(match[1])] = child
    return found


@pytest.mark.timeout(400)
def test_a_lost_rank_is_a_pause_and_the_group_comes_back_as_one(smollm2: Path) -> None:
    async def streams(running: Serving, *, lose: tuple[int, signal.Signals] | None = None) -> list[str]:
        streams = Streams(running.url)
        task = asyncio.create_task(streams.run())
        if lose is not None:
            await streams.begun.wait()
            before = ranks(running)
            before[lose[0]].send_signal(lose[1])
        texts = await task
        if lose is not None:
            assert streams.longest_pause > 0.5, "the worker was there all the time"
            assert not any(process.is_running() for process in before.values()), "all ranks were started again"
        return texts

    with serve(smollm2, *FLAGS) as running:
        alone = asyncio.run(streams(running))
        assert running.stop() == 0
    with serve(smollm2, *FLAGS, "--tensor-parallel-size=2", "--pipeline-parallel-size=2") as running:
        assert sorted(ranks(running)) == [0, 1, 2, 3]
        assert asyncio.run(streams(running)) == alone
        assert asyncio.run(streams(running, lose=(1, signal.SIGKILL))) == alone
        assert asyncio.run(streams(running, lose=(2, signal.SIGSTOP))) == alone
        assert asyncio.run(streams(running)) == alone, "and afterwards all is as before"
        assert running.stop() == 0, "nothing of it was a failure"
