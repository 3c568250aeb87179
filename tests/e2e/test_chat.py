"""A person asks, a real model answers, through three processes; with the official client and with bare HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.e2e.conftest import Serving

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 37
    assert answer.usage.completion_tokens == 8


def test_the_streamed_answer_is_the_same(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2", messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert sum(1 for chunk in chunks if chunk.choices and chunk.choices[0].delta.content) >= 6, "it came in pieces"


def test_a_stop_string_cuts_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, stop=[" is Par"])
    assert answer.choices[0].message.content == "The capital of France"
    assert answer.choices[0].finish_reason == "stop"


def test_seeded_choices_differ_and_repeat(client: openai.OpenAI) -> None:
    def draw() -> list[str | None]:
        answer = client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "Tell me a story."}], seed=5, n=4, max_tokens=24
        )
        return [choice.message.content for choice in answer.choices]

    first = draw()
    assert len(set(first)) == 4
    assert draw() == first


def test_a_seeded_request_gives_the_same_alone_and_in_company(serving: Serving) -> None:
    body = {
        "model": "smollm2",
        "prompt": "Once upon a time",
        "max_tokens": 32,
        "seed": 11,
        "temperature": 0.9,
        "top_p": 0.9,
    }

    async def ask(http: httpx.AsyncClient, **changes: object) -> str:
        reply = await http.post(f"{serving.url}/v1/completions", json=body | changes)
        text: str = reply.raise_for_status().json()["choices"][0]["text"]
        return text

    async def run() -> tuple[str, list[str]]:
        async with httpx.AsyncClient(timeout=120) as http:
            alone = await ask(http)
            company = [ask(http, prompt=f"Number {i} is", seed=i) for i in range(12)]
            together = await asyncio.gather(ask(http), *company, ask(http))
            return alone, [together[0], together[-1]]

    alone, together = asyncio.run(run())
    assert together == [alone, alone]


def test_tokens_are_streamed_as_they_come(serving: Serving) -> None:
    begin = time.monotonic()
    body = {
        "model": "smollm2",
        "messages": FRANCE,
        "temperature": 0,
        "stream": True,
        "max_tokens": 40,
        "ignore_eos": True,
    }
    with (
        httpx.Client(timeout=120) as http,
        http.stream("POST", f"{serving.url}/v1/chat/completions", json=body) as reply,
    ):
        assert reply.headers["content-type"].startswith("text/event-stream")
        arrivals = [
            (time.monotonic(), line.removeprefix("data: ")) for line in reply.iter_lines() if line.startswith("data: ")
        ]
    events = [event for _, event in arrivals]
    assert events[-1] == "[DONE]"
    content = [when for when, event in arrivals if '"content":"' in event]
    assert len(content) >= 36, "at least nine in ten of the 40 tokens have an event of their own"
    assert len(set(content)) > 5
    assert content[0] < begin + (content[-1] - begin) * 0.75, "the first token did not wait for the last"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=FRANCE)


def test_models_lists_the_served_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
