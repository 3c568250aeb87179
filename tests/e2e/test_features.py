"""Everything a request may ask for, at once: in company, beside clients that go away, and across the loss of a worker.

Each request is asked alone first; the others must get the same, streamed or whole, log-probabilities included.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Serving, serve

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "grammar and logprobs": (
        CHAT,
        {"messages": ASKED, "guided_json": PERSON, "temperature": 0, "logprobs": True, "top_logprobs": 2},
    ),
    "grammar, drawn twice": (CHAT, {"messages": ASKED, "guided_json": PERSON, "seed": 3, "n": 2}),
    "regex": (COMPLETIONS, {"prompt": "Numbers:", "guided_regex": "( [0-9]{3}){6}( [a-f]+){3}!", "seed": 9}),
    "tools": (
        CHAT,
        {
            "messages": ASKED,
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 0,
        },
    ),
    "logprobs": (
        CHAT,
        {
            "messages": ASKED,
            "temperature": 0,
            "max_tokens": 30,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 3,
        },
    ),
    "penalties": (
        CHAT,
        {
            "messages": ASKED,
            "seed": 11,
            "n": 3,
            "max_tokens": 30,
            "ignore_eos": True,
            "temperature": 0.8,
            "presence_penalty": 1,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.2,
            "logit_bias": {"28": -100, "253": 2},
            "bad_words": ["city", "the"],
        },
    ),
    "stop": (
        CHAT,
        {
            "messages": ASKED,
            "temperature": 0,
            "stop": ["iffel Tower, Lou"],
            "min_tokens": 12,
            "include_stop_str_in_output": True,
        },
    ),
    "prompts": (COMPLETIONS, {"prompt": ["Once upon a time", "The sky is"], "temperature": 0, "logprobs": 2}),
}
LIMIT = 150
NEAR = 3e-3
"""Of log-probabilities: how requests are batched changes the order of sums."""

Choices = list[tuple[str, str | None, list[str], list[float]]]
"""For each choice: text, finish reason, calls, log-probabilities of its tokens."""


def read(answer: dict[str, Any]) -> Choices:
    """Returns the choices of a whole answer."""
    found = []
    for choice in answer["choices"]:
        message = choice.get("message", {})
        calls = [call["function"]["name"] + call["function"]["arguments"] for call in message.get("tool_calls", ())]
        text = choice.get("text", message.get("content")) or ""
        found.append((text, choice["finish_reason"], calls, _scores(choice)))
    return found


def join(chunks: Sequence[dict[str, Any]]) -> Choices:
    """Returns the choices of a streamed answer."""
    found: dict[int, tuple[str, str | None, list[str], list[float]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text, reason, calls, scores = found.get(choice["index"], ("", None, [], []))
            assert reason is None, "nothing comes after the end"
            delta = choice.get("delta", choice)
            text += delta.get("text", delta.get("content")) or ""
            for call in delta.get("tool_calls", ()):
                calls += [""] * (call["index"] + 1 - len(calls))
                calls[call["index"]] += call["function"].get("name", "") + call["function"]["arguments"]
            found[choice["index"]] = (text, choice["finish_reason"], calls, scores + _scores(choice))
    return [found[index] for index in sorted(found)]


def _scores(choice: dict[str, Any]) -> list[float]:
    scores = choice["logprobs"] or {}
    return scores["token_logprobs"] if "tokens" in scores else [entry["logprob"] for entry in scores.get("content", ())]


class Client:
    """Asks one server."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.events = asyncio.Condition()
        self.streamed = 0

    async def whole(self, name: str) -> Choices:
        path, body = BODIES[name]
        reply = await self._http.post(path, json={"model": "smollm2", "max_tokens": LIMIT} | body)
        assert reply.status_code == 200, reply.text
        return read(reply.json())

    async def stream(self, name: str, leave_after: int | None = None) -> Choices:
        path, body = BODIES[name]
        chunks: list[dict[str, Any]] = []
        body = {"model": "smollm2", "max_tokens": LIMIT, "stream": True} | body
        async with self._http.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    return join(chunks)
                if line.startswith("data: "):
                    chunks.append(json.loads(line.removeprefix("data: ")))
                    assert "error" not in chunks[-1]
                    async with self.events:
                        self.streamed += 1
                        self.events.notify_all()
                if leave_after is not None and len(chunks) >= leave_after:
                    return []
        pytest.fail("the stream ended in the middle")

    async def check(self, name: str, expected: Choices, *, stream: bool) -> None:
        got = await (self.stream(name) if stream else self.whole(name))
        assert [choice[:3] for choice in got] == [choice[:3] for choice in expected], name
        for (*_, scores), (*_, known) in zip(got, expected, strict=True):
            assert scores == pytest.approx(known, abs=NEAR), name

    def all(self, expected: dict[str, Choices], times: int) -> list[Coroutine[Any, Any, Any]]:
        return [
            self.check(name, choices, stream=bool(number % 2))
            for number in range(times)
            for name, choices in expected.items()
        ]


@pytest.fixture(scope="module")
def running(smollm2: Path) -> Iterator[Serving]:
    with serve(smollm2, "--dtype=float32", "--served-model-name=smollm2") as serving:
        yield serving
        assert serving.stop() == 0, "nothing of it was a failure"


@pytest.fixture(scope="module")
def alone(running: Serving) -> dict[str, Choices]:
    async def run() -> dict[str, Choices]:
        async with httpx.AsyncClient(base_url=running.url, timeout=120) as http:
            client = Client(http)
            return {name: await client.whole(name) for name in BODIES}

    return asyncio.run(run())


def test_they_are_what_was_asked_for(alone: dict[str, Choices]) -> None:
    for text, reason, *_ in alone["grammar and logprobs"] + alone["grammar, drawn twice"]:
        assert set(json.loads(text)) == set(PERSON["properties"])
        assert reason == "stop"
    ((text, reason, calls, _),) = alone["tools"]
    assert (text, reason, len(calls)) == ("", "tool_calls", 1)
    assert len({text for text, *_ in alone["penalties"]}) == 3
    assert not any("," in text or "city" in text for text, *_ in alone["penalties"])
    ((text, reason, *_),) = alone["stop"]
    assert (text[-16:], reason) == ("iffel Tower, Lou", "stop")


@pytest.mark.timeout(300)
async def test_in_company_and_beside_clients_that_go_away(running: Serving, alone: dict[str, Choices]) -> None:
    rng = random.Random(1)
    async with httpx.AsyncClient(base_url=running.url, timeout=120) as http:
        client = Client(http)
        jobs = client.all(alone, 2)
        jobs += [client.stream(name, leave_after=rng.randrange(1, 40)) for name in BODIES for _ in range(2)]
        rng.shuffle(jobs)
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)


@pytest.mark.timeout(300)
async def test_across_the_loss_of_the_worker(running: Serving, alone: dict[str, Choices]) -> None:
    async with httpx.AsyncClient(base_url=running.url, timeout=120) as http:
        client = Client(http)
        async with asyncio.TaskGroup() as group:
            for job in client.all(alone, 2):
                group.create_task(job)
            async with client.events:
                await client.events.wait_for(lambda: client.streamed > 60)
            running.children()["worker"].send_signal(signal.SIGKILL)
