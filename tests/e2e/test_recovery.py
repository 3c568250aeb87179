"""The real model loses its worker in mid-stream: every stream goes on to exactly the text of an undisturbed run.

With these prompts the two best logits are never closer than 0.016 on the way, as Transformers computes them, so that
rounding does not decide anything.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Serving, serve

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "Water boils at 100 degrees Celsius. On a high mountain",
    "def fibonacci(n):\n    return n if n < 2 else",
]
BODIES: list[dict[str, Any]] = [
    *({"prompt": prompt, "temperature": 0} for prompt in PROMPTS),
    *({"prompt": prompt, "temperature": 0.8, "seed": 7} for prompt in PROMPTS),
]
OUTPUT = 48


@pytest.fixture(scope="module")
def running(smollm2: Path) -> Iterator[Serving]:
    with serve(smollm2, "--dtype=float32", "--served-model-name=smollm2") as serving:
        yield serving
        assert serving.stop() == 0, "nothing of it was a failure"


class Streams:
    """Completions that run at once; `begun` is set when each has sent text."""

    def __init__(self, url: str) -> None:
        self.begun = asyncio.Event()
        self.longest_pause = 0.0
        self._url = url
        self._waiting = len(BODIES)

    async def run(self) -> list[str]:
        async with httpx.AsyncClient(timeout=120) as http, asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(self._one(http, body)) for body in BODIES]
        return [stream.result() for stream in streams]

    async def _one(self, http: httpx.AsyncClient, body: dict[str, Any]) -> str:
        body = body | {"model": "smollm2", "max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
        text, events, reasons = "", 0, []
        async with http.stream("POST", f"{self._url}/v1/completions", json=body) as reply:
            last = time.monotonic()
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):  # a sign of life
                    continue
                if line == "data: [DONE]":
                    assert reasons[-1] == "length"
                    return text
                self.longest_pause = max(self.longest_pause, time.monotonic() - last)
                last = time.monotonic()
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event
                text += event["choices"][0]["text"]
                reasons.append(event["choices"][0]["finish_reason"])
                events += 1
                if events == 4:
                    self._waiting -= 1
                    if self._waiting == 0:
                        self.begun.set()
        pytest.fail(f"the stream ended in the middle: {text}")


@pytest.fixture(scope="module")
def undisturbed(running: Serving) -> list[str]:
    return asyncio.run(Streams(running.url).run())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_after_a_pause(running: Serving, undisturbed: list[str], number: signal.Signals) -> None:
    async def run() -> list[str]:
        streams = Streams(running.url)
        task = asyncio.create_task(streams.run())
        await streams.begun.wait()
        worker = running.children()["worker"]
        worker.send_signal(number)
        texts = await task
        assert not worker.is_running()
        assert streams.longest_pause > 0.5, "the worker was there all the time"
        return texts

    assert asyncio.run(run()) == undisturbed
    assert asyncio.run(Streams(running.url).run()) == undisturbed, "and afterwards all is as before"
