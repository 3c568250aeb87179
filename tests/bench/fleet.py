"""Runs a fleet, breaks it on purpose under load, and counts what clients notice: nothing but pauses is right.

    python -m tests.bench.fleet MODEL [--rounds 1] [--concurrency 8] [--seed 0]

Starts a Valkey, three cores with a worker each, and two front ends, every one a process of this machine as `tercet
core`, `tercet worker` and `tercet frontend` are started by an operator. A fixed set of requests is asked one by one
first: chats and completions, whole and streamed, greedy and seeded, two choices, stop strings, log-probabilities, a
JSON schema, a tool call. What comes is what is right. Then clients ask the same all the time, for a while in peace,
which gives the latencies to compare with, and then while

* a core is killed, and started again under the same address,
* a worker is killed, and started again,
* every core, every worker and every front end is restarted in turn (SIGTERM, then a new process),
* Valkey is killed and started again empty, and stopped (SIGSTOP) for a while.

Clients act as a load balancer would have them: they use front ends that are ready, and go to another one when a
connection is refused or answered with 503 before anything was said.

The last line is a JSON object: requests ``started``, ``finished``, ``failed`` (an error, no end, or a second one) and
``wrong`` (another text, end or usage), choices ``migrated`` from core to core as the front ends counted them, and the
time to the first event and the longest silence within a stream, in peace and in trouble. Exit code 1 unless failed and
wrong are zero and something was migrated.

A greedy token may differ where two candidates are closer than rounding; the prompts are those of `tests.bench.chaos`,
whose margins are known for SmolLM2-135M-Instruct, and everything is computed in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvloop

from tests.bench.chaos import PROMPTS
from tests.fakes.ports import free_port
from tests.fakes.redis_server import RedisServer, server_binary

CORES = 3
FRONT_ENDS = 2
NAME = "fleet"
READY_S = 300.0
ANSWER_S = 240.0
"""For one answer, with all the pauses that restarts make."""
GRACE_S = 4
"""Of cores: shorter than many answers here, so that some are handed over."""
FRONT_END_GRACE_S = 120
PEACE_S = 15.0
BETWEEN_S = 4.0
"""Of load between two troubles."""
OUTAGE_S = 6.0

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "year": {"type": "integer"}},
    "required": ["name", "year"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string", "maxLength": 24}},
            "required": ["what"],
            "additionalProperties": False,
        },
    },
}


def say(text: str) -> None:
    """Shows what happens; standard output is for the result."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Ask:
    """A request, and whether its answer is streamed."""

    path: str
    body: dict[str, Any]
    stream: bool


def asks() -> list[Ask]:
    """Returns everything that is asked."""
    greedy, seeded = {"temperature": 0}, {"temperature": 0.8, "top_p": 0.95, "seed": 11}
    schema = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "s"}}
    kinds: list[dict[str, Any]] = [
        greedy | {"max_tokens": 60},
        seeded | {"max_tokens": 60},
        greedy | {"max_tokens": 40, "n": 2},
        seeded | {"max_tokens": 40, "n": 2},
        greedy | {"max_tokens": 80, "stop": [" the ", "."], "ignore_eos": True},
        greedy | {"max_tokens": 40, "logprobs": True, "top_logprobs": 2},
        greedy | {"max_tokens": 80, "response_format": schema},
        greedy | {"max_tokens": 80, "tools": [TOOL], "tool_choice": "required"},
    ]  # fmt: skip
    found = []
    for index, kind in enumerate(kinds):
        for stream in (True, False):
            messages = [{"role": "user", "content": PROMPTS[index % len(PROMPTS)]}]
            found.append(Ask("/v1/chat/completions", kind | {"messages": messages}, stream))
    found += [
        Ask("/v1/completions", way | {"prompt": prompt, "max_tokens": 100, "ignore_eos": True}, stream=True)
        for prompt in PROMPTS[:4]
        for way in (greedy, seeded)
    ]
    return found


@dataclass
class Latencies:
    """Of streams: seconds to the first event, and the longest silence of each."""

    first: list[float] = field(default_factory=list)
    silence: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Returns medians, 99th percentiles and the worst, in milliseconds."""
        found: dict[str, float] = {"streams": len(self.first)}
        for name, values in (("first", self.first), ("silence", self.silence)):
            if len(values) > 1:
                cuts = statistics.quantiles(values, n=100)
                for label, value in (("p50", cuts[49]), ("p99", cuts[98]), ("max", max(values))):
                    found[f"{name}_{label}_ms"] = round(value * 1e3, 1)
        return found


@dataclass
class Tally:
    """What happened."""

    started: int = 0
    finished: int = 0
    failed: int = 0
    wrong: int = 0
    turned_away: int = 0
    """Attempts that a front end refused before it said anything, and that another one took."""
    problems: list[str] = field(default_factory=list)
    peace: Latencies = field(default_factory=Latencies)
    trouble: Latencies = field(default_factory=Latencies)

    def problem(self, text: str) -> None:
        """Notes what went wrong, the first few times."""
        say(text)
        if len(self.problems) < 20:
            self.problems.append(text[:600])


# ---------------------------------------------------------------------------------------------------- processes


@dataclass
class Service:
    """One process of the fleet, started as often as wanted with the same arguments."""

    name: str
    arguments: Sequence[str]
    log: Path
    process: asyncio.subprocess.Process | None = None
    starts: int = 0
    before: Sequence[str] = ()
    """A command that runs it, as ``ip netns exec``."""

    async def start(self) -> None:
        """Starts it; what it writes goes to its log."""
        self.starts += 1
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(*self.before, sys.executable, "-m", "tercet_shared.cli", *self.arguments), stdout=log, stderr=log
            )

    async def stop(self) -> None:
        """Asks it to end, and waits until it has."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(FRONT_END_GRACE_S + 30):
            code = await self.process.wait()
        if code:
            raise SystemExit(f"error: {self.name} ended with exit code {code} after SIGTERM; see {self.log}")

    async def kill(self) -> None:
        """Kills it, as a machine that is lost does."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@dataclass
class FrontEnd(Service):
    """A front end, and what it has counted over all its lives."""

    port: int = 0
    metrics_port: int = 0
    open: bool = False
    """Whether a load balancer would send it requests."""
    migrated: float = 0.0
    _counted: float = 0.0

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    async def count(self, http: httpx.AsyncClient) -> None:
        """Takes in what its present life has counted so far."""
        answer = await http.get(f"http://127.0.0.1:{self.metrics_port}/metrics")
        values = re.findall(r"^tercet_frontend_migrations_total(?:\{[^}]*\})? ([0-9.e+]+)$", answer.text, re.MULTILINE)
        self._counted = sum(map(float, values))

    def renew(self) -> None:
        """A new life begins, which counts from zero."""
        self.migrated += self._counted
        self._counted = 0.0

    @property
    def total(self) -> float:
        """Choices that it has carried to another core."""
        return self.migrated + self._counted


class Fleet:
    """All processes, in ``directory``."""

    def __init__(
        self, model: str, directory: Path, http: httpx.AsyncClient, *, cores: int = CORES, front_ends: int = FRONT_ENDS
    ) -> None:
        self.http = http
        self.redis = RedisServer(server_binary(), directory)
        common = [f"--redis-url={self.redis.url}", "--log-level=info"]
        self.cores: list[Service] = []
        self.workers: list[Service] = []
        self.front_ends: list[FrontEnd] = []
        for number in range(cores):
            link, name = directory / f"link{number}.sock", f"core {number}"
            core = ["core", f"--listen=127.0.0.1:{free_port()}", f"--link={link}", f"--model={model}"]
            core += [f"--core-id=core-{number}", f"--grace={GRACE_S}", f"--served-model-name={NAME}", *common]
            self.cores.append(Service(name, core, directory / f"core{number}.log"))
            worker = ["worker", f"--link={link}", "--dtype=float32", "--threads=1", "--max-num-seqs=32", model]
            self.workers.append(Service(f"worker {number}", worker, directory / f"worker{number}.log"))
        for number in range(front_ends):
            ports = {"port": free_port(), "metrics_port": free_port()}
            flags = [f"--port={ports['port']}", f"--metrics-port={ports['metrics_port']}"]
            front_end = ["frontend", *flags, f"--grace={FRONT_END_GRACE_S}", *common, f"{NAME}={model}"]
            log = directory / f"frontend{number}.log"
            self.front_ends.append(FrontEnd(f"front end {number}", front_end, log, **ports))

    @property
    def services(self) -> list[Service]:
        """All but the registry."""
        return [*self.cores, *self.workers, *self.front_ends]

    async def start(self) -> None:
        """Starts everything; returns when all cores can be reached through all front ends."""
        await self.redis.start()
        for service in self.services:
            await service.start()
        for front_end in self.front_ends:
            await self.wait_ready(front_end)

    async def wait_ready(self, front_end: FrontEnd) -> None:
        """Returns when ``front_end`` takes requests and all cores are ready behind it."""
        async with asyncio.timeout(READY_S):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    ready = await self.http.get(f"{front_end.url}/readyz")
                    if ready.status_code == 200 and await self.ready_cores(front_end) >= len(self.cores):
                        front_end.open = True
                        return
                await asyncio.sleep(0.1)  # a probe, as an orchestrator's

    async def ready_cores(self, front_end: FrontEnd) -> int:
        """Returns how many cores ``front_end`` counts as ready."""
        answer = await self.http.get(f"http://127.0.0.1:{front_end.metrics_port}/metrics")
        found = re.search(r'^tercet_frontend_cores\{[^}]*state="ready"[^}]*\} ([0-9.e+]+)$', answer.text, re.MULTILINE)
        return int(float(found[1])) if found else 0

    async def wait_whole(self) -> None:
        """Returns when all cores are ready again behind all front ends that run."""
        for front_end in self.front_ends:
            await self.wait_ready(front_end)

    async def end(self) -> None:
        """Kills what still runs."""
        for service in self.services:
            await service.kill()
        await self.redis.stop()


# ---------------------------------------------------------------------------------------------------- clients


class TurnedAwayError(Exception):
    """The front end took nothing: another one may."""


def normal(value: Any) -> Any:
    """Returns what must be the same in every run: no ids, no times, log-probabilities to 1e-3, no cache figures."""
    if isinstance(value, dict):
        skipped = ("id", "created", "system_fingerprint", "prompt_tokens_details", "service_tier")
        return {key: normal(each) for key, each in value.items() if key not in skipped}
    if isinstance(value, list):
        return [normal(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


async def ask(http: httpx.AsyncClient, url: str, one: Ask, latencies: Latencies | None) -> Any:
    """Returns the answer, streamed or not, in a form that can be compared.

    Raises:
        TurnedAwayError: nothing was said.
        RuntimeError: it did not end as it should; the text says how.
    """
    body = one.body | {"model": NAME}
    try:
        if not one.stream:
            answer = await http.post(url + one.path, json=body)
            if answer.status_code in (429, 503):
                raise TurnedAwayError
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code} {answer.text[:300]}")
            return normal(answer.json())
        begin = time.monotonic()
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", url + one.path, json=body) as response:
            if response.status_code in (429, 503):
                raise TurnedAwayError
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code} {(await response.aread())[:300]!r}")
            return await joined(response, latencies, begin)
    except httpx.ConnectError as error:
        raise TurnedAwayError from error
    except httpx.TransportError as error:
        raise RuntimeError(f"the connection broke: {error!r}") from error


async def joined(response: httpx.Response, latencies: Latencies | None, begin: float) -> Any:
    """Returns a stream's choices, put together, and its usage; ``begin`` is when it was asked for."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    done = False
    last = first = silence = 0.0
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        now = time.monotonic()
        if not first:
            first = now - begin
        else:
            silence = max(silence, now - last)
        last = now
        if done:
            raise RuntimeError("something came after the end")
        if line == "data: [DONE]":
            done = True
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(f"an error event: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            add(choices.setdefault(choice["index"], {"text": "", "calls": {}, "logprobs": [], "ends": []}), choice)
    if not done:
        raise RuntimeError("the stream has no end")
    for choice in choices.values():
        if len(choice["ends"]) != 1:
            raise RuntimeError(f"{len(choice['ends'])} ends of a choice")
    if latencies is not None:
        latencies.first.append(first)
        latencies.silence.append(silence)
    return normal({"choices": choices, "usage": usage})


def add(choice: dict[str, Any], event: dict[str, Any]) -> None:
    """Adds one event of a choice to what came before."""
    delta = event.get("delta") or {}
    choice["text"] += event.get("text") or delta.get("content") or ""
    for call in delta.get("tool_calls") or []:
        whole = choice["calls"].setdefault(str(call["index"]), {"name": "", "arguments": ""})
        whole["name"] += call["function"].get("name") or ""
        whole["arguments"] += call["function"].get("arguments") or ""
    if (event.get("logprobs") or {}).get("content"):
        choice["logprobs"] += event["logprobs"]["content"]
    if event.get("finish_reason"):
        choice["ends"].append(event["finish_reason"])


def nameless(answer: Any) -> Any:
    """Returns ``answer`` without the ids of tool calls, which are drawn anew each time."""
    return json.loads(re.sub(r'"id": ?"[^"]*"', '"id": ""', json.dumps(answer)))


class Load:
    """Clients that ask one thing after another until they are stopped."""

    def __init__(self, fleet: Fleet, tally: Tally, expected: list[Any], everything: list[Ask], seed: int) -> None:
        self.stopping = False
        self.latencies = tally.peace
        self._fleet = fleet
        self._tally = tally
        self._expected = expected
        self._asks = everything
        self._draw = random.Random(seed)

    async def client(self) -> None:
        """One of them."""
        while not self.stopping:
            index = self._draw.randrange(len(self._asks))
            self._tally.started += 1
            try:
                answer = await self._answer(self._asks[index])
            except RuntimeError as error:
                self._tally.failed += 1
                self._tally.problem(f"failed: {self._asks[index]}: {error}")
                continue
            self._tally.finished += 1
            if nameless(answer) != self._expected[index]:
                self._tally.wrong += 1
                self._tally.problem(f"wrong: {self._asks[index]} gave {answer} instead of {self._expected[index]}")

    async def _answer(self, one: Ask) -> Any:
        async with asyncio.timeout(ANSWER_S):
            while True:
                usable = [each for each in self._fleet.front_ends if each.open]
                front_end = self._draw.choice(usable or self._fleet.front_ends)
                try:
                    return await ask(self._fleet.http, front_end.url, one, self.latencies)
                except TurnedAwayError:
                    self._tally.turned_away += 1
                    await asyncio.sleep(0.2)  # as a load balancer's next attempt


# ---------------------------------------------------------------------------------------------------- trouble


async def trouble(fleet: Fleet, draw: random.Random) -> None:
    """Does everything once that must not be noticed."""
    await kill_cores(fleet, draw)
    await kill_workers(fleet, draw)
    for service in [*fleet.cores, *fleet.workers]:
        say(f"{service.name}: restarted")
        await service.stop()
        await service.start()
        await fleet.wait_whole()
        await asyncio.sleep(BETWEEN_S)
    for front_end in fleet.front_ends:
        say(f"{front_end.name}: restarted")
        await front_end.count(fleet.http)
        front_end.open = False
        await front_end.stop()
        front_end.renew()
        await front_end.start()
        await fleet.wait_ready(front_end)
        await asyncio.sleep(BETWEEN_S)
    await registry_outage(fleet)


async def kill_cores(fleet: Fleet, draw: random.Random) -> None:
    """Kills a core with its requests, twice; it comes back under the same address."""
    for core in draw.sample(fleet.cores, 2):
        say(f"{core.name}: killed")
        await core.kill()
        await asyncio.sleep(BETWEEN_S)
        await core.start()
        await fleet.wait_whole()
        await asyncio.sleep(BETWEEN_S)


async def kill_workers(fleet: Fleet, draw: random.Random) -> None:
    """Kills a worker; its core keeps the requests."""
    worker = draw.choice(fleet.workers)
    say(f"{worker.name}: killed")
    await worker.kill()
    await worker.start()
    await asyncio.sleep(BETWEEN_S)
    await fleet.wait_whole()


async def registry_outage(fleet: Fleet) -> None:
    """Takes the registry away, gives it back empty, and makes it slow."""
    say("Valkey: killed")
    await fleet.redis.stop()
    await asyncio.sleep(OUTAGE_S)
    say("Valkey: started again, empty")
    await fleet.redis.start()
    await asyncio.sleep(BETWEEN_S)
    await fleet.wait_whole()
    assert fleet.redis.process is not None
    say("Valkey: stopped")
    fleet.redis.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(OUTAGE_S)
    fleet.redis.process.send_signal(signal.SIGCONT)
    say("Valkey: goes on")
    await asyncio.sleep(BETWEEN_S)
    await fleet.wait_whole()


@contextlib.asynccontextmanager
async def running(fleet: Fleet) -> AsyncIterator[None]:
    """A fleet that runs while this is open."""
    try:
        await fleet.start()
        yield
    finally:
        await fleet.end()


async def run(options: argparse.Namespace) -> int:
    """Runs it all; returns the exit code."""
    tally = Tally()
    draw = random.Random(options.seed)
    limits = httpx.Limits(max_keepalive_connections=0)
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as base:
        async with httpx.AsyncClient(timeout=ANSWER_S, limits=limits) as http:
            fleet = Fleet(options.model, Path(base), http)
            begin = time.monotonic()
            async with running(fleet):
                say(f"the fleet is ready after {time.monotonic() - begin:.1f} s; asking for what is right")
                everything = asks()
                expected = [nameless(await ask(http, fleet.front_ends[0].url, one, None)) for one in everything]
                load = Load(fleet, tally, expected, everything, options.seed)
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(options.concurrency):
                        tasks.create_task(load.client())
                    say(f"{options.concurrency} clients ask for {PEACE_S:g} s in peace")
                    await asyncio.sleep(PEACE_S)
                    load.latencies = tally.trouble
                    for _ in range(options.rounds):
                        await trouble(fleet, draw)
                    load.stopping = True
                for front_end in fleet.front_ends:
                    await front_end.count(http)
                for service in [*fleet.front_ends, *fleet.cores, *fleet.workers]:
                    await service.stop()
        if tally.failed or tally.wrong:
            for log in sorted(Path(base).glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-4000:]}", file=sys.stderr)
    migrated = int(sum(front_end.total for front_end in fleet.front_ends))
    result = {
        "started": tally.started, "finished": tally.finished, "migrated": migrated, "failed": tally.failed,
        "wrong": tally.wrong, "turned_away": tally.turned_away, "restarts": sum(s.starts - 1 for s in fleet.services),
        "peace": tally.peace.figures(), "trouble": tally.trouble.figures(), "problems": tally.problems,
    }  # fmt: skip
    print(json.dumps(result))
    return 0 if migrated and not (tally.failed or tally.wrong) else 1


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="what is served")
    parser.add_argument("--rounds", type=int, default=1, help="how often everything is broken (%(default)d)")
    parser.add_argument("--concurrency", type=int, default=8, help="clients that ask at once (%(default)d)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (%(default)d)")
    return uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
