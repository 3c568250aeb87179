"""Measures what large requests do to everybody else: running streams, and who asks whether the server lives.

    python -m tests.bench.isolation MODEL [--scenario prompts …] [--streams 64] [--rate 1600] [--seconds 4]

One real front end, a core that computes nothing (``token_core.py``) and sends tokens at a steady rate, this program as
the client of streams that run all the time, and of ``/livez`` every 10 ms. After some calm seconds another process
sends the large requests of a scenario at once:

    prompts    20 conversations of about 30,000 tokens
    messages   20 conversations of 4,000 messages
    ids        20 prompts of 30,000 token ids
    too-long   4 bodies of 9 MB: a text that is far too long for the model
    nested     4 bodies of 9 MB: nothing but small lists

One JSON object per scenario. ``*_ms`` are milliseconds; ``itl`` is the time between two arrivals at a stream, ``calm``
before and ``burst`` while the large requests were answered. Exit code 1 where ``/livez`` took over 50 ms or the
streams' 99th percentile doubled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvloop

from tercet_shared.checkpoint import Checkpoint
from tercet_tools.bench.http import HttpClient, Whole, clock
from tests.bench.frontend import core, cpu_seconds, front_end, ready
from tests.bench.token_core import TEXT

MAX_MODEL_LEN = 40_000
LIVEZ_EVERY_S = 0.01
LIVEZ_LIMIT_MS = 50.0
ITL_LIMIT = 2.0
SETTLE_S = 1.0


@dataclass
class Gaps:
    """An answer that is a stream; notes when something comes."""

    arrivals: list[float] = field(default_factory=list)
    status: int = 0
    runs: asyncio.Event = field(default_factory=asyncio.Event)

    def head(self, status: int) -> None:
        """Takes the status."""
        self.status = status

    def body(self, data: bytes, now: float) -> None:  # see Answer
        """Notes the time."""
        self.arrivals.append(now)
        self.runs.set()

    def end(self) -> None:
        """Nothing is left to do."""


def bodies(scenario: str, model: str) -> list[bytes]:
    """Returns the large requests of a scenario, all different."""

    def chat(messages: list[Any]) -> bytes:
        return json.dumps({"model": model, "messages": messages, "max_tokens": 1}).encode()

    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    if scenario == "prompts":
        return [chat([user(f"{number}: " + TEXT * 660)]) for number in range(20)]
    if scenario == "messages":
        return [chat([user(f"{number}") for number in range(first, first + 4_000)]) for first in range(20)]
    if scenario == "ids":
        return [
            json.dumps({"model": model, "prompt": [100 + first] * 30_000, "max_tokens": 1}).encode()
            for first in range(20)
        ]
    if scenario == "too-long":
        return [chat([user(f"{number}: " + TEXT * 44_000)]) for number in range(4)]
    return [b'{"model": "m", "messages": [' + b"[]," * 3_000_000 + b"%d]}" % number for number in range(4)]


SCENARIOS = ("prompts", "messages", "ids", "too-long", "nested")


async def send(scenario: str, url: str, model: str) -> None:
    """Is the process that sends: says when it is ready, waits for a line, sends, prints how often which status came."""
    large = bodies(scenario, model)
    answers = [Whole() for _ in large]
    client = HttpClient(url)
    path = "/v1/completions" if scenario == "ids" else "/v1/chat/completions"
    print("ready", flush=True)
    sys.stdin.readline()
    await asyncio.gather(*(client.post(path, body, answer) for body, answer in zip(large, answers, strict=True)))
    print(json.dumps(Counter(answer.status for answer in answers)), flush=True)


async def livez(url: str, taken: list[tuple[float, float]]) -> None:
    """Asks again and again; adds when, and the seconds until the answer. Runs until it is cancelled."""
    client = HttpClient(url)
    while True:
        begin = clock()
        answer = Whole()
        await client.get("/livez", answer)
        assert answer.status == 200
        taken.append((begin, clock() - begin))
        await asyncio.sleep(LIVEZ_EVERY_S)


def percentile(values: list[float], share: float) -> float:
    """Returns milliseconds."""
    return round(float(np.percentile(values, share)) * 1e3, 2) if values else 0.0


def between(streams: list[Gaps], begin: float, end: float) -> list[float]:
    """Returns the gaps that ended in this time."""
    found: list[float] = []
    for stream in streams:
        times = np.array(stream.arrivals)
        gaps = np.diff(times)
        found += gaps[(times[1:] >= begin) & (times[1:] < end)].tolist()
    return found


async def measure(scenario: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one scenario and returns what is printed."""
    name = Checkpoint.open(options.model).served_name
    tokens = int(options.rate / options.streams * (SETTLE_S + options.seconds + 60))
    running = json.dumps(
        {"model": name, "prompt": "Once", "max_tokens": min(tokens, MAX_MODEL_LEN - 100), "stream": True}
    ).encode()
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as directory:
        address = f"unix:{directory}/core.sock"
        async with (
            core(options.model, address, options.rate, options.streams, f"--max-model-len={MAX_MODEL_LEN}") as _,
            front_end(options.model, address, None) as (front, url),
        ):
            await ready(url)
            streams = [Gaps() for _ in range(options.streams)]
            asked: list[tuple[float, float]] = []
            client = HttpClient(url)
            tasks = [asyncio.ensure_future(client.post("/v1/completions", running, stream)) for stream in streams]
            tasks.append(asyncio.ensure_future(livez(url, asked)))
            try:
                await _first_tokens(streams)
                sender = await _sender(scenario, url, name)
                await asyncio.sleep(SETTLE_S)
                calm, cpu_calm = clock(), cpu_seconds(front.pid)
                await asyncio.sleep(options.seconds)
                burst, cpu_burst = clock(), cpu_seconds(front.pid)
                answers, _ = await sender.communicate(b"go\n")
                end, cpu_end = clock(), cpu_seconds(front.pid)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    before, during = between(streams, calm, burst), between(streams, burst, end)
    asked_during = [taken for begin, taken in asked if burst <= begin + taken and begin < end]
    itl_calm, itl_burst = percentile(before, 99), percentile(during, 99)
    livez_max = round(max(asked_during, default=0.0) * 1e3, 2)
    return {
        "scenario": scenario,
        "streams": options.streams,
        "burst_s": round(end - burst, 3),
        "answers": json.loads(answers),
        "livez_calm_max_ms": round(max((taken for begin, taken in asked if calm <= begin < burst), default=0) * 1e3, 2),
        "livez_burst_p50_ms": percentile(asked_during, 50),
        "livez_burst_max_ms": livez_max,
        "itl_calm_p50_ms": percentile(before, 50),
        "itl_calm_p99_ms": itl_calm,
        "itl_burst_p50_ms": percentile(during, 50),
        "itl_burst_p99_ms": itl_burst,
        "itl_burst_max_ms": percentile(during, 100),
        "frontend_calm_busy": round((cpu_burst - cpu_calm) / (burst - calm), 3),
        "frontend_burst_cpu_s": round(cpu_end - cpu_burst, 3),
        "ok": livez_max <= LIVEZ_LIMIT_MS and itl_burst < ITL_LIMIT * itl_calm,
    }


async def _sender(scenario: str, url: str, model: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "tests.bench.isolation", "--send", scenario, url, model)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    if await process.stdout.readline() != b"ready\n":
        raise SystemExit("error: the process that sends did not start")
    return process


async def _first_tokens(streams: list[Gaps]) -> None:
    async with asyncio.timeout(60):
        for stream in streams:
            await stream.runs.wait()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="whose tokenizer is used")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--streams", type=int, default=64, help="streams that run all the time")
    parser.add_argument("--rate", type=float, default=1600.0, help="tokens per second of all of them together")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long it is calm before")
    return parser.parse_args(argv)


async def main() -> int:
    """Returns the exit code."""
    if sys.argv[1:2] == ["--send"]:
        await send(*sys.argv[2:])
        return 0
    options = parse()
    worst = 0
    for scenario in options.scenario:
        result = await measure(scenario, options)
        print(json.dumps(result), flush=True)
        worst |= not result["ok"]
    return int(worst)


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
