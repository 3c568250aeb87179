"""Breaks a running system on purpose, and counts what its clients notice: nothing but pauses is right.

    python tests/bench/chaos.py MODEL [--duration 120] [--concurrency 12] [--seed 0]

Starts `tercet serve` in float32 and asks a fixed set of requests, greedy and seeded, one by one: what comes is what is
right. Then, for the given seconds, streams of the same requests run all the time, while

* the worker is killed (SIGKILL) and stopped (SIGSTOP) in turn, as often as the supervisor restarts it,
* clients leave in mid-stream, politely or with a reset of their TCP connection,
* front ends of their own connect to the core, ask, and vanish or wait for their tokens.

The last line is a JSON object. ``started`` requests are those that were sent, ``cut`` those that this program gave up
itself, ``finished`` those that ended as they should. ``wrong`` had another text, ``lost`` had an error, no end, or a
second one. Exit code 1 unless both are zero, all that was taken is free again and the server stops with 0.

A greedy token may differ where two candidates are closer than rounding, 1e-3 in float32. With `REQUESTS` the two best
logits of SmolLM2-135M-Instruct are never closer than 0.016, as Transformers computes them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tercet_proto.v1 import engine_pb2 as pb
from tercet_proto.v1 import engine_pb2_grpc
from tests.fakes.stream_client import Client

READY_S = 600.0
SPACING_S = 22.0
"""Between two deaths of the worker: the supervisor restarts it three times within 60 s."""
FIRST_S = 6.0
LEAVE_SHARE = 0.2
"""Share of the clients that leave in mid-stream."""
END_S = 120.0
"""For the streams that run when the time is over."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "Water boils at 100 degrees Celsius. On a high mountain",
    "def fibonacci(n):\n    return n if n < 2 else",
    "The lighthouse keeper counted the waves and wrote them down in a book. " * 12,
    "In 1815 the ship left Bristol with 42 barrels of salt and a very old map.",
    "The three primary colors are",
    "To make bread you need flour, water, salt and",
)
REQUESTS: tuple[dict[str, Any], ...] = tuple(
    {"prompt": prompt, "max_tokens": 24 + 16 * i} | (extra or {"temperature": 0})
    for i, prompt in enumerate(PROMPTS)
    for extra in ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 7 + i})
)
RAW_PROMPT = [504, 3575, 282, 4649, 314]
RAW_TOKENS = 60


@dataclass
class Tally:
    """What happened."""

    started: int = 0
    finished: int = 0
    wrong: int = 0
    lost: int = 0
    cut: int = 0
    worker_kills: int = 0
    worker_stops: int = 0
    front_ends: int = 0
    tokens: int = 0
    longest_pause_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._token = asyncio.Event()

    def token(self) -> None:
        """Counts a token."""
        self.tokens += 1
        self._token.set()

    async def more_tokens(self, count: int) -> None:
        """Waits until so many tokens more have come."""
        enough = self.tokens + count
        while self.tokens < enough:
            self._token.clear()
            await self._token.wait()

    def problem(self, text: str) -> None:
        """Notes what went wrong, the first few times."""
        say(text)
        if len(self.problems) < 20:
            self.problems.append(text)


def say(text: str) -> None:
    """Shows what happens; standard output is for the result."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Left(Exception):  # noqa: N818  # not an error: this client was to leave
    """The client left, as it was to."""


class Server:
    """One `tercet serve`."""

    def __init__(self, process: asyncio.subprocess.Process, host: str, port: int, run_base: Path) -> None:
        self.process, self.host, self.port, self._run_base = process, host, port, run_base

    @property
    def engine(self) -> str:
        """Address of the core for front ends."""
        (path,) = self._run_base.glob("*/engine.sock")
        return f"unix:{path}"

    def worker(self) -> psutil.Process | None:
        """Returns the worker's process, if there is one now."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "tercet_worker" in child.cmdline():
                    return child
        return None

    async def info(self) -> pb.InfoReply:
        """Asks the core how it is."""
        async with grpc.aio.insecure_channel(self.engine) as channel:
            reply: pb.InfoReply = await engine_pb2_grpc.EngineStub(channel).Info(pb.InfoRequest())  # type: ignore[no-untyped-call]
            return reply


@contextlib.asynccontextmanager
async def serve(model: str, flags: list[str]) -> AsyncIterator[Server]:
    """Starts the server on a free port; kills it if it still runs at the end."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as run_base:
        command = [sys.executable, "-m", "tercet_shared.cli", "serve", "--port=0", f"--run-dir={run_base}"]
        command += ["--dtype=float32", "--served-model-name=m", *flags, model]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout is not None
            async with asyncio.timeout(READY_S):
                while (line := await process.stdout.readline()) and not (
                    found := re.search(rb"listens on http://([^:]+):(\d+)", line)
                ):
                    pass
            if not line or found is None:
                raise SystemExit("error: the server did not start")
            reading = asyncio.create_task(process.stdout.read())  # or its pipe fills up
            yield Server(process, found[1].decode(), int(found[2]), Path(run_base))
            reading.cancel()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def stream(
    server: Server, request: dict[str, Any], tally: Tally, leave_after: int | None, draw: random.Random
) -> str:
    """Streams one completion and returns its text.

    Raises:
        Left: after ``leave_after`` events.
        RuntimeError: it did not end as it should; the text says how.
    """
    body = json.dumps(request | {"model": "m", "stream": True, "ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {server.host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read(2000)).decode(errors="replace"))
        while (await reader.readline()).strip():
            pass
        return await _read(reader, request, tally, leave_after)
    except Left:
        if draw.random() < 0.5:  # a reset instead of a polite end
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise
    except OSError as error:
        raise RuntimeError(f"the connection broke: {error}") from error
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, request: dict[str, Any], tally: Tally, leave_after: int | None) -> str:
    text, events, ends = "", 0, 0
    last = time.monotonic()
    while line := await reader.readline():
        if not line.startswith(b"data: "):  # empty lines, chunk sizes, comments
            continue
        data = line.removeprefix(b"data: ").strip()
        now = time.monotonic()
        tally.longest_pause_s = max(tally.longest_pause_s, now - last)
        last = now
        if data == b"[DONE]":
            if ends != 1 or b"data: " in await reader.read():
                raise RuntimeError(f"{ends} ends after {len(text)} characters of {request}")
            return text
        event = json.loads(data)
        if "error" in event:
            raise RuntimeError(f"an error after {len(text)} characters: {event['error']}")
        choice = event["choices"][0]
        text += choice["text"]
        ends += choice["finish_reason"] == "length"
        events += 1
        tally.token()
        if events == leave_after:
            raise Left
    raise RuntimeError(f"no end after {len(text)} characters of {request}")


async def client(server: Server, expected: list[str], tally: Tally, until: float, draw: random.Random) -> None:
    """Asks one thing after another until the time is over."""
    while time.monotonic() < until:
        index = draw.randrange(len(REQUESTS))
        request = REQUESTS[index]
        leaves = draw.random() < LEAVE_SHARE
        tally.started += 1
        try:
            text = await stream(server, request, tally, draw.randint(1, 30) if leaves else None, draw)
        except Left:
            tally.cut += 1
        except RuntimeError as error:
            tally.lost += 1
            tally.problem(f"lost: {error}")
        else:
            tally.finished += 1
            if text != expected[index]:
                tally.wrong += 1
                tally.problem(f"wrong: {request} gave {text!r} instead of {expected[index]!r}")


async def front_ends(server: Server, expected: list[int], tally: Tally, until: float, draw: random.Random) -> None:
    """Connects front ends of its own, some of which vanish with their requests in flight."""
    while time.monotonic() < until:
        tally.front_ends += 1
        async with Client(server.engine, f"chaos-{tally.front_ends}", patience=END_S) as front_end:
            for handle in range(2):
                tally.started += 1
                await front_end.submit(handle, RAW_PROMPT, max_tokens=RAW_TOKENS)
            if draw.random() < 0.5:
                some = draw.randint(1, RAW_TOKENS // 2)
                await front_end.wait_for(lambda some=some: len(front_end.choices[0].tokens) >= some)  # type: ignore[misc]
                tally.cut += 2
                continue
            await front_end.finished(0, 1)
            for choice in front_end.choices.values():
                if choice.reason != pb.FINISH_REASON_LENGTH or choice.terminal_events != 1:
                    tally.lost += 1
                    tally.problem(f"lost: a front end's request ended with {choice.reason} and {choice.error}")
                    continue
                tally.finished += 1
                if choice.tokens != expected:
                    tally.wrong += 1
                    tally.problem(f"wrong: a front end got {choice.tokens} instead of {expected}")
        await asyncio.sleep(draw.uniform(0, 1))


async def trouble(server: Server, tally: Tally, until: float) -> None:
    """Kills and stops the worker in turn, each time when it has done something again."""
    at = time.monotonic() + FIRST_S
    while at < until:
        await asyncio.sleep(at - time.monotonic())
        await tally.more_tokens(20)
        worker = server.worker()
        if worker is not None:
            if tally.worker_kills <= tally.worker_stops:
                worker.send_signal(signal.SIGKILL)
                tally.worker_kills += 1
            else:
                worker.send_signal(signal.SIGSTOP)
                tally.worker_stops += 1
            say(f"worker {worker.pid}: {'stopped' if tally.worker_stops == tally.worker_kills else 'killed'}")
        at = time.monotonic() + SPACING_S


async def check_rest(server: Server, tally: Tally) -> None:
    """Everything that was taken must be free again."""
    stats = (await server.info()).stats
    async with asyncio.timeout(30):
        while stats.running or stats.waiting:  # what left last
            await asyncio.sleep(0.2)
            stats = (await server.info()).stats
    if stats.free_blocks != stats.num_blocks:
        tally.problem(f"{stats.num_blocks - stats.free_blocks} blocks are not free although nothing runs")


async def run(options: argparse.Namespace) -> Tally:
    """Runs it all and returns what happened."""
    tally = Tally()
    draw = random.Random(options.seed)
    async with serve(options.model, options.flags) as server:
        say("asking for what is right")
        expected = [await stream(server, request, Tally(), None, draw) for request in REQUESTS]
        async with Client(server.engine, patience=END_S) as front_end:
            await front_end.submit(0, RAW_PROMPT, max_tokens=RAW_TOKENS)
            await front_end.finished(0)
            tokens = front_end.choices[0].tokens
        say(f"breaking things for {options.duration:g} s")
        until = time.monotonic() + options.duration
        async with asyncio.timeout(options.duration + END_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(trouble(server, tally, until))
            tasks.create_task(front_ends(server, tokens, tally, until, random.Random(draw.random())))
            for _ in range(options.concurrency):
                tasks.create_task(client(server, expected, tally, until, random.Random(draw.random())))
        await check_rest(server, tally)
        server.process.send_signal(signal.SIGINT)
        code = await asyncio.wait_for(server.process.wait(), 30)
        if code:
            tally.problem(f"the server ended with exit code {code}")
    return tally


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="what is served")
    parser.add_argument("--duration", type=float, default=120.0, help="seconds for which things break (%(default)g)")
    parser.add_argument("--concurrency", type=int, default=12, help="streams that run at once (%(default)d)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (%(default)d)")
    parser.add_argument("--flag", dest="flags", action="append", default=[], help="further flag of `tercet serve`")
    tally = asyncio.run(run(parser.parse_args()))
    tally.longest_pause_s = round(tally.longest_pause_s, 3)
    print(json.dumps(asdict(tally)))
    return 1 if tally.wrong or tally.lost or tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
