"""``/v1/responses`` as the official client sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import openai
import orjson
import pytest

from tercet_frontend.conversations import RedisResponses
from tercet_frontend.parsing.registry import REASONING_FORMATS
from tests.contract.frontend.conftest import MODEL, running
from tests.fakes.core import FakeCore
from tests.fakes.redis_server import redis_server

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

ANSWER = "The capital of France is Paris. 🙂 Ça va? 你好"
QUESTION = "What is the capital of France?"


def prompt(text: ModelText, core: FakeCore, number: int = -1) -> str:
    return text.tokenizer.decode(core.requests[number].prompt_ids, skip_special_tokens=False)


async def test_whole_answer(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says(ANSWER)) as core, running(text, [core]) as front_end:
        answer = await front_end.openai.responses.create(
            model=MODEL, input=QUESTION, instructions="Be brief.", temperature=0, metadata={"a": "b"}
        )
    assert answer.object == "response"
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.model, answer.temperature, answer.top_p, answer.metadata) == (MODEL, 0, 1, {"a": "b"})
    assert (answer.tools, answer.tool_choice, answer.parallel_tool_calls) == ([], "auto", True)
    (message,) = answer.output
    assert message.type == "message"
    assert (message.role, message.status) == ("assistant", "completed")
    assert answer.output_text == ANSWER
    assert prompt(text, core).endswith(
        f"system\nBe brief.<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(core.requests[0].prompt_ids)
    assert answer.usage.output_tokens == len(text.tokenizer.encode(ANSWER, add_special_tokens=False)) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


async def test_stream(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says(ANSWER)) as core, running(text, [core]) as front_end:
        async with front_end.openai.responses.stream(model=MODEL, input=QUESTION) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 3
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == ANSWER
    assert final.status == "completed"
    assert final.usage is not None
    text_done = events[-4]
    assert text_done.type == "response.output_text.done"
    assert text_done.text == ANSWER


async def test_stream_on_the_wire(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Paris.")) as core, running(text, [core]) as front_end:
        body = {"model": MODEL, "input": QUESTION, "stream": True}
        response = await front_end.http.post("/v1/responses", json=body)
    found = wire(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert all(name == data["type"] for name, data in found)
    first, last = found[0][1]["response"], found[-1][1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert (last["status"], last["id"]) == ("completed", first["id"])
    assert "[DONE]" not in response.text
    # What was streamed is what the whole response has.
    items = [data["item"] for name, data in found if name == "response.output_item.done"]
    assert items == last["output"]


async def test_length(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says(ANSWER)) as core, running(text, [core]) as front_end:
        answer = await front_end.openai.responses.create(model=MODEL, input=QUESTION, max_output_tokens=3)
        async with front_end.openai.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=3) as stream:
            *_, last = [event async for event in stream]
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"
    assert last.type == "response.incomplete"
    assert last.response.status == "incomplete"


async def test_what_the_core_is_asked(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        await front_end.openai.responses.create(
            model=MODEL,
            input=[
                {"role": "developer", "content": "Be brief."},
                {"type": "message", "role": "user", "content": [
                    {"type": "input_text", "text": "One"}, {"type": "input_text", "text": "Two"},
                ]},
                {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
                    {"type": "output_text", "text": "Three", "annotations": []},
                ]},
                {"role": "user", "content": "Four"},
            ],
            max_output_tokens=9,
            temperature=0.5,
            top_p=0.25,
            extra_body={"top_k": 5, "min_p": 0.125, "seed": 3},
        )  # fmt: skip
    assert prompt(text, core) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne\nTwo<|im_end|>\n"
        "<|im_start|>assistant\nThree<|im_end|>\n<|im_start|>user\nFour<|im_end|>\n<|im_start|>assistant\n"
    )
    asked = core.requests[0].submit.sampling
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.max_tokens) == (0.5, 0.25, 5, 0.125, 9)


async def test_formats(text: ModelText, says: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    async with FakeCore(outputs=says('{"a": "b"}')) as core, running(text, [core]) as front_end:
        create = front_end.openai.responses.create
        await create(model=MODEL, input=QUESTION, text={"format": {"type": "json_object"}})
        answer = await create(
            model=MODEL,
            input=QUESTION,
            text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        )
        await create(model=MODEL, input=QUESTION, text={"format": {"type": "text"}})
    any_object, with_schema, free = (request.submit for request in core.requests)
    assert orjson.loads(any_object.grammar.text) == {"type": "object"}
    assert orjson.loads(with_schema.grammar.text) == schema
    assert not free.HasField("grammar")
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.to_dict()["schema"] == schema


async def test_logprobs(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Paris is")) as core, running(text, [core]) as front_end:
        options: dict[str, Any] = {"model": MODEL, "input": QUESTION, "top_logprobs": 2}
        answer = await front_end.openai.responses.create(**options, include=["message.output_text.logprobs"])
        async with front_end.openai.responses.stream(**options) as stream:
            events = [event async for event in stream]
    message: Any = answer.output[0]
    found = message.content[0].logprobs
    assert "".join(one.token for one in found if one.bytes) == "Paris is"
    assert all(len(one.top_logprobs) == 2 for one in found)
    streamed = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.token for one in streamed] == [one.token for one in found if one.bytes]
    assert core.requests[0].submit.sampling.logprobs == 2


WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


async def test_function_calls(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Let me see." + CALL)) as core, running(text, [core]) as front_end:
        api = front_end.openai.responses
        whole = await api.create(model=MODEL, input=QUESTION, tools=[WEATHER])
        async with api.stream(model=MODEL, input=QUESTION, tools=[WEATHER]) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        said, call = whole.output
        assert said.type == "message"
        assert whole.output_text == "Let me see."
        assert call.type == "function_call"
        assert (call.name, call.status) == ("get_weather", "completed")
        assert orjson.loads(call.arguments) == {"city": "Zürich"}
        assert (whole.status, whole.tools[0].to_dict()["name"]) == ("completed", "get_weather")
        other = streamed.output[1]
        assert other.type == "function_call"
        assert (other.name, other.arguments) == (call.name, call.arguments)
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert "".join(deltas) == done.arguments == call.arguments
        added = [event.item for event in events if event.type == "response.output_item.added"]
        assert [item.type for item in added] == ["message", "function_call"]

        # The result comes back after the stored call, or with all items by the client itself.
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
        await api.create(model=MODEL, input=[result], tools=[WEATHER], previous_response_id=whole.id)
        items: Any = [{"role": "user", "content": QUESTION}, *[item.to_dict() for item in whole.output], result]
        await api.create(model=MODEL, input=items, tools=[WEATHER], store=False)
    *_, stored, given = core.requests
    assert stored.prompt_ids == given.prompt_ids
    seen = prompt(text, core)
    places = [seen.rindex(part) for part in (QUESTION, "Let me see.", "Zürich", "Sunny")]
    assert places == sorted(places)


async def test_choices_of_tools(text: ModelText, says: Any) -> None:
    other = WEATHER | {"name": "other"}
    async with FakeCore(outputs=says(CALL)) as core, running(text, [core]) as front_end:
        create = front_end.openai.responses.create
        options: Any = {"model": MODEL, "input": QUESTION, "tools": [WEATHER, other]}
        allowed: Any = {
            "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]
        }  # fmt: skip
        named: Any = {"type": "function", "name": "get_weather"}
        for choice in ("required", named, allowed):
            answer = await create(**options, tool_choice=choice)
            assert [item.type for item in answer.output] == ["function_call"]
            echoed = answer.tool_choice if isinstance(answer.tool_choice, str) else answer.tool_choice.to_dict()
            assert echoed == choice
        await create(**options, tool_choice="none")
        await create(**options, parallel_tool_calls=False)
    forced = [request.submit.HasField("grammar") for request in core.requests]
    assert forced == [True, True, True, False, False]
    either, *one = [request.submit.grammar.text for request in core.requests[:3]]
    assert "other" in either
    assert not any("other" in grammar for grammar in one)


async def test_reasoning(text: ModelText, says: Any) -> None:
    thinker = replace(text, reasoning_format=REASONING_FORMATS["think"])
    outputs = says("<think>\nEasy enough.\n</think>\n\nParis.")
    async with FakeCore(outputs=outputs) as core, running(thinker, [core]) as front_end:
        api = front_end.openai.responses
        whole = await api.create(model=MODEL, input=QUESTION)
        async with api.stream(model=MODEL, input="And now?", previous_response_id=whole.id) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
    thought, said = whole.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert [part.text for part in thought.content] == ["Easy enough."]
    assert said.type == "message"
    assert whole.output_text == streamed.output_text == "Paris."
    assert "response.reasoning_text.delta" in kinds
    assert kinds.count("response.reasoning_text.done") == 1
    assert [item.type for item in streamed.output] == ["reasoning", "message"]
    assert whole.usage is not None
    reasoned = whole.usage.output_tokens_details.reasoning_tokens
    assert len(text.tokenizer.encode("Easy enough.")) <= reasoned < whole.usage.output_tokens


async def test_effort_where_it_has_no_effect(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        with pytest.raises(openai.BadRequestError) as caught:
            await front_end.openai.responses.create(model=MODEL, input=QUESTION, reasoning={"effort": "high"})
    assert caught.value.param == "reasoning.effort"
    assert "reasoning.effort" in caught.value.message


# ---------------------------------------------------------------------------------------------------- conversations


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_conversations(text: ModelText, says: Any, kind: str) -> None:
    async with FakeCore(outputs=says("Paris.")) as core, redis_server() as redis:
        store = RedisResponses(redis.url) if kind == "redis" else None
        async with running(text, [core], store=store) as front_end:
            api = front_end.openai.responses
            first = await api.create(model=MODEL, input=QUESTION, instructions="Be brief.")
            async with api.stream(model=MODEL, input="And of Italy?", previous_response_id=first.id) as stream:
                second = await stream.get_final_response()
            # Each response is complete by itself.
            await api.delete(first.id)
            third = await api.create(model=MODEL, input="Thanks", previous_response_id=second.id)
            with pytest.raises(openai.NotFoundError):
                await api.retrieve(first.id)
            with pytest.raises(openai.NotFoundError) as caught:
                await api.create(model=MODEL, input="x", previous_response_id=first.id)
            assert caught.value.param == "previous_response_id"
            again = await api.retrieve(second.id)
            items = await api.input_items.list(third.id)
        if store is not None:
            await store.close()
    # Instructions are of one response alone; the template then has its own.
    assert prompt(text, core).endswith(
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n"
        "<|im_start|>user\nAnd of Italy?<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Be brief." not in prompt(text, core)
    assert again.output_text == "Paris."
    assert again.previous_response_id == first.id
    assert again.to_dict()["store"] is True
    (item,) = items.data
    assert item.to_dict()["content"] == [{"type": "input_text", "text": "Thanks"}]


async def test_what_is_not_stored(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        answer = await front_end.openai.responses.create(model=MODEL, input=QUESTION, store=False)
        assert answer.to_dict()["store"] is False
        for call in (
            front_end.openai.responses.retrieve(answer.id),
            front_end.openai.responses.delete(answer.id),
            front_end.openai.responses.cancel(answer.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call


async def test_another_key_cannot_read_it(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core], keys=["one", "two"]) as front_end:
        mine = front_end.openai.responses
        other = front_end.openai.with_options(api_key="two").responses
        answer = await mine.create(model=MODEL, input=QUESTION)
        for call in (
            other.retrieve(answer.id),
            other.delete(answer.id),
            other.cancel(answer.id),
            other.create(model=MODEL, input="x", previous_response_id=answer.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert (await mine.retrieve(answer.id)).id == answer.id
    assert len(core.requests) == 1


async def test_a_store_that_is_gone(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, redis_server() as redis:
        store = RedisResponses(redis.url)
        async with running(text, [core], store=store) as front_end:
            api = front_end.openai.responses
            first = await api.create(model=MODEL, input=QUESTION, store=True)
            await redis.stop()
            # What does not need it is answered, and says that it is not kept.
            answer = await api.create(model=MODEL, input=QUESTION)
            assert (answer.output_text, answer.to_dict()["store"]) == ("Yes", False)
            async with api.stream(model=MODEL, input=QUESTION) as stream:
                assert (await stream.get_final_response()).to_dict()["store"] is False
            await front_end.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
            asked = len(core.requests)
            for call in (
                api.create(model=MODEL, input=QUESTION, store=True),
                api.create(model=MODEL, input="x", previous_response_id=first.id),
                api.retrieve(first.id),
                api.delete(first.id),
            ):
                with pytest.raises(openai.InternalServerError) as caught:
                    await call
                assert caught.value.status_code == 503
                assert caught.value.response.headers["retry-after"]
            assert len(core.requests) == asked
        await store.close()


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages_of_input_items(text: ModelText, says: Any, order: Any) -> None:
    given: list[Any] = [{"role": "user", "content": str(number)} for number in range(5)]
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        api = front_end.openai.responses
        answer = await api.create(model=MODEL, input=given)
        seen = [item async for item in api.input_items.list(answer.id, limit=2, order=order)]
        url = f"/v1/responses/{answer.id}/input_items"
        for query, status in (("limit=0", 400), ("order=up", 400), ("after=x", 404)):
            refused = await front_end.http.get(f"{url}?{query}")
            assert refused.status_code == status
            assert refused.json()["error"]["param"] == query.partition("=")[0]
        streamed = await front_end.http.get(f"/v1/responses/{answer.id}?stream=true")
        assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")
    texts: list[Any] = [item.to_dict()["content"] for item in seen]
    numbers = [content[0]["text"] for content in texts]
    assert numbers == (["0", "1", "2", "3", "4"] if order == "asc" else ["4", "3", "2", "1", "0"])
    assert len({item.id for item in seen}) == 5


async def test_cancel(text: ModelText, says: Any) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        api = front_end.openai.responses
        stream = await api.create(model=MODEL, input=QUESTION, stream=True)
        request = await core.next_request()
        request.send(*text.tokenizer.encode("Well", add_special_tokens=False))
        created = await anext(stream)
        assert created.type == "response.created"
        response_id = created.response.id
        running_now = await api.retrieve(response_id)
        assert running_now.status == "in_progress"
        cancelled = await api.cancel(response_id)
        assert (cancelled.id, cancelled.status) == (response_id, "cancelled")
        *_, last = [event async for event in stream]
        await core.wait_for(lambda: request.aborted)
        assert last.type == "response.failed"
        assert last.response.status == "cancelled"
        kept = await api.retrieve(response_id)
        assert kept.status == "cancelled"
        with pytest.raises(openai.BadRequestError):
            await api.cancel(response_id)


async def test_a_stream_that_fails(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        stream = await front_end.openai.responses.create(model=MODEL, input=QUESTION, stream=True)
        request = await core.next_request()
        request.send(*text.tokenizer.encode("Well", add_special_tokens=False))
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        front_end.admission.expire()
        *_, last = [event async for event in stream]
        await core.wait_for(lambda: request.aborted)
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    assert last.response.output[0].status == "incomplete"


async def test_truncation(text: ModelText, says: Any) -> None:
    turns: list[Any] = [{"role": "system", "content": "Be brief."}]
    for number in range(6):
        turns += [
            {"role": "user", "content": f"Q{number} " + "la " * 200},
            {"role": "assistant", "content": f"A{number}"},
        ]
    turns.append({"role": "user", "content": "Last"})
    async with FakeCore(outputs=says("Yes"), max_model_len=900) as core, running(text, [core]) as front_end:
        api = front_end.openai.responses
        with pytest.raises(openai.BadRequestError) as caught:
            await api.create(model=MODEL, input=turns)
        assert caught.value.code == "context_length_exceeded"
        answer = await api.create(model=MODEL, input=turns, truncation="auto", max_output_tokens=200)
        with pytest.raises(openai.BadRequestError):
            await api.create(model=MODEL, input="la " * 2000, truncation="auto")
    assert answer.truncation == "auto"
    (request,) = core.requests
    assert len(request.prompt_ids) + 200 <= 900
    assert len(request.prompt_ids) > 450  # as many turns as fit
    seen = prompt(text, core)
    assert seen.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQ")
    assert "A5" in seen
    assert "Q0" not in seen


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input": None}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, 400, "input[0].role"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, 400, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            400,
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, 400, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, 400, "input[0].arguments"),
        ({"model": "other"}, 404, "model"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, 400, "tools[0].name"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, 400, "tool_choice.type"),
        ({"previous_response_id": "resp_1"}, 404, "previous_response_id"),
        ({"previous_response_id": "resp_" + "0" * 32}, 404, "previous_response_id"),
        ({"previous_response_id": "*"}, 404, "previous_response_id"),
        ({"background": True}, 400, "background"),
        ({"conversation": "conv_1"}, 400, "conversation"),
        ({"prompt": {"id": "x"}}, 400, "prompt"),
        ({"include": ["everything"]}, 400, "include[0]"),
        ({"text": {"format": {"type": "xml"}}}, 400, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "text.format.schema"),
        ({"reasoning": {"effort": "some"}}, 400, "reasoning.effort"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"max_output_tokens": 5000}, 400, "max_output_tokens"),
        ({"top_logprobs": 21}, 400, "top_logprobs"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata"),
        ({"truncation": "some"}, 400, "truncation"),
    ],
)
async def test_bad_input(text: ModelText, change: dict[str, Any], status: int, param: str) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        answer = await front_end.http.post("/v1/responses", json={"model": MODEL, "input": "Hi"} | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert not core.requests


def wire(text: str) -> list[tuple[str, Any]]:
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))))
    return found
