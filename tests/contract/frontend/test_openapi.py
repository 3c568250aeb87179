"""The OpenAPI document is true: what is answered has the form that it says, and what it allows is accepted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema_rs
import pytest

from tests.contract.frontend.conftest import EOS, MODEL, FrontEnd, running
from tests.fakes.core import FakeCore, FakeRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tercet_frontend.tokenizing import ModelText

HI: list[Any] = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": PARAMETERS}}]
ALL_OF_IT: dict[str, Any] = {"prompt_logprobs": 1, "return_token_ids": True}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip

ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HI}),
    (CHAT, {"messages": HI, "n": 2, "stop": ["!"], "logit_bias": {"5": 1.5}, "max_tokens": 3}),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2, **ALL_OF_IT}),
    (CHAT, {"messages": HI, "tools": TOOLS, "user": "CALL"}),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"a": 1}, "response_format": {"type": "json_object"}}),
    (COMPLETIONS, {"prompt": "Hi"}),
    (COMPLETIONS, {"prompt": [[5, 6], [7]], "n": 2, "echo": True, "logprobs": 2, **ALL_OF_IT}),
    (COMPLETIONS, {"prompt": ["a", "b"], "stop_token_ids": [5], "structured_outputs": {"regex": "a"}}),
    (RESPONSES, {"input": "Hi"}),
    (RESPONSES, {"input": "Hi", "tools": [{"type": "function", "name": "now", "parameters": {}}], "user": "CALL"}),
    (
        RESPONSES,
        {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1, "metadata": {"a": "b"}},
    ),
    (MESSAGES, {"messages": HI, "max_tokens": 9}),
    (
        MESSAGES,
        {
            "messages": HI,
            "max_tokens": 50,
            "tools": [{"name": "now", "input_schema": PARAMETERS}],
            "metadata": {"user_id": "CALL"},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": HI}),
    ("/v1/embeddings", {"input": "Hi"}),
    ("/v1/embeddings", {"input": [[5], [6]], "encoding_format": "base64", "dimensions": 2}),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/tokenize", {"messages": HI}),
    ("/detokenize", {"tokens": [5, 6]}),
]
STREAMED = {CHAT, COMPLETIONS, RESPONSES, MESSAGES}


@pytest.fixture
async def front_end(text: ModelText) -> AsyncIterator[FrontEnd]:
    said = [text.tokenizer.encode(each, add_special_tokens=False) for each in ("Hello there! How are you? 🙂", CALL)]

    def outputs(request: FakeRequest) -> Sequence[int]:
        calls = "now" in text.tokenizer.decode(request.prompt_ids)
        return [*said[calls], EOS]

    async with FakeCore(outputs=outputs) as core, running(text, [core]) as front_end:
        yield front_end


class Document:
    """The OpenAPI document of a server."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.paths: dict[str, Any] = document["paths"]
        self.schemas: dict[str, Any] = document["components"]["schemas"]
        self._whole = document

    def validator(self, schema: dict[str, Any]) -> Any:
        return jsonschema_rs.validator_for({**schema, "components": self._whole["components"]})

    def check(self, operation: dict[str, Any], response: httpx.Response) -> None:
        """Checks the form of an answer, or of each event of a stream."""
        described = operation["responses"].get(str(response.status_code), operation["responses"]["default"])["content"]
        kind = response.headers["content-type"].partition(";")[0]
        validator = self.validator(described[kind]["schema"])
        if kind == "application/json":
            validator.validate(response.json())
            return
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        assert len(events) > 2
        for event in events:
            if event != "[DONE]":
                validator.validate(json.loads(event))

    @classmethod
    async def of(cls, front_end: FrontEnd) -> Document:
        return cls((await front_end.http.get("/openapi.json")).json())


async def test_what_is_asked_and_answered(front_end: FrontEnd) -> None:
    document = await Document.of(front_end)
    streams = [(path, body | {"stream": True}) for path, body in ASKED if path in STREAMED]
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    streams += [(path, body | usage) for path, body in streams if path in (CHAT, COMPLETIONS)]
    seen = set()
    for path, fields in [*ASKED, *streams]:
        operation = document.paths[path]["post"]
        body = fields | {"model": MODEL}
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        document.validator(schema).validate(body)
        response = await front_end.http.post(path, json=body)
        assert response.status_code == 200, response.text
        document.check(operation, response)
        assert ("text/event-stream" in operation["responses"]["200"]["content"]) is (path in STREAMED)
        seen.add(path)
        failed = await front_end.http.post(path, json=body | {"model": 5})
        assert failed.status_code == 400
        document.check(operation, failed)
        with pytest.raises(jsonschema_rs.ValidationError):
            document.validator(schema).validate(body | {"model": 5})
    posts = {path for path, operations in document.paths.items() if "requestBody" in operations.get("post", {})}
    assert posts == seen


async def test_the_other_routes(front_end: FrontEnd) -> None:
    document = await Document.of(front_end)
    response_id = (await front_end.http.post(RESPONSES, json={"model": MODEL, "input": "Hi"})).json()["id"]
    for path, operations in document.paths.items():
        for method, operation in operations.items():
            for name in (response_id, MODEL, "nobody"):
                url = path.replace("{response_id}", name).replace("{model}", name).replace("{request_id}", name)
                if method == "delete" and name == response_id:
                    continue
                if "requestBody" not in operation:
                    document.check(operation, await front_end.http.request(method.upper(), url))
    deleted = await front_end.http.delete(f"{RESPONSES}/{response_id}")
    assert deleted.status_code == 200
    document.check(document.paths[f"{RESPONSES}/{{response_id}}"]["delete"], deleted)


async def test_every_route_is_in_it(front_end: FrontEnd) -> None:
    document = await Document.of(front_end)
    for path in document.paths:
        assert (await front_end.http.options(path)).status_code != 404
    for path in ("/docs", "/", "/openapi.json"):
        assert (await front_end.http.get(path)).status_code == 200
        assert path not in document.paths


NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _edges(schema: dict[str, Any]) -> list[float]:
    """Returns numbers at and just beyond the ends of a field's range."""
    parts = [schema, *schema.get("anyOf", ())]
    whole = any(part.get("type") == "integer" for part in parts)
    step = 1 if whole else 0.125
    found = [part[name] for part in parts for name in NUMBERS if name in part]
    return [edge + change for edge in found for change in (-step, 0, step)]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_ranges_are_those_that_are_accepted(front_end: FrontEnd, path: str) -> None:
    document = await Document.of(front_end)
    base = next(body for asked, body in ASKED if asked == path) | {"model": MODEL, "max_tokens": 9}
    together = {
        "top_logprobs": {"logprobs": True},
        "best_of": {"n": 1},
        "max_tokens": {"echo": True} if path == COMPLETIONS else {},
    }
    schema = document.schemas[
        document.paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    ]
    tried = 0
    for name, field in schema["properties"].items():
        for value in _edges(field):
            if name == "max_tokens" and value > 100:
                continue
            body = base | together.get(name, {}) | {name: value}
            allowed = document.validator(field).is_valid(value)
            response = await front_end.http.post(path, json=body)
            assert (response.status_code == 200) is allowed, (name, value, response.text)
            tried += 1
    assert tried >= 3
