"""Asks a whole `tercet serve` everything at once for a long time, and looks whether it grows.

    python -m tests.bench.soak [--model MODEL] [--duration 1200] [--concurrency 24] [--frontends 1] [--seed 0]

Clients ask one thing after another, drawn at random: chats and completions, whole and streamed, several choices, stop
strings, log-probabilities, JSON schemas, Anthropic messages, responses, embeddings, long prompts, tokens; things that
are wrong; and some leave in mid-stream, politely or with a reset of their connection. Without --model a tiny random one
is served, which leaves the processors to everything around the model.

After a warm-up (a fifth of the time, a minute at most) in which caches fill, the resident memory of every process is
taken each second. The last line is a JSON object with the medians over the first, the middle and the last tenth, in
MiB, and with the open descriptors at rest before and after. Exit code 1

* where a process has grown by more than `GROWTH_MIB` and `GROWTH_SHARE` of what it had,
* where it has more than `MORE_DESCRIPTORS` descriptors more,
* where a request was not answered as it should, a process was started again, or the server did not stop with 0.
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
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from tercet_tools.bench.http import HttpClient, RequestFailedError, Whole
from tests.fakes.checkpoints import write_tiny_llama

GROWTH_MIB = 16.0
GROWTH_SHARE = 0.05
MORE_DESCRIPTORS = 4
READY_S = 600.0
REST_S = 30.0
STOP_S = 30.0
SAMPLE_S = 1.0
NAME = "soak"

WORDS = (
    "the",
    "keeper",
    "counted",
    "waves",
    "and",
    "wrote",
    "numbers",
    "that",
    "nobody",
    "had",
    "asked",
    "for",
    "at 3",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Ask:
    """A request, and how its answer must look.

    Attributes:
        kind: for the counts.
        path: where to.
        body: what.
        status: that it gets.
        last: with which its answer ends; empty for anything.
        leaves: whether the client leaves after the first bytes.
    """

    kind: str
    path: str
    body: dict[str, Any]
    status: int = 200
    last: bytes = b""
    leaves: bool = False


def draw(chance: random.Random) -> Ask:
    """Returns a request."""

    def text(low: int, high: int) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(low, high)))

    def messages(low: int = 3, high: int = 60) -> list[dict[str, str]]:
        return [{"role": "user", "content": text(low, high)}]

    chat, completions = "/v1/chat/completions", "/v1/completions"
    plain = {"model": NAME, "max_tokens": chance.randint(1, 64), "seed": chance.getrandbits(32), "ignore_eos": True}
    streamed: dict[str, Any] = {"stream": True}
    done = b"data: [DONE]\n\n"
    asks = [
        (20, lambda: Ask("chat", chat, plain | streamed | {"messages": messages()}, last=done)),
        (8, lambda: Ask("whole chat", chat, plain | {"messages": messages()})),
        (8, lambda: Ask("choices", chat, plain | streamed | {"messages": messages(), "n": 3}, last=done)),
        (8, lambda: Ask("completion", completions, plain | streamed | {
            "prompt": text(3, 60), "stop": ["e "]}, last=done)),
        (4, lambda: Ask("prompts", completions, plain | {"prompt": [text(3, 9), text(3, 9)], "n": 2, "max_tokens": 8})),
        (4, lambda: Ask("logprobs", chat, plain | {"messages": messages(), "logprobs": True, "top_logprobs": 5})),
        (4, lambda: Ask("prompt logprobs", completions, plain | {"prompt": text(3, 40), "echo": True, "logprobs": 3})),
        (4, lambda: Ask("long prompt", completions, plain | {"prompt": [5] * chance.randint(500, 1_800)})),
        (4, lambda: Ask("messages", "/v1/messages", {
            "model": NAME, "max_tokens": 20, "messages": messages(), "stream": True})),
        (4, lambda: Ask("response", "/v1/responses", {
            "model": NAME, "max_output_tokens": 20, "input": text(3, 60), "store": False})),
        (4, lambda: Ask("schema", chat, plain | streamed | {
            "messages": messages(), "max_tokens": 80, "response_format": {
                "type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, last=done)),
        (2, lambda: Ask("tokens", "/tokenize", {"model": NAME, "prompt": text(3, 2_000)})),
        (2, lambda: Ask("embedding", "/v1/embeddings", {"model": NAME, "input": [text(3, 60), text(3, 60)]})),
        (4, lambda: Ask("wrong field", chat, plain | {"messages": messages(), "temperature": "hot"}, 400)),
        (4, lambda: Ask("no such model", chat, plain | {"messages": messages(), "model": "other"}, 404)),
        (2, lambda: Ask("too long", completions, plain | {"prompt": [5] * 5_000}, 400)),
        (2, lambda: Ask("wrong grammar", chat, plain | {"messages": messages(), "guided_regex": "(a"}, 400)),
        (12, lambda: Ask("left", chat, plain | streamed | {"messages": messages(), "max_tokens": 400}, leaves=True)),
        (4, lambda: Ask("left whole", chat, plain | {"messages": messages(), "max_tokens": 400}, leaves=True)),
    ]  # fmt: skip
    (chosen,) = chance.choices([ask for _, ask in asks], [weight for weight, _ in asks])
    return chosen()


@dataclass
class Tally:
    """What was asked, and what went wrong."""

    asked: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        """Notes what went wrong; shows the first few."""
        self.failures += 1
        if len(self.problems) < 20:
            self.problems.append(text)
            say(text)


def say(text: str) -> None:
    """Shows what happens; standard output is for the result."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@dataclass
class Server:
    """One `tercet serve`."""

    process: asyncio.subprocess.Process
    url: str

    def processes(self) -> dict[str, psutil.Process]:
        """Returns its processes by name."""
        own = psutil.Process(self.process.pid)
        found = {"supervisor": own}
        for child in own.children():
            words = " ".join(child.cmdline())
            number = re.search(r"http(\d+)\.sock", words)
            for name in ("frontend", "core", "worker"):
                if f"tercet_{name}" in words:
                    found[f"{name} {number[1]}" if number else name] = child
        return found


@contextlib.asynccontextmanager
async def serve(model: str, options: argparse.Namespace) -> AsyncIterator[Server]:
    """Starts the server on a free port; kills it if it still runs at the end."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as run_base:
        command = [sys.executable, "-m", "tercet_shared.cli", "serve", "--port=0", f"--run-dir={run_base}"]
        # A small pool of blocks is soon full of cached prefixes; a large one would look like growth.
        command += [f"--served-model-name={NAME}", "--num-kv-blocks=4096", "--max-num-seqs=64", "--max-model-len=2048"]
        command += [f"--frontends={options.frontends}", *options.flags, model]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout is not None
            found = None
            async with asyncio.timeout(READY_S):
                while found is None and (line := await process.stdout.readline()):
                    found = re.search(rb"listens on (http://\S+)", line)
            if found is None:
                raise SystemExit("error: the server did not start")
            yield Server(process, found[1].decode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def ask(client: HttpClient, url: str, what: Ask, chance: random.Random) -> str | None:
    """Sends a request; returns what was wrong with its answer, or None."""
    body = json.dumps(what.body).encode()
    if what.leaves:
        await leave(url, what.path, body, chance)
        return None
    answer = Whole()
    try:
        await client.post(what.path, body, answer)
    except RequestFailedError as error:
        return f"{what.kind}: {error}"
    data = answer.data
    right = answer.status == what.status and data.endswith(what.last)
    if not right or (data[:20].find(b'"error"') >= 0) != (what.status != 200):
        return f"{what.kind}: {answer.status} {data[-300:]!r}"
    return None


async def leave(url: str, path: str, body: bytes, chance: random.Random) -> None:
    """Sends a request and leaves, at once or after some of its answer."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(chance.uniform(0, 0.3)):
            await reader.read(chance.randint(1, 20_000))
    if chance.random() < 0.5:  # a reset instead of a polite end
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


async def client(server: Server, tally: Tally, until: float, chance: random.Random) -> None:
    """Asks one thing after another until the time is over."""
    http = HttpClient(server.url, timeout=120)
    while time.monotonic() < until:
        what = draw(chance)
        tally.asked[what.kind] += 1
        wrong = await ask(http, server.url, what, chance)
        if wrong is not None:
            tally.problem(wrong)
    http.close()


async def at_rest(server: Server) -> dict[str, int]:
    """Returns the open descriptors of each process, when no connection is left that they have to close."""
    counts: dict[str, int] = {}
    async with asyncio.timeout(REST_S):
        steady = 0
        while steady < 3:
            await asyncio.sleep(0.5)
            now = {name: process.num_fds() for name, process in server.processes().items()}
            steady = steady + 1 if now == counts else 0
            counts = now
    return counts


async def watch(server: Server, samples: list[dict[str, float]], until: float) -> None:
    """Adds the resident memory of each process in MiB, every second."""
    shown = time.monotonic()
    while time.monotonic() < until:
        found = {name: process.memory_info().rss / 2**20 for name, process in server.processes().items()}
        samples.append(found)
        if time.monotonic() - shown >= 30:
            shown = time.monotonic()
            say("MiB: " + ", ".join(f"{name} {size:.0f}" for name, size in found.items()))
        await asyncio.sleep(SAMPLE_S)


def judged(samples: list[dict[str, float]], tally: Tally) -> dict[str, list[float]]:
    """Returns the memory of each process in the first, the middle and the last tenth, and notes growth."""
    tenth = max(len(samples) // 10, 1)
    middle = len(samples) // 2
    windows = (samples[:tenth], samples[middle : middle + tenth], samples[-tenth:])
    sizes: dict[str, list[float]] = {}
    for name in samples[0]:
        sizes[name] = [
            round(statistics.median([sample[name] for sample in window if name in sample] or [0.0]), 1)
            for window in windows
        ]
        begin, _, end = sizes[name]
        if end - begin > max(GROWTH_MIB, GROWTH_SHARE * begin):
            tally.problem(f"the {name} has grown from {begin} to {end} MiB")
    return sizes


async def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    tally = Tally()
    chance = random.Random(options.seed)
    samples: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="tc-") as directory:
        model = options.model or str(write_tiny_llama(Path(directory, "tiny")))
        async with serve(model, options) as server:
            pids = {name: process.pid for name, process in server.processes().items()}
            warm = HttpClient(server.url)
            for _ in range(30):  # what is made once is made now
                await ask(warm, server.url, draw(chance), chance)
            warm.close()
            before = await at_rest(server)
            begin = time.monotonic()
            until = begin + options.duration
            warm_up = min(options.duration / 5, 60.0)
            say(f"asking for {options.duration:g} s")
            async with asyncio.TaskGroup() as tasks:
                for _ in range(options.concurrency):
                    tasks.create_task(client(server, tally, until, random.Random(chance.random())))
                await asyncio.sleep(warm_up)
                await watch(server, samples, until)
            after = await at_rest(server)
            for name, count in after.items():
                if count > before.get(name, 0) + MORE_DESCRIPTORS:
                    tally.problem(f"the {name} has {count} open descriptors, and had {before.get(name)}")
            if {name: process.pid for name, process in server.processes().items()} != pids:
                tally.problem("a process was started again")
            server.process.send_signal(signal.SIGINT)
            code = await asyncio.wait_for(server.process.wait(), STOP_S)
            if code:
                tally.problem(f"the server ended with exit code {code}")
    sizes = judged(samples, tally)
    result = {
        "seconds": options.duration,
        "requests": sum(tally.asked.values()),
        "failures": tally.failures,
        "asked": dict(tally.asked.most_common()),
        "memory_mib": {
            name: dict(zip(("start", "middle", "end"), found, strict=True)) for name, found in sizes.items()
        },
        "descriptors": {name: {"before": before.get(name), "after": count} for name, count in after.items()},
        "problems": tally.problems,
    }
    print(json.dumps(result))
    return int(tally.failures > 0)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="what is served; by default a tiny random model")
    parser.add_argument("--duration", type=float, default=1_200.0, help="seconds (%(default)g)")
    parser.add_argument("--concurrency", type=int, default=24, help="clients (%(default)d)")
    parser.add_argument("--frontends", type=int, default=1, help="front ends (%(default)d)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (%(default)d)")
    parser.add_argument("--flag", dest="flags", action="append", default=[], help="further flag of `tercet serve`")
    return int(uvloop.run(run(parser.parse_args())))


if __name__ == "__main__":
    sys.exit(main())
