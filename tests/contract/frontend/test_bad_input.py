"""Whatever a client sends, it gets a bounded 4xx that names the field, and the next client is served."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import openai
import orjson
import pytest
import pytest_asyncio

from tercet_shared.checkpoint import ChatTemplate
from tests.contract.frontend.conftest import MODEL, TIMEOUT, FrontEnd, running
from tests.fakes.core import FakeCore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tercet_frontend.tokenizing import ModelText

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
LIMIT = 1_000_000
BODY_BOUND = 3_000
JSON = {"Content-Type": "application/json"}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front_end(text: ModelText, says: Any) -> AsyncIterator[FrontEnd]:
    async with FakeCore(outputs=says("Fine.")) as core, running(text, [core], max_body_bytes=LIMIT) as front_end:
        yield front_end


async def _still_answers(front_end: FrontEnd) -> None:
    answer = await front_end.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    assert answer.choices[0].message.content == "Fine."


def _chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES} | fields


def _message(content: Any, role: Any = "user") -> list[Any]:
    return [{"role": role, "content": content}]


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"model": "a\0b"}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [*MESSAGES, *_message("Hi", role="king")]}, "messages[1].role"),
    ({"messages": _message("Hi", role="tool")}, "messages[0].tool_call_id"),
    ({"messages": _message("Hi", role=["user"])}, "messages[0].role"),
    ({"messages": _message(None)}, "messages[0].content"),
    ({"messages": _message(5)}, "messages[0].content"),
    ({"messages": _message("a\0b")}, "messages[0].content"),
    ({"messages": MESSAGES * 10_001}, "messages"),
    ({"messages": _message([{"type": "text", "text": ""}] * 1_001)}, "messages[0].content"),
    ({"messages": _message([{"type": "text", "text": ""}] * 1_000) * 11}, "messages"),
    ({"messages": _message([])}, "messages[0].content"),
    ({"messages": _message(["Hi"])}, "messages[0].content[0]"),
    ({"messages": _message([{"type": "text"}])}, "messages[0].content[0].text"),
    ({"messages": _message([{"type": "text", "text": 5}])}, "messages[0].content[0].text"),
    (
        {"messages": _message([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}])},
        "messages[0].content[1].type",
    ),
    (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"temperature": []}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"min_p": -1}, "min_p"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "1"}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10_000}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": "2"}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 1001}, "stop"),
    ({"stop": "\0"}, "stop"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": ["5"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [49_152]}, "stop_token_ids"),
    ({"stop_token_ids": [10**30]}, "stop_token_ids[0]"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "true"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": True}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"user": 5}, "user"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"": 1}}, "logit_bias"),
    ({"logit_bias": {"49152": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5_000: 1}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1_025)}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"presence_penalty": False}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [49_152]}, "allowed_token_ids"),
    ({"allowed_token_ids": ["5"]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": list(range(16_385))}, "allowed_token_ids"),
    ({"bad_words": "a"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    ({"bad_words": ["a b " * 100]}, "bad_words"),
    ({"bad_words": ["a" * 1_001]}, "bad_words[0]"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 2048}, "truncate_prompt_tokens"),
    ({"priority": 2**31}, "priority"),
    ({"priority": 0.5}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "a" * 257}, "cache_salt"),
    ({"cache_salt": "a\0b"}, "cache_salt"),
    ({"queue_timeout": 0}, "queue_timeout"),
    ({"queue_timeout": -1.0}, "queue_timeout"),
    ({"queue_timeout": 1e9}, "queue_timeout"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": True}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a" * 300_000]}}}},
        "response_format",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": []}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": []}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"choice": ["a"] * 5_000}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs.regex"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"guided_json": "no json"}, "guided_json"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_grammar": ""}, "guided_grammar"),
    ({"guided_choice": []}, "guided_choice"),
    # Known, but not built: refused by name.
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"best_of": 2}, "best_of"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"continue_final_message": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("fields", "param"), FIELDS, ids=lambda value: str(value)[:60])
async def test_chat_fields(front_end: FrontEnd, fields: dict[str, Any], param: str) -> None:
    # By the standard library: orjson writes no integers above 64 bits.
    response = await front_end.http.post(CHAT, content=json.dumps(_chat(**fields)), headers=JSON)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert len(response.content) < BODY_BOUND
    await _still_answers(front_end)


async def test_errors_say_what_is_wrong(front_end: FrontEnd) -> None:
    said = {}
    for name, fields in {
        "stops": {"stop": ["a"] * 17},
        "parts": {"messages": _message([])},
        "kinds": {"temperature": "hot"},
        "objects": {"response_format": "json"},
        "words": {"bad_words": [""]},
    }.items():
        response = await front_end.http.post(CHAT, json=_chat(**fields))
        said[name] = response.json()["error"]["message"]
    assert said["stops"] == "stop: at most 16 strings are allowed, not 17."
    assert said["parts"].endswith("should have at least 1 item, not 0.")
    assert said["words"].startswith("bad_words[0]: ")
    assert "after validation" not in said["words"], "how it is checked is nobody's business"
    assert said["objects"] == "response_format: Input should be a JSON object."
    assert "valid number" in said["kinds"]


async def test_a_schema_that_is_nested_too_deeply(front_end: FrontEnd) -> None:
    schema: dict[str, Any] = {}
    for _ in range(400):
        schema = {"not": schema}
    body = json.dumps(_chat(structured_outputs={"json": schema}))
    response = await front_end.http.post(CHAT, content=body, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "structured_outputs.json"
    await _still_answers(front_end)


PROMPTS: list[tuple[Any, str]] = [
    (None, "prompt"),
    ("", "prompt"),
    (5, "prompt"),
    ({}, "prompt"),
    ([], "prompt"),
    ([[]], "prompt[0]"),
    (["a", ""], "prompt[1]"),
    (["a", 5], "prompt[1]"),
    ([5, "a"], "prompt"),
    ([5, True], "prompt"),
    ([5, 1.5], "prompt"),
    ([True], "prompt[0]"),
    ([[5], "a"], "prompt"),
    ([[5], ["a"]], "prompt[1]"),
    ([-1], "prompt"),
    ([49_152], "prompt"),
    ([2**40], "prompt"),
    ([[5], [49_152]], "prompt[1]"),
    ("a\0b", "prompt"),
    (["a"] * 1025, "prompt"),
    ([[]] * 90_000, "prompt"),
]


@pytest.mark.parametrize(("prompt", "param"), PROMPTS, ids=lambda value: str(value)[:40])
async def test_prompts(front_end: FrontEnd, prompt: Any, param: str) -> None:
    response = await front_end.http.post(COMPLETION, json={"model": MODEL, "prompt": prompt})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert len(response.content) < BODY_BOUND
    await _still_answers(front_end)


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": 1},
        {"suffix": "x"},
        {"logprobs": True},
        {"logprobs": 21},
        {"best_of": 0},
        {"best_of": 2, "n": 3},
        {"best_of": 2, "stream": True},
        {"best_of": 2, "prompt": ["a"] * 600},
        {"n": 2, "prompt": ["a"] * 600},
        {"max_tokens": 0},
        {"max_tokens": 0, "logprobs": 1},
    ],
    ids=lambda fields: str(fields)[:60],
)
async def test_completion_fields(front_end: FrontEnd, fields: dict[str, Any]) -> None:
    response = await front_end.http.post(COMPLETION, json={"model": MODEL, "prompt": "a"} | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == next(iter(fields))


BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"5",
    b"\xff\xfe",
    b"\0",
    b"\xef\xbb\xbf{}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"model": NaN}',
    b'{"model": "m", "temperature": Infinity}',
    b'{"model": "m", "temperature": -Infinity}',
    b'{"model": "m", "temperature": 1e999}',
    b'{"model": "\\ud800", "messages": []}',
    b'{"model": "\xed\xa0\x80", "messages": []}',
    b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": "a\x00b"}]}',
    b"{'model': 'm'}",
    b'{"model": "m"} trailing',
    b"model=m&messages=x",
    b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"messages": [' + b"[]," * 200_000 + b"0]}",
    b'{"messages": [' + b"0," * 490_000 + b"0]}",
    b"{" + b'"a":0,' * 150_000 + b'"a":0}',
    b'{"model": "' + b"m" * 100_000 + b'", "messages": [{"role": "user", "content": "a"}]}',
]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:30]))
async def test_bodies(front_end: FrontEnd, path: str, body: bytes) -> None:
    response = await front_end.http.post(path, content=body, headers=JSON)
    assert 400 <= response.status_code < 500, response.text
    assert response.json()["error"]["message"]
    assert len(response.content) < BODY_BOUND
    await _still_answers(front_end)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", "", None])
async def test_content_type(front_end: FrontEnd, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    response = await front_end.http.post(CHAT, content=orjson.dumps(_chat()), headers=headers)
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


async def test_content_type_with_parameters(front_end: FrontEnd) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    response = await front_end.http.post(CHAT, content=orjson.dumps(_chat()), headers=headers)
    assert response.status_code == 200


async def test_neutral_values_are_accepted(front_end: FrontEnd) -> None:
    neutral: dict[str, Any] = {
        "n": 1, "logprobs": False, "top_logprobs": None, "logit_bias": {}, "presence_penalty": 0.0, "best_of": 1,
        "frequency_penalty": 0, "repetition_penalty": 1.0, "response_format": {"type": "text"}, "tools": [],
        "tool_choice": "none", "modalities": ["text"], "stop": [], "user": "somebody", "metadata": {"a": "b"},
        "stop_token_ids": None, "structured_outputs": None, "spaces_between_special_tokens": False,
        "max_tokens": 4, "max_completion_tokens": 4, "stream": False, "never_heard_of": [{}],
    }  # fmt: skip
    response = await front_end.http.post(CHAT, json=_chat(**neutral))
    assert response.status_code == 200, response.text


async def test_unknown_model(front_end: FrontEnd) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await front_end.openai.chat.completions.create(model="m" * 5000, messages=[{"role": "user", "content": "Hi"}])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert len(str(caught.value)) < BODY_BOUND
    with pytest.raises(openai.NotFoundError):
        await front_end.openai.models.retrieve("other/model")


async def test_context_length(front_end: FrontEnd, text: ModelText) -> None:
    token = text.tokenizer.encode("a")[0]
    create = front_end.openai.completions.create
    fits = await create(model=MODEL, prompt=[token] * 2047)
    assert fits.usage is not None
    assert fits.usage.completion_tokens == 1
    for prompt, max_tokens, param in ((2048, None, "prompt"), (5000, 1, "prompt"), (2000, 49, "max_tokens")):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model=MODEL, prompt=[token] * prompt, max_tokens=max_tokens)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
    with pytest.raises(openai.BadRequestError) as caught:
        await front_end.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 3000}]
        )
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    edge = await create(model=MODEL, prompt=[token] * 2000, max_tokens=48)
    assert edge.choices[0].finish_reason == "stop"


async def test_body_over_the_limit_by_its_length(front_end: FrontEnd) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(front_end.url.rpartition(":")[2]))
    # Nothing of the body is sent: the answer must not wait for it.
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {LIMIT + 1}\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(TIMEOUT):
        assert b" 413 " in await reader.readline()
    writer.close()
    await writer.wait_closed()
    await _still_answers(front_end)


async def test_body_over_the_limit_in_chunks(front_end: FrontEnd) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 65_536

    response = await front_end.http.post(CHAT, content=endless(), headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    with pytest.raises(openai.APIStatusError) as caught:
        await front_end.openai.completions.create(model=MODEL, prompt="a" * LIMIT)
    assert caught.value.status_code == 413
    await _still_answers(front_end)


async def test_body_at_the_limit(front_end: FrontEnd) -> None:
    body = orjson.dumps(_chat())
    response = await front_end.http.post(CHAT, content=body + b" " * (LIMIT - len(body)), headers=JSON)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/nowhere", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/%ff%00" + "x" * 5000, 404),
    ],
)
async def test_routes(front_end: FrontEnd, method: str, path: str, status: int) -> None:
    response = await front_end.http.request(method, path, follow_redirects=True)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(response.content) < BODY_BOUND


async def test_template_that_raises(text: ModelText, says: Any) -> None:
    picky = ChatTemplate({"default": "{{ raise_exception('Roles must alternate') }}"}, {}, "a test")
    for template, words in ((picky, "Roles must alternate"), (None, "no chat template")):
        async with (
            FakeCore(outputs=says("Fine.")) as core,
            running(replace(text, chat_template=template), [core]) as front_end,
        ):
            with pytest.raises(openai.BadRequestError, match=words) as caught:
                await front_end.openai.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": "Hi"}]
                )
            assert caught.value.param == "messages"


async def test_random_bytes_on_the_socket(front_end: FrontEnd) -> None:
    chance = random.Random(5)
    for _ in range(50):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(front_end.url.rpartition(":")[2]))
        writer.write(chance.randbytes(chance.randrange(1, 2000)) + b"\r\n\r\n")
        writer.write_eof()
        async with asyncio.timeout(TIMEOUT):
            answer = await reader.read()
        assert not answer or b" 400 " in answer.split(b"\r\n")[0]
        writer.close()
        await writer.wait_closed()
    await _still_answers(front_end)


async def test_hostile_heads(front_end: FrontEnd) -> None:
    heads = [
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nX-Request-Id: \xff\r\nAuthorization: \xff\r\nHost: x\r\n\r\n",
    ]
    for head in heads:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(front_end.url.rpartition(":")[2]))
        writer.write(head)
        async with asyncio.timeout(TIMEOUT):
            line = await reader.readline()
        assert line.split(b" ")[1:2] in ([b"400"], [b"404"], [b"413"], [b"200"]), (head, line)
        writer.close()
        await writer.wait_closed()
    await _still_answers(front_end)
