"""A fleet as an operator starts it: whatever dies behind a front end, streams go on with the very next token."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.bench.fleet import NAME, Ask, Fleet, ask, running
from tests.fakes.checkpoints import write_tiny_llama

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.timeout(300)

CHOICES = 2
LONG = {"prompt": [5, 6, 7], "max_tokens": 1500, "ignore_eos": True, "n": CHOICES, "temperature": 0.8, "seed": 5}


@asynccontextmanager
async def fleet(model: Path) -> AsyncIterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as base:  # the path of a socket is short
        async with httpx.AsyncClient(timeout=120) as http:
            found = Fleet(str(model), Path(base), http, cores=2, front_ends=1)
            async with running(found):
                yield found


async def busy(found: Fleet, answer: asyncio.Task[Any]) -> int:
    """Returns a core that runs choices of ``answer``, as soon as there is one."""
    (front_end,) = found.front_ends
    while True:
        assert not answer.done(), "it was over before it was seen"
        text = (await found.http.get(f"http://127.0.0.1:{front_end.metrics_port}/metrics")).text
        for number, core in enumerate(found.cores):
            name = next(flag for flag in core.arguments if flag.startswith("--core-id=")).removeprefix("--core-id=")
            for line in text.splitlines():
                if line.startswith("tercet_frontend_choices{") and f'"{name}"' in line and float(line.split()[-1]) > 0:
                    return number


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny")


async def test_cores_that_are_killed_and_stopped_are_not_noticed(tiny: Path) -> None:
    async with fleet(tiny) as found:
        (front_end,) = found.front_ends

        def stream(**fields: Any) -> asyncio.Task[Any]:
            return asyncio.create_task(
                ask(found.http, front_end.url, Ask("/v1/completions", LONG | fields, True), None)
            )

        expected = await stream()
        assert {choice["ends"][0] for choice in expected["choices"].values()} == {"length"}
        # One that is killed, with all its state.
        answer = stream()
        number = await busy(found, answer)
        await found.cores[number].kill()
        assert await answer == expected
        await front_end.count(found.http)
        moved = front_end.total
        assert moved >= 1
        await found.cores[number].start()
        await found.wait_whole()
        # One that is asked to stop, and does not wait for long answers.
        answer = stream()
        await found.cores[await busy(found, answer)].stop()
        assert await answer == expected
        # The registry is no part of it.
        await found.redis.stop()
        assert await stream() == expected
        assert NAME in (await found.http.get(f"{front_end.url}/v1/models")).text
