"""What an answer must look like: every way to say it becomes the grammar that the core is given, or a clear 400."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pydantic
import pytest

from tercet_proto.v1 import engine_pb2 as pb
from tests.contract.frontend.conftest import MODEL, running
from tests.fakes.core import FakeCore

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}
JSON, REGEX, CHOICE = pb.GRAMMAR_KIND_JSON_SCHEMA, pb.GRAMMAR_KIND_REGEX, pb.GRAMMAR_KIND_CHOICE
LARK, EBNF = pb.GRAMMAR_KIND_LARK, pb.GRAMMAR_KIND_EBNF
GBNF = 'root ::= "a" | "b"'
OBJECT = {"type": "object"}

WAYS: list[tuple[dict[str, Any], tuple[Any, Any, str] | None]] = [
    ({}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, (JSON, OBJECT, "response_format")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        (JSON, SCHEMA, "response_format"),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": False}}},
        (JSON, {}, "response_format"),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, (JSON, SCHEMA, "structured_outputs.json")),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, (JSON, SCHEMA, "structured_outputs.json")),
    ({"structured_outputs": {"json_object": True}}, (JSON, OBJECT, "structured_outputs.json_object")),
    ({"structured_outputs": {"regex": "a+", "json_object": False}}, (REGEX, "a+", "structured_outputs.regex")),
    ({"structured_outputs": {"choice": ["a", "é"]}}, (CHOICE, ["a", "é"], "structured_outputs.choice")),
    ({"structured_outputs": {"grammar": GBNF}}, (EBNF, GBNF, "structured_outputs.grammar")),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, (LARK, 'start: "a"', "structured_outputs.grammar")),
    ({"guided_json": SCHEMA}, (JSON, SCHEMA, "guided_json")),
    ({"guided_json": json.dumps(SCHEMA)}, (JSON, SCHEMA, "guided_json")),
    ({"guided_regex": "a|b"}, (REGEX, "a|b", "guided_regex")),
    ({"guided_choice": ["x"]}, (CHOICE, ["x"], "guided_choice")),
    ({"guided_grammar": GBNF}, (EBNF, GBNF, "guided_grammar")),
    ({"guided_regex": "a", "response_format": {"type": "text"}}, (REGEX, "a", "guided_regex")),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_every_way(text: ModelText, says: Any, path: str) -> None:
    asks: dict[str, Any] = {"model": MODEL} | ({"prompt": "a"} if "chat" not in path else {"messages": MESSAGES})
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        for fields, _ in WAYS:
            response = await front_end.http.post(path, json=asks | fields)
            assert response.status_code == 200, response.text
    for request, (fields, expected) in zip(core.requests, WAYS, strict=True):
        assert request.submit.HasField("grammar") is (expected is not None), fields
        if expected is not None:
            kind, content, param = expected
            grammar = request.submit.grammar
            said = json.loads(grammar.text) if kind in (JSON, CHOICE) else grammar.text
            assert (grammar.kind, said, grammar.param) == (kind, content, param)


class Person(pydantic.BaseModel):
    """What the official client makes a schema of."""

    name: str
    age: int


async def test_the_official_client_parses_what_it_asked_for(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says('{"name": "Ann", "age": 7}')) as core, running(text, [core]) as front_end:
        answer = await front_end.openai.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ann", age=7)
    schema = json.loads(core.requests[0].submit.grammar.text)
    assert schema["required"] == ["name", "age"]


@pytest.mark.usefixtures("late_headers")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_the_core_refuses(text: ModelText, says: Any, stream: bool, n: int) -> None:
    refusal = "The regular expression is not closed."
    async with (
        FakeCore(outputs=says("Yes"), unsound=lambda grammar: refusal if grammar.text == "(" else None) as core,
        running(text, [core]) as front_end,
    ):
        create = front_end.openai.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="not closed") as caught:
            await create(
                model=MODEL, messages=MESSAGES, stream=stream, n=n, extra_body={"structured_outputs": {"regex": "("}}
            )
        assert caught.value.param == "structured_outputs.regex"
        # Nobody else notices.
        other = await create(model=MODEL, messages=MESSAGES, extra_body={"guided_regex": "a"})
    assert other.choices[0].message.content == "Yes"
