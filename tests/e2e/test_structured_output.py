"""What a real model writes under a grammar: it fits, it ends, and nobody else notices a grammar that is refused."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import jsonschema_rs
import pytest

from tests.e2e.conftest import Serving
from tests.fakes.json_schemas import random_schema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "height in m": {"type": "number", "minimum": 0.5, "maximum": 2.5},
        "colours": {
            "type": "array",
            "items": {"enum": ["red", "green", "blau und grün"]},
            "minItems": 1,
            "maxItems": 3,
        },
        "address": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "kind": {"enum": ["home", "work", None]},
                "position": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
            },
            "required": ["city", "kind", "position"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "height in m", "colours", "address"],
    "additionalProperties": False,
}
ASKED: list[Any] = [{"role": "user", "content": "Describe a person who lives in Paris, in JSON."}]
SCHEMAS = 100
AT_ONCE = 24
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "The time of day."}},
]
HOSTILE: list[dict[str, Any]] = [
    {"guided_regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(2_000)}}},
    {"guided_json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    {"guided_grammar": "start: start"},
    {"guided_regex": "("},
]


def asked(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns the body of a chat request whose answer must be of this schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    return {"model": "smollm2", "messages": ASKED, "temperature": 0, "response_format": wanted} | fields


async def whole(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    reply = await http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


async def streamed(http: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the chunks of a stream."""
    async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as reply:
        assert reply.status_code == 200
        lines = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def check(schema: dict[str, Any], text: str) -> None:
    """Checks that a text is JSON of a schema, without white space that the model could lose itself in."""
    value = json.loads(text)
    jsonschema_rs.validate(schema, value)
    assert text == text.strip()
    assert "  " not in text or "  " in json.dumps(value, ensure_ascii=False)


@pytest.fixture
def http(serving: Serving) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=serving.url, timeout=120)


async def test_a_schema_with_everything(http: httpx.AsyncClient) -> None:
    async with http:
        answer, chunks, drawn = await asyncio.gather(
            whole(http, asked(PERSON, max_tokens=300, logprobs=True, top_logprobs=2)),
            streamed(http, asked(PERSON, max_tokens=300)),
            whole(http, asked(PERSON, max_tokens=300, n=2, temperature=1.2, seed=3)),
        )
    (choice,) = answer["choices"]
    content = choice["message"]["content"]
    check(PERSON, content)
    assert choice["finish_reason"] == "stop"
    scores = choice["logprobs"]["content"]
    assert len(scores) == answer["usage"]["completion_tokens"], "forced tokens have theirs, too"
    assert bytes(byte for score in scores for byte in score["bytes"]).decode() == content
    assert all(score["logprob"] <= 0 for score in scores)
    deltas = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == content
    assert deltas[-1]["finish_reason"] == "stop"
    texts = [choice["message"]["content"] for choice in drawn["choices"]]
    assert len(set(texts)) == 2
    for text, choice in zip(texts, drawn["choices"], strict=True):
        check(PERSON, text)
        assert choice["finish_reason"] == "stop"


async def test_a_hundred_schemas(http: httpx.AsyncClient) -> None:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        schema = random_schema(random.Random(number))
        jsonschema_rs.meta.validate(schema)
        body = asked(schema, max_tokens=600, temperature=number % 2, seed=number)
        async with room:
            answer = await whole(http, body)
        (choice,) = answer["choices"]
        check(schema, choice["message"]["content"])
        assert choice["finish_reason"] == "stop", choice

    async with http, asyncio.TaskGroup() as group:
        for number in range(SCHEMAS):
            group.create_task(one(number))


async def test_any_object(http: httpx.AsyncClient) -> None:
    question = [{"role": "user", "content": "What is the capital of France? Answer as JSON with the key capital."}]
    async with http:
        body = asked({}, max_tokens=60, messages=question, response_format={"type": "json_object"})
        (choice,) = (await whole(http, body))["choices"]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"]) == {"capital": "Paris"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_enforced_calls(http: httpx.AsyncClient, choice: Any) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What will the weather be in Ulm?"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 200,
    }
    async with http:
        answer, chunks = await asyncio.gather(whole(http, body), streamed(http, body))
    (whole_choice,) = answer["choices"]
    assert whole_choice["finish_reason"] == "tool_calls"
    (call,) = whole_choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    check(WEATHER, call["function"]["arguments"])
    parts = [part for chunk in chunks for choice in chunk["choices"] for part in choice["delta"].get("tool_calls", ())]
    assert "".join(part["function"].get("arguments", "") for part in parts) == call["function"]["arguments"]
    assert [part["function"]["name"] for part in parts if "name" in part["function"]] == ["get_weather"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"guided_choice": ["positive", "negative", "neutral"]}, {"positive", "negative", "neutral"}.__contains__),
        ({"guided_regex": "[0-9]{4}-[0-9]{2}"}, lambda text: len(text) == 7 and text[4] == "-"),
        ({"guided_grammar": 'root ::= ("ja" | "nein") "!"{1,3}'}, lambda text: text.rstrip("!") in ("ja", "nein")),
        ({"structured_outputs": {"json": {"enum": ["a", 1]}}}, lambda text: json.loads(text) in ("a", 1)),
    ],
    ids=["choice", "regex", "grammar", "json"],
)
async def test_other_grammars(http: httpx.AsyncClient, fields: dict[str, Any], fits: Any) -> None:
    async with http:
        for stop in ({}, {"ignore_eos": True}, {"min_tokens": 8, "max_tokens": 16}):
            body = asked({}, response_format=None, max_tokens=16) | fields | stop
            (choice,) = (await whole(http, body))["choices"]
            assert choice["finish_reason"] == "stop", stop
            assert fits(choice["message"]["content"])


async def test_an_answer_that_is_cut(http: httpx.AsyncClient) -> None:
    async with http:
        full, cut = [(await whole(http, asked(PERSON, max_tokens=limit)))["choices"][0] for limit in (300, 20)]
    assert cut["finish_reason"] == "length"
    assert full["message"]["content"].startswith(cut["message"]["content"])
    assert len(cut["message"]["content"]) > 20


async def test_refused_grammars_are_nobody_elses_business(http: httpx.AsyncClient) -> None:
    story = {"model": "smollm2", "temperature": 0, "max_tokens": 80, "ignore_eos": True, "messages": ASKED}
    async with http:
        alone = await streamed(http, story)
        others = [
            asyncio.create_task(streamed(http, story)),
            asyncio.create_task(streamed(http, asked(PERSON, max_tokens=300))),
        ]
        refusals = await asyncio.gather(
            *[http.post("/v1/chat/completions", json={**story, **fields}) for fields in HOSTILE]
        )
        beside, person = await asyncio.gather(*others)
    for fields, reply in zip(HOSTILE, refusals, strict=True):
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == next(iter(fields))
        assert len(reply.content) < 2_000
    assert text_of(beside) == text_of(alone)
    check(PERSON, text_of(person))


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
