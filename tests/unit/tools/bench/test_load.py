"""Closed and open loops against a server over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math

import pytest

from tercet_tools.bench.http import HttpClient
from tercet_tools.bench.load import Generator, Load, Run
from tercet_tools.bench.prompts import RandomIds
from tercet_tools.bench.settings import Span
from tercet_tools.bench.target import Target
from tests.fakes.openai_server import Answer, FakeServer, tokens

PROMPTS = RandomIds(
    vocabulary=Span(10, 99), input_tokens=Span(3, 3), output_tokens=Span(4, 4), shared_prefix=1, prefix_seed=0
)


@contextlib.contextmanager
def generator(server: FakeServer, load: Load, seed: int = 1):  # type: ignore[no-untyped-def]
    client = HttpClient(server.url, timeout=20)
    target = Target(url=server.url, client=client, model="m", endpoint="completions", fields={"temperature": 0})
    yield Generator(target, load, PROMPTS, seed)
    client.close()


def closed(clients: int, requests: int | None, duration: float | None = None) -> Load:
    return Load(kind="concurrency", value=clients, requests=requests, duration=duration)


def opened(rate: float, requests: int) -> Load:
    return Load(kind="request_rate", value=rate, requests=requests, duration=None)


async def test_a_closed_loop_has_so_many_requests_at_once_and_in_all() -> None:
    gate = asyncio.Event()
    async with FakeServer(lambda body: Answer(tokens(body["max_tokens"]), gate=gate)) as server:
        with generator(server, closed(3, 8)) as loop:
            measuring = asyncio.create_task(loop.measure())
            await server.asked(3)
            gate.set()
            run: Run = await measuring
    assert (server.most, server.connections, len(server.bodies)) == (3, 3, 8)
    assert (len(run.samples), run.begun, run.ended, run.failures.total()) == (8, 8, 8, 0)
    assert run.elapsed > 0
    assert {sample.output_tokens for sample in run.samples} == {4}
    assert all(0 < sample.first <= sample.last <= sample.total <= run.elapsed for sample in run.samples)


async def test_every_request_is_new_and_a_seed_repeats_them() -> None:
    async with FakeServer() as server:
        for seed in (1, 1, 2):
            with generator(server, closed(1, 5), seed) as loop:
                await loop.measure()
    first, again, other = (server.bodies[start : start + 5] for start in (0, 5, 10))
    assert first == again
    prompts = [tuple(body["prompt"]) for body in first + other]
    assert len(set(prompts)) == 10
    assert len({prompt[0] for prompt in prompts}) == 1  # the shared prefix
    assert first[0] | {"prompt": []} == {
        "model": "m", "prompt": [], "max_tokens": 4, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


async def test_the_time_ends_a_closed_loop_after_what_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeServer() as server:
        monkeypatch.setattr("tercet_tools.bench.load.clock", lambda: 1.0 * len(server.bodies))  # a second each
        with generator(server, closed(2, None, 5.0)) as loop:
            run = await loop.measure()
    assert 5 <= len(run.samples) <= 6
    assert run.begun == len(run.samples)
    assert run.elapsed >= 5.0


async def test_an_infinite_rate_sends_everything_at_once() -> None:
    gate = asyncio.Event()
    async with FakeServer(lambda body: Answer(tokens(body["max_tokens"]), gate=gate)) as server:
        with generator(server, opened(math.inf, 20)) as loop:
            measuring = asyncio.create_task(loop.measure())
            await server.asked(20)
            gate.set()
            run = await measuring
    assert len(run.samples) == 20
    assert len({sample.start for sample in run.samples}) == 1  # all were due at the same moment


async def test_arrivals_are_repeatable_and_have_the_rate() -> None:
    starts = []
    async with FakeServer() as server:
        for _ in range(2):
            with generator(server, opened(2000.0, 400), seed=7) as loop:
                run = await loop.measure()
            due = sorted(sample.start for sample in run.samples)
            starts.append([moment - due[0] for moment in due])
            assert len(run.lateness) == 400
            assert min(run.lateness) >= 0
    assert starts[0] == pytest.approx(starts[1], abs=1e-6)
    assert 399 / starts[0][-1] == pytest.approx(2000, rel=0.2)


async def test_a_slow_server_does_not_slow_the_arrivals() -> None:
    gate = asyncio.Event()
    async with FakeServer(lambda body: Answer(tokens(body["max_tokens"]), gate=gate)) as server:
        with generator(server, opened(5000.0, 30)) as loop:
            measuring = asyncio.create_task(loop.measure())
            await server.asked(30)  # though none was answered
            gate.set()
            run = await measuring
    assert len(run.samples) == 30


async def test_failures_are_counted_by_kind_and_the_load_goes_on() -> None:
    def answer(body: dict) -> Answer:  # type: ignore[type-arg]
        number = len(server.bodies)
        if number % 4 == 0:
            return Answer((json.dumps({"error": {"message": f"full at {number}"}}),), status=429)
        return Answer(tokens(2)[:1], cut=True) if number % 4 == 1 else Answer(tokens(body["max_tokens"]))

    async with FakeServer(answer) as server:
        with generator(server, closed(1, 8)) as loop:
            run = await loop.measure()
    assert dict(run.failures) == {"HTTP 429": 2, "disconnected": 2}
    assert run.messages["HTTP 429"] == "HTTP 429: full at 4"
    assert (len(run.samples), run.ended) == (4, 8)


async def test_what_was_answered_stays_when_it_is_cancelled() -> None:
    gate = asyncio.Event()
    gate.set()
    async with FakeServer(lambda body: Answer(tokens(body["max_tokens"]), gate=gate)) as server:
        with generator(server, closed(2, 100)) as loop:
            measuring = asyncio.create_task(loop.measure())
            await server.asked(10)
            gate.clear()
            await server.asked(len(server.bodies) + 1)  # at least one is running
            measuring.cancel()
            with pytest.raises(asyncio.CancelledError):
                await measuring
            run: Run = loop.run
    assert len(run.samples) >= 8
    assert 1 <= run.begun - run.ended <= 2
    assert not run.failures
    assert run.elapsed > 0
