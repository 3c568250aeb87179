"""A person asks, a real model answers, through three processes; with the official client and with bare HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import Serving, engine_info

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
    body = {"model": "smollm2", "messages": FRANCE, "temperature": 0, "stream": True, "ignore_eos": True}

    def events(http: httpx.Client, most: int) -> Generator[dict[str, Any], None, None]:
        with http.stream("POST", f"{serving.url}/v1/chat/completions", json=body | {"max_tokens": most}) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    yield choice
        pytest.fail("the stream ended in the middle")

    with httpx.Client(timeout=120) as http:
        *chunks, last = events(http, 40)
        assert chunks[0]["delta"]["role"] == "assistant"
        assert last["finish_reason"] == "length"
        # What has come can be read while the rest is still to be computed.
        endless = events(http, 4000)
        pieces = [next(endless) for _ in range(6)]
        assert all(choice["delta"]["content"] for choice in pieces[1:])
        assert asyncio.run(engine_info(serving)).stats.running == 1
        endless.close()


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=FRANCE)


def test_models_lists_the_served_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
