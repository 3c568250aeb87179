"""Load generator: streams completions of random prompts, and prints one JSON object per concurrency.

Prompts are token ids, drawn anew for every request, so that no prompt is in a prefix cache; EOS is ignored, so that
every answer has the same length. The client is a bare HTTP/1.1 reader over asyncio, because it shares the machine with
the server: what it spends per token would be measured as the server's.

With --serve MODEL it starts `tercet serve` on a free port, measures it, reports the resident memory of each of its
processes, and stops it. With --url it measures a server that runs. With --peer it measures a second server too, both in
turn in every round, and prints the ratios of the medians, in which a drift of the machine's speed cancels.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

_READY_S = 600.0
_ANSWER_S = 600.0


@dataclass(frozen=True)
class Load:
    """What is asked of a server: ``requests`` per round, ``concurrency`` at once, each with these numbers of tokens."""

    concurrency: int
    input: int
    output: int
    requests: int
    vocabulary: range


@dataclass
class Sample:
    """Times of one request in seconds; ``gaps`` between content events after the first."""

    ttft: float
    total: float
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first."""
        return (self.total - self.ttft) / max(self.tokens - 1, 1)


class Server:
    """An OpenAI-style server to be measured."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or parts.hostname is None:
            raise SystemExit(f"error: {url} is not an http URL")
        self.host, self.port = parts.hostname, parts.port or 80
        self._model = model
        self._headers = f"Host: {self.host}\r\n" + (f"Authorization: Bearer {api_key}\r\n" if api_key else "")

    async def model(self) -> str:
        """Returns the name of the model that is asked for: the given one, else the first that the server lists."""
        if self._model is None:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            with contextlib.closing(writer):
                writer.write(f"GET /v1/models HTTP/1.0\r\n{self._headers}\r\n".encode())
                _, _, body = (await reader.read()).partition(b"\r\n\r\n")
            self._model = str(json.loads(body)["data"][0]["id"])
        return self._model

    async def complete(self, prompt: list[int], output: int) -> Sample:
        """Streams one completion of ``output`` tokens. Raises RuntimeError if it is not answered with just that."""
        body = json.dumps(
            {
                "model": await self.model(),
                "prompt": prompt,
                "max_tokens": output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 20)
        with contextlib.closing(writer):
            begin = time.perf_counter()
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\n{self._headers}Content-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                + body
            )
            head = await reader.readuntil(b"\r\n\r\n")
            if head.split(None, 2)[1] != b"200":
                answer = head + await reader.read(2000)
                raise RuntimeError(answer.decode(errors="replace"))
            chunked = b"transfer-encoding: chunked" in head.lower()
            return await self._read_stream(_events(reader, chunked), begin, output)

    async def _read_stream(self, events: AsyncIterator[bytes], begin: float, output: int) -> Sample:
        sample = Sample(ttft=0.0, total=0.0)
        last = 0.0
        done = False
        async for event in events:
            if event == b"[DONE]":
                done = True
                continue
            if b'"error"' in event:
                raise RuntimeError(event.decode(errors="replace"))
            now = time.perf_counter()
            # An event with a finish reason or usage only carries no token; looking for text avoids parsing every event.
            if b'"choices":[]' in event.replace(b" ", b"") or b'"usage":{' in event.replace(b" ", b""):
                usage = json.loads(event).get("usage")
                sample.tokens = usage["completion_tokens"] if usage else sample.tokens
                if not json.loads(event)["choices"]:
                    continue
            if b'"text":""' in event.replace(b" ", b""):
                continue  # it only brings the finish reason
            if not last:
                sample.ttft = now - begin
            else:
                sample.gaps.append(now - last)
            last = now
        sample.total = last - begin
        if not done or sample.tokens != output:
            raise RuntimeError(f"the stream ended after {sample.tokens} of {output} tokens (complete: {done})")
        return sample


async def _events(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """Yields the data of each server-sent event."""
    buffer = bytearray()
    while True:
        if chunked:
            size = int(await reader.readline() or b"0", 16)
            data = await reader.readexactly(size) if size else b""
            await reader.readline()
        else:
            data = await reader.read(1 << 16)
        if not data:
            return
        buffer += data.replace(b"\r\n", b"\n")
        *events, rest = buffer.split(b"\n\n")
        buffer = rest
        for event in events:
            if event.startswith(b"data: "):
                yield bytes(event[6:])


async def run_round(server: Server, load: Load, seed: int) -> dict[str, float]:
    """Runs one round of ``load`` and returns its figures: times in milliseconds, throughput in tokens per second."""
    source = random.Random(seed)
    prompts = [source.choices(load.vocabulary, k=load.input) for _ in range(load.requests)]
    samples: list[Sample] = []

    async def client() -> None:
        while prompts:
            samples.append(await server.complete(prompts.pop(), load.output))

    await server.model()
    begin = time.perf_counter()
    async with asyncio.timeout(_ANSWER_S), asyncio.TaskGroup() as clients:
        for _ in range(load.concurrency):
            clients.create_task(client())
    took = time.perf_counter() - begin
    gaps = [gap for sample in samples for gap in sample.gaps]
    return {
        "ttft_median_ms": 1e3 * statistics.median(sample.ttft for sample in samples),
        "ttft_p99_ms": 1e3 * percentile((sample.ttft for sample in samples), 0.99),
        "tpot_median_ms": 1e3 * statistics.median(sample.tpot for sample in samples),
        "itl_p99_ms": 1e3 * percentile(gaps, 0.99),
        "output_tokens_per_s": sum(sample.tokens for sample in samples) / took,
        "events_per_token": (len(gaps) + len(samples)) / sum(sample.tokens for sample in samples),
    }


def percentile(values: Iterable[float], share: float) -> float:
    """Returns the smallest of ``values`` that at least ``share`` of them do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


async def measure(servers: dict[str, Server], load: Load, rounds: int, seed: int) -> dict[str, object]:
    """Runs all rounds, the servers in turn, and returns what is printed for this load."""
    figures: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(rounds):
        for name, server in servers.items():
            figures[name].append(await run_round(server, load, seed + number))
    result: dict[str, object] = {
        "concurrency": load.concurrency,
        "input": load.input,
        "output": load.output,
        "requests": load.requests,
        "rounds": rounds,
        **{name: medians(rows) for name, rows in figures.items()},
    }
    if "peer" in figures:
        pairs = zip(figures["server"], figures["peer"], strict=True)
        result["ratio"] = medians([{key: a[key] / b[key] for key in a if b[key]} for a, b in pairs])
    return result


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each figure over the rounds."""
    return {key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0]}


@contextlib.asynccontextmanager
async def started(model: str, flags: list[str]) -> AsyncIterator[tuple[str, int]]:
    """Runs `tercet serve` on a free port; yields its URL and its process id once it is ready."""
    command = [sys.executable, "-m", "tercet_shared.cli", "serve", "--port=0", "--log-level=warning", *flags, model]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_READY_S):
            line = (await process.stdout.readline()).decode()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise SystemExit(await process.wait() or 1)  # it has said why
        yield found[0], process.pid
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def resident(supervisor: int) -> dict[str, float]:
    """Returns the resident memory of the supervisor and of its children, in MiB."""
    pids = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    result = {"supervisor": _rss(supervisor)}
    for pid in map(int, pids):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        name = next((word for word in command if word.startswith("tercet_")), command[0])
        result[name.removeprefix("tercet_")] = _rss(pid)
    return result


def _rss(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options; what is not known is handed to `tercet serve`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--serve", metavar="MODEL", help="start `tercet serve` with this model (further flags go to it)")
    which.add_argument("--url", help="a server that runs")
    parser.add_argument("--peer", help="a second server that runs")
    parser.add_argument("--model", help="name to ask for; by default the first that the server lists")
    parser.add_argument("--peer-model", help="the same for the peer")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--input", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--requests", type=int, help="requests per round; by default four per stream and four more")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="by default another one each time, so that nothing is cached")
    parser.add_argument("--vocabulary", type=int, nargs=2, default=[100, 49_000], help="range of the random token ids")
    options, rest = parser.parse_known_args(argv)
    if rest and options.serve is None:
        parser.error(f"unknown: {' '.join(rest)}")
    options.flags = rest
    return options


async def main() -> None:
    """Measures what the command line asks for."""
    options = parse()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that the server is stopped
    key = os.environ.get("TERCET_API_KEY")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**48)
    async with contextlib.AsyncExitStack() as stack:
        url, supervisor = options.url, None
        if options.serve is not None:
            url, supervisor = await stack.enter_async_context(started(options.serve, options.flags))
        servers = {"server": Server(url, options.model, key)}
        if options.peer:
            servers["peer"] = Server(options.peer, options.peer_model, key)
        for server in servers.values():  # the first request of a process pays for what later ones find warm
            await run_round(server, Load(1, 8, 4, 1, range(*options.vocabulary)), seed - 1)
        for index, concurrency in enumerate(options.concurrency):
            requests = options.requests or concurrency * 4 + 4
            load = Load(concurrency, options.input, options.output, requests, range(*options.vocabulary))
            result = await measure(servers, load, options.rounds, seed + 1000 * index)
            if supervisor is not None:
                result["resident_mib"] = resident(supervisor)
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except* (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
    except* (RuntimeError, OSError, EOFError) as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        sys.exit(f"error: {first}")
