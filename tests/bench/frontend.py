"""Measures one front end alone: a core that computes nothing feeds it, a load generator reads from it.

    python -m tests.bench.frontend MODEL [--streams 128 1024] [--rate 0] [--tokens 64] [--profile]

Three processes: the core of ``token_core.py``, one real front end, and ``tercet bench serve``. Prints one JSON object
for each number of streams and each rate. ``frontend_cpu_us_per_token`` is what counts: user and system time of the
front end (/proc/PID/stat) by output tokens, with all that a request costs before its first one. Where the core sends
more than the front end can write (rate 0), several tokens may come in one event: ``events_per_token`` says so, and a
lower ``--rate`` (tokens per second) shows the cost of streams that stay streams.

With --profile the front end runs under cProfile, which makes it slower; what it spent its time on goes to standard
error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pstats
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tercet_shared.lifecycle.report import parse_event
from tercet_tools.bench.http import HttpClient, Whole

READY_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Returns the processor time of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_mib(pid: int) -> float:
    """Returns the resident memory of a process."""
    return round(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


@contextlib.asynccontextmanager
async def core(
    model: str, address: str, rate: float, gather: int, *flags: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs the core; it listens."""
    command = [sys.executable, "-m", "tests.bench.token_core", model, f"--listen={address}"]
    command += [f"--rate={rate}", f"--gather={gather}", *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with _stopped(process):
        await _line(process, b"listening")
        yield process


@contextlib.asynccontextmanager
async def front_end(
    model: str, address: str, profile: Path | None, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Runs the front end; yields it with its URL once it answers."""
    profiler = ["-m", "tests.bench.profiled", str(profile)] if profile else ["-m"]
    read_end, write_end = os.pipe()
    command = [sys.executable, *profiler, "tercet_frontend", model, f"--core={address}", "--port=0"]
    command += ["--log-level=warning", f"--report-fd={write_end}", *flags]
    try:
        process = await asyncio.create_subprocess_exec(*command, pass_fds=[write_end])
    finally:
        os.close(write_end)
    async with _stopped(process):
        with os.fdopen(read_end, "rb") as reports:
            yield process, await asyncio.to_thread(_url, reports)


def _url(reports: Any) -> str:
    for line in reports:
        event = parse_event(line)
        if event.event == "ready":
            return str(event.detail["url"])
        if event.event == "fatal":
            raise SystemExit(f"error: {event.message}")
    raise SystemExit("error: the front end ended")


@contextlib.asynccontextmanager
async def _stopped(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _line(process: asyncio.subprocess.Process, expected: bytes) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(READY_S):
        while line := await process.stdout.readline():
            if line.strip() == expected:
                return
    raise SystemExit(f"error: {expected.decode()} was not said")


async def ready(url: str) -> None:
    """Returns when the front end takes requests: it has the core's greeting, so that is within a few questions."""
    client = HttpClient(url, timeout=READY_S)
    async with asyncio.timeout(READY_S):
        while True:
            answer = Whole()
            await client.get("/readyz", answer)
            if answer.status == 200:
                break
    client.close()


async def load(url: str, streams: int, requests: int, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the load generator in a process of its own and returns its figures."""
    command = [sys.executable, "-m", "tercet_tools.bench", "serve", f"--url={url}", f"--concurrency={streams}"]
    command += [f"--requests={requests}", f"--output-tokens={options.tokens}", f"--input-tokens={options.input_tokens}"]
    command += [f"--endpoint={options.endpoint}", "--warmup=0", "--json=-"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=subprocess.DEVNULL if not options.verbose else None
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"error: the load generator ended with {process.returncode}; --verbose shows why")
    figures: dict[str, Any] = json.loads(out)["loads"][0]["servers"][0]
    return figures


async def measure(streams: int, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """Runs all three processes once and returns what is printed."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as directory:
        address = f"unix:{directory}/core.sock"
        profile = Path(directory, "profile") if options.profile else None
        async with (
            core(options.model, address, rate, streams) as fed,
            front_end(options.model, address, profile) as (front, url),
        ):
            await _line(fed, b"connected")
            await ready(url)
            await load(
                url, streams, streams, argparse.Namespace(**vars(options) | {"tokens": 8})
            )  # what is first is slow
            if profile is not None:
                front.send_signal(signal.SIGUSR1)
            before = cpu_seconds(front.pid), cpu_seconds(fed.pid)
            figures = await load(url, streams, options.requests * streams, options)
            after = cpu_seconds(front.pid), cpu_seconds(fed.pid)
            resident = resident_mib(front.pid)
        if profile is not None:
            pstats.Stats(str(profile), stream=sys.stderr).sort_stats("tottime").print_stats(40)
    tokens = figures["output_tokens"]
    spent = [end - begin for begin, end in zip(before, after, strict=True)]
    return {
        "streams": streams,
        "rate": rate,
        "endpoint": options.endpoint,
        "tokens": tokens,
        "failed": figures["failed"],
        "tokens_per_s": round(figures["output_tokens_per_s"], 1),
        "events_per_token": round(figures["events_per_token"], 3),
        "frontend_cpu_us_per_token": round(spent[0] / tokens * 1e6, 2),
        "frontend_cpu_us_per_event": round(spent[0] / tokens / figures["events_per_token"] * 1e6, 2),
        "frontend_busy": round(spent[0] / figures["seconds"], 3),
        "core_cpu_us_per_token": round(spent[1] / tokens * 1e6, 2),
        "client_cpu_us_per_token": figures["client_cpu_us_per_token"],
        "client_busy": figures["client_busy"],
        "ttft_p50_ms": figures["ttft_p50_ms"],
        "itl_p50_ms": figures["itl_p50_ms"],
        "itl_p99_ms": figures["itl_p99_ms"],
        "frontend_resident_mib": resident,
        "profiled": bool(options.profile),
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="whose tokenizer is used")
    parser.add_argument("--streams", type=int, nargs="+", default=[128, 1024], help="concurrent streams")
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[0.0], help="tokens per second of the core; 0: no limit"
    )
    parser.add_argument("--requests", type=int, default=4, help="requests per stream")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--input-tokens", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--endpoint", choices=["completions", "chat"], default="chat")
    parser.add_argument("--profile", action="store_true", help="say where the front end's time goes")
    parser.add_argument("--verbose", action="store_true", help="show what the load generator says")
    return parser.parse_args(argv)


async def main() -> None:
    """Measures what the command line asks for."""
    options = parse()
    for streams in options.streams:
        for rate in options.rate:
            print(json.dumps(await measure(streams, rate, options)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
