"""``/v1/messages`` as Anthropic's official client sees it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anthropic
import orjson
import pytest

from tercet_frontend.parsing.registry import REASONING_FORMATS
from tests.contract.frontend.conftest import EOS, MODEL, TIMEOUT, FrontEnd, running
from tests.fakes.core import STOP, FakeCore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tercet_frontend.tokenizing import ModelText

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris. 🙂 Ça va? 你好"
WEATHER: Any = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@asynccontextmanager
async def client(front_end: FrontEnd, key: str = "unused") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=front_end.url, api_key=key, max_retries=0, timeout=TIMEOUT
    ) as messages:
        yield messages


async def test_whole_answer(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says(ANSWER)) as core, running(text, [core]) as front_end, client(front_end) as api:
        answer = await api.messages.create(
            model=MODEL, max_tokens=100, messages=QUESTION, extra_body={"temperature": 0}
        )
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert answer.id.startswith("msg_")
    (block,) = answer.content
    assert (block.type, block.type == "text" and block.text) == ("text", ANSWER)
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    (request,) = core.requests
    assert text.tokenizer.decode(request.prompt_ids, skip_special_tokens=False).endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer.usage.input_tokens == len(request.prompt_ids)
    assert answer.usage.output_tokens == len(text.tokenizer.encode(ANSWER, add_special_tokens=False)) + 1
    assert (answer.usage.cache_read_input_tokens, answer.usage.cache_creation_input_tokens) == (0, 0)


async def test_stream(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says(ANSWER)) as core, running(text, [core]) as front_end, client(front_end) as api:
        async with api.messages.stream(model=MODEL, max_tokens=100, messages=QUESTION) as stream:
            pieces = [piece async for piece in stream.text_stream]
        streamed = await stream.get_final_message()
        whole = await api.messages.create(model=MODEL, max_tokens=100, messages=QUESTION)
    assert len(pieces) > 3
    assert "".join(pieces) == ANSWER
    assert streamed.model_dump(exclude={"id", "parsed_output"}, exclude_none=True)["usage"] == whole.usage.model_dump(
        exclude_none=True
    )
    assert streamed.content[0].model_dump(include={"type", "text"}) == {"type": "text", "text": ANSWER}
    assert (streamed.stop_reason, streamed.stop_sequence) == ("end_turn", None)


async def test_stream_on_the_wire(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Paris.")) as core, running(text, [core]) as front_end:
        body = {"model": MODEL, "max_tokens": 9, "messages": QUESTION, "stream": True}
        response = await front_end.http.post("/v1/messages", json=body)
        found = _events(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    names = [name for name, _ in found]
    deltas = len(names) - 6
    assert names == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert all(data["type"] == name for name, data in found)
    start = found[0][1]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"] == {"input_tokens": len(core.requests[0].prompt_ids), "output_tokens": 0}
    assert found[2][1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert found[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert "[DONE]" not in response.text


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequences(text: ModelText, says: Any, stream: bool) -> None:
    story = says("Once upon a time there was a stanza of three lines." + " la" * 100)
    async with FakeCore(outputs=story) as core, running(text, [core]) as front_end, client(front_end) as api:
        options: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": QUESTION}
        options["stop_sequences"] = ["never", "nza of t"]
        if stream:
            async with api.messages.stream(**options) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await api.messages.create(**options)
    assert answer.content[0].text == "Once upon a time there was a sta"
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "nza of t")


async def test_length(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says(ANSWER)) as core, running(text, [core]) as front_end, client(front_end) as api:
        answer = await api.messages.create(model=MODEL, max_tokens=3, messages=QUESTION)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 3)


async def test_cached_tokens_are_counted_apart(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end, client(front_end) as api:
        call = asyncio.ensure_future(api.messages.create(model=MODEL, max_tokens=3, messages=QUESTION))
        request = await core.next_request()
        request.send(EOS, finish=STOP, stop_id=EOS, cached=16)
        usage = (await call).usage
    assert usage.cache_read_input_tokens == 16
    assert usage.input_tokens == len(request.prompt_ids) - 16


async def test_what_the_core_is_asked(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end, client(front_end) as api:
        await api.messages.create(
            model=MODEL,
            max_tokens=9,
            system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "One"}]},
                {"role": "user", "content": "Two"},
                {"role": "assistant", "content": [{"type": "text", "text": "Th"}, {"type": "text", "text": "ree"}]},
                {"role": "user", "content": "Four"},
            ],
            metadata={"user_id": "me"},
            extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 7},
        )
    (request,) = core.requests
    assert text.tokenizer.decode(request.prompt_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.\nBe kind.<|im_end|>\n<|im_start|>user\nOne\nTwo<|im_end|>\n"
        "<|im_start|>assistant\nThree<|im_end|>\n<|im_start|>user\nFour<|im_end|>\n<|im_start|>assistant\n"
    )
    sampling = request.submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.25, 7, 9)


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


async def test_tool_use(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Let me see." + CALL)) as core, running(text, [core]) as front_end:
        async with client(front_end) as api:
            options: Any = {"model": MODEL, "max_tokens": 100, "messages": QUESTION, "tools": [WEATHER]}
            whole = await api.messages.create(**options)
            async with api.messages.stream(**options) as stream:
                kinds = [event.type async for event in stream]
                streamed = await stream.get_final_message()
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    said, call = whole.content
    assert said.type == "text"
    assert said.text == "Let me see."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Zürich"})
    assert call.id
    assert streamed.content[1].model_dump(exclude={"id"}) == call.model_dump(exclude={"id"})
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    assert "input_json" in kinds
    assert "get_weather" in text.tokenizer.decode(core.requests[0].prompt_ids)


async def test_results_of_tools(text: ModelText, says: Any) -> None:
    turns: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}},
            {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {"city": "Rome"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sunny"},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "Rain"}]},
            {"type": "text", "text": "And now?"},
        ]},
    ]  # fmt: skip
    async with FakeCore(outputs=says("Go to Paris.")) as core, running(text, [core]) as front_end:
        async with client(front_end) as api:
            options: Any = {"model": MODEL, "messages": turns, "tools": [WEATHER]}
            answer = await api.messages.create(**options, max_tokens=100)
            counted = await api.messages.count_tokens(**options)
    assert answer.stop_reason == "end_turn"
    assert counted.input_tokens == answer.usage.input_tokens
    seen = text.tokenizer.decode(core.requests[0].prompt_ids, skip_special_tokens=False)
    order = ["France?", "Let me see.", '"city": "Paris"', '"city": "Rome"', "Sunny", "Rain", "And now?"]
    places = [seen.rindex(part) for part in order]
    assert places == sorted(places)


@pytest.mark.parametrize("kind", ["any", "tool"])
async def test_enforced_calls(text: ModelText, says: Any, kind: str) -> None:
    choice: Any = {"type": kind, "disable_parallel_tool_use": True} | (
        {"name": "get_weather"} if kind == "tool" else {}
    )
    async with FakeCore(outputs=says(CALL)) as core, running(text, [core]) as front_end, client(front_end) as api:
        options: Any = {"model": MODEL, "max_tokens": 100, "messages": QUESTION, "tools": [WEATHER]}
        forced = await api.messages.create(**options, tool_choice=choice)
        free = await api.messages.create(**options, tool_choice={"type": "none"})
    assert forced.stop_reason == "tool_use"
    assert core.requests[0].submit.HasField("grammar")
    assert not core.requests[1].submit.HasField("grammar")
    assert free.stop_reason == "end_turn"
    assert free.content[0].type == "text"
    assert "get_weather" not in text.tokenizer.decode(core.requests[1].prompt_ids)


async def test_thinking(text: ModelText, says: Any) -> None:
    thinker = replace(text, reasoning_format=REASONING_FORMATS["think"])
    outputs = says("<think>\nEasy.\n</think>\n\nParis.")
    async with FakeCore(outputs=outputs) as core, running(thinker, [core]) as front_end, client(front_end) as api:
        options: Any = {"model": MODEL, "max_tokens": 2000, "messages": QUESTION}
        whole = await api.messages.create(**options, thinking={"type": "enabled", "budget_tokens": 1024})
        async with api.messages.stream(**options, thinking={"type": "disabled"}) as stream:
            deltas = [event.delta.type async for event in stream if event.type == "content_block_delta"]
            streamed = await stream.get_final_message()
    thought, said = whole.content
    assert thought.type == "thinking"
    assert (thought.thinking, thought.signature) == ("Easy.", "")
    assert said.type == "text"
    assert said.text == "Paris."
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert set(deltas) == {"thinking_delta", "text_delta"}


async def test_an_answer_may_be_begun_by_the_client(text: ModelText, says: Any) -> None:
    turns: Any = [*QUESTION, {"role": "assistant", "content": "The capital is"}]
    async with FakeCore(outputs=says(" Paris.")) as core, running(text, [core]) as front_end, client(front_end) as api:
        answer = await api.messages.create(model=MODEL, max_tokens=9, messages=turns)
    assert answer.content[0].model_dump()["text"] == " Paris."
    seen = text.tokenizer.decode(core.requests[0].prompt_ids, skip_special_tokens=False)
    assert seen.endswith("<|im_start|>assistant\nThe capital is")


async def test_a_schema_for_the_answer(text: ModelText, says: Any) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "string"}}}
    async with FakeCore(outputs=says("{}")) as core, running(text, [core]) as front_end, client(front_end) as api:
        form: Any = {"format": {"type": "json_schema", "schema": schema}}
        await api.messages.create(model=MODEL, max_tokens=9, messages=QUESTION, output_config=form)
    assert orjson.loads(core.requests[0].submit.grammar.text) == schema


async def test_count_tokens(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end, client(front_end) as api:
        counted = await api.messages.count_tokens(model=MODEL, system="Be brief.", messages=QUESTION)
        answer = await api.messages.create(model=MODEL, max_tokens=9, system="Be brief.", messages=QUESTION)
        long = await api.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "la " * 5_000}])
    assert counted.input_tokens == answer.usage.input_tokens
    assert long.input_tokens > 5_000  # more than the model's context
    assert len(core.requests) == 1


async def test_keys(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core], keys=["first", "second"]) as front_end:
        async with client(front_end, "second") as api:
            await api.messages.create(model=MODEL, max_tokens=9, messages=QUESTION)
        async with client(front_end, "third") as api:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await api.messages.create(model=MODEL, max_tokens=9, messages=QUESTION)
        body: dict[str, Any] = {"model": MODEL, "messages": QUESTION}
        for key in ("first", "second"):
            await front_end.http.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "The API key is not valid."},
    }
    with_header, first, second = (request.submit.tenant for request in core.requests)
    assert with_header == second != first


@pytest.mark.parametrize(
    ("change", "status", "kind", "message"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 5000}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "other"}, 404, "not_found_error", "model"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error", "messages[0].role"),
        ({"temperature": -1}, 400, "invalid_request_error", "temperature"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, 400, "invalid_request_error", "web_search"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers"),
        (
            {"messages": [*QUESTION, {"role": "assistant", "content": ""}]},
            400,
            "invalid_request_error",
            "messages needs",
        ),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            400,
            "invalid_request_error",
            "'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].text",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "document"}]}],
                    }
                ]
            },
            400,
            "invalid_request_error",
            "'document'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            400,
            "invalid_request_error",
            "tool_use",
        ),
    ],
)
async def test_bad_input(text: ModelText, change: dict[str, Any], status: int, kind: str, message: str) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        body = {"model": MODEL, "max_tokens": 9, "messages": QUESTION} | change
        answer = await front_end.http.post("/v1/messages", json=body)
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == kind
    assert message in answer.json()["error"]["message"]
    assert set(answer.json()["error"]) == {"type", "message"}
    assert not core.requests


async def test_values_that_are_nested_too_deeply(text: ModelText) -> None:
    deep: Any = {}
    for _ in range(200):
        deep = {"properties": deep}
    turn = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": deep}]}
    async with FakeCore() as core, running(text, [core]) as front_end:
        body = {"model": MODEL, "max_tokens": 9, "messages": QUESTION}
        for change in (
            {"tools": [{"name": "f", "input_schema": deep}]},
            {"messages": [*QUESTION, turn]},
            {"output_config": {"format": {"type": "json_schema", "schema": deep}}},
        ):
            assert (await front_end.http.post("/v1/messages", json=body | change)).status_code == 400
        for change in (
            {"tools": [{"type": "function", "name": "f", "parameters": deep}]},
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": deep}}},
        ):
            body = {"model": MODEL, "input": "Hi"}
            assert (await front_end.http.post("/v1/responses", json=body | change)).status_code == 400


async def test_errors_of_all_kinds_have_anthropics_shape(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        for method, path, status, kind in (
            ("GET", "/v1/messages", 405, "invalid_request_error"),
            ("POST", "/v1/messages/nowhere", 404, "not_found_error"),
        ):
            answer = await front_end.http.request(method, path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        front_end.admission.drain()
        answer = await front_end.http.post("/v1/messages", json={})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
        assert answer.headers["retry-after"]


async def test_a_stream_that_fails_ends_with_an_error_event(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        body = {"model": MODEL, "max_tokens": 9, "messages": QUESTION, "stream": True}
        async with front_end.http.stream("POST", "/v1/messages", json=body) as response:
            request = await core.next_request()
            request.send(100)
            lines = response.aiter_lines()
            identity = orjson.loads(
                next(line for line in [await anext(lines), await anext(lines)] if line.startswith("data: "))[6:]
            )["message"]["id"]
            assert (await front_end.http.delete(f"/v1/requests/{identity}")).status_code == 200
            *_, (name, data) = _events("\n".join([line async for line in lines]))
    assert name == "error"
    assert data["type"] == "error"
    assert data["error"]["message"] == "The request was cancelled by its id."


def _events(text: str) -> list[tuple[str, Any]]:
    found = []
    for block in text.strip().split("\n\n"):
        lines = block.strip().split("\n")
        if len(lines) == 2:
            found.append((lines[0].removeprefix("event: "), orjson.loads(lines[1].removeprefix("data: "))))
    return found
