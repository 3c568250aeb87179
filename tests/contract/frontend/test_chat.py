"""Chat completions as the official client sees them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tests.contract.frontend.conftest import EOS, MODEL, events, running
from tests.fakes.core import STOP, FakeCore

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionChunk

    from tercet_frontend.tokenizing import ModelText

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris. 🙂 Ça va? 你好"


async def test_whole_answer(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says(ANSWER)) as core, running(text, [core]) as front_end:
        answer = await front_end.openai.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    (request,) = core.requests
    assert text.tokenizer.decode(request.prompt_ids, skip_special_tokens=False).endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt_ids)
    # The end-of-sequence token was generated, so it counts.
    assert answer.usage.completion_tokens == len(text.tokenizer.encode(ANSWER, add_special_tokens=False)) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_stream(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says(ANSWER)) as core, running(text, [core]) as front_end:
        stream = await front_end.openai.chat.completions.create(
            model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
        chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
        whole = await front_end.openai.chat.completions.create(model=MODEL, messages=QUESTION)
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *content, usage = chunks
    assert content[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in content) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in content] == [None] * (len(content) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in content)
    assert (usage.choices, usage.usage) == ([], whole.usage)
    assert whole.choices[0].message.content == ANSWER


async def test_stream_on_the_wire(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Paris.")) as core, running(text, [core]) as front_end:
        request = {"model": MODEL, "messages": QUESTION, "stream": True}
        async with front_end.http.stream("POST", "/v1/chat/completions", json=request) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-accel-buffering"] == "no"
            *chunks, done = await events(response)
    assert done == "[DONE]"
    parsed = [orjson.loads(chunk) for chunk in chunks]
    assert parsed[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert parsed[-1]["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert all("usage" not in chunk for chunk in parsed)


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_kept_apart(text: ModelText, stream: bool) -> None:
    def outputs(request: Any) -> list[int]:
        number = core.requests.index(request)
        return [*text.tokenizer.encode(f"Answer {number}" + " again" * number, add_special_tokens=False), EOS]

    async with FakeCore(outputs=outputs) as core, running(text, [core]) as front_end:
        found = dict.fromkeys(range(5), "")
        reasons: dict[int, str] = {}
        create = front_end.openai.chat.completions.create
        if stream:
            async for chunk in await create(model=MODEL, messages=QUESTION, n=5, seed=7, stream=True):
                for choice in chunk.choices:
                    found[choice.index] += choice.delta.content or ""
                    if choice.finish_reason:
                        assert choice.index not in reasons
                        reasons[choice.index] = choice.finish_reason
        else:
            whole = await create(model=MODEL, messages=QUESTION, n=5, seed=7)
            found = {choice.index: choice.message.content or "" for choice in whole.choices}
            reasons = {choice.index: choice.finish_reason for choice in whole.choices}
    assert found == {number: f"Answer {number}" + " again" * number for number in range(5)}
    assert reasons == dict.fromkeys(range(5), "stop")
    assert len({request.submit.sampling.seed for request in core.requests}) == 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_stop_strings(text: ModelText, says: Any, stream: bool, n: int) -> None:
    # The core would go on for ever: only the front end can see the stop string, which begins and ends within tokens.
    story = says("Once upon a time there was a stanza of three lines." + " la" * 1000)
    async with FakeCore(outputs=story) as core, running(text, [core]) as front_end:
        create = front_end.openai.chat.completions.create
        counted: int | None = None
        if stream:
            texts = dict.fromkeys(range(n), "")
            async for chunk in await create(
                model=MODEL, messages=QUESTION, stop=["nza of t", "never"], n=n, stream=True
            ):
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        else:
            whole = await create(model=MODEL, messages=QUESTION, stop=["nza of t", "never"], n=n)
            texts = {choice.index: choice.message.content or "" for choice in whole.choices}
            assert {choice.finish_reason for choice in whole.choices} == {"stop"}
            assert whole.usage is not None
            counted = whole.usage.completion_tokens
        assert texts == dict.fromkeys(range(n), "Once upon a time there was a sta")
        await core.wait_for(lambda: all(request.finished_at is not None for request in core.requests))
    assert not any(request.aborted for request in core.requests)
    used = {request.finished_at for request in core.requests}
    assert len(used) == 1
    assert counted in (None, n * (used.pop() or 0))


async def test_length(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says(ANSWER)) as core, running(text, [core]) as front_end:
        answer = await front_end.openai.chat.completions.create(model=MODEL, messages=QUESTION, max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert ANSWER.startswith(answer.choices[0].message.content or "-")


async def test_what_the_core_is_asked(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        await front_end.openai.chat.completions.create(model=MODEL, messages=QUESTION)
        await front_end.openai.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=9,
            temperature=0.5,
            top_p=0.25,
            seed=-3,
            extra_body={"top_k": -1, "min_p": 0.125, "min_tokens": 4, "stop_token_ids": [7, 8, 7], "ignore_eos": True},
        )
    default, asked = (request.submit.sampling for request in core.requests)
    prompt = len(core.requests[0].prompt_ids)
    assert (default.temperature, default.top_p, default.top_k, default.min_p) == (1.0, 1.0, 0, 0.0)
    assert default.max_tokens == 2048 - prompt
    assert list(default.eos_token_ids) == [EOS]
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (0.5, 0.25, 0, 0.125)
    assert (asked.max_tokens, asked.min_tokens) == (9, 4)
    assert (list(asked.stop_token_ids), list(asked.eos_token_ids)) == ([7, 8], [])


async def test_seeds(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        create = front_end.openai.chat.completions.create
        for seed in (5, 5, None, None):
            await create(model=MODEL, messages=QUESTION, seed=seed)
    first, again, random, other = (request.submit.sampling.seed for request in core.requests)
    assert first == again
    assert len({first, random, other}) == 3


async def test_roles_and_parts(text: ModelText, says: Any) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]},
        {"role": "assistant", "content": "Three", "refusal": None, "tool_calls": None, "audio": None},
        {"role": "user", "content": "Four", "unknown": [1]},
    ]
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        await front_end.openai.chat.completions.create(model=MODEL, messages=messages)
    (request,) = core.requests
    assert text.tokenizer.decode(request.prompt_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne\nTwo<|im_end|>\n"
        "<|im_start|>assistant\nThree<|im_end|>\n<|im_start|>user\nFour<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_cached_tokens(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        call = front_end.openai.chat.completions.create(model=MODEL, messages=QUESTION)
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(call)
            request = await core.next_request()
            request.send(EOS, finish=STOP, stop_id=EOS, cached=16)
    usage = answer.result().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 16
    assert answer.result().choices[0].message.content == ""


async def test_long_prompts_are_tokenized_alike(text: ModelText, says: Any) -> None:
    story = "Once upon a time. " * 300  # long enough for a thread
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        await front_end.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": story}])
    expected = text.tokenizer.encode(story, add_special_tokens=False)
    ids = core.requests[0].prompt_ids
    assert story in text.tokenizer.decode(ids)
    assert len(ids) >= len(expected)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_message_is_echoed(text: ModelText, says: Any, stream: bool) -> None:
    begun: list[Any] = [*QUESTION, {"role": "assistant", "content": "The capital is"}]
    continued = {"continue_final_message": True, "echo": True}
    expected = [
        (begun, continued, "The capital is Paris."),
        (begun, {"echo": True}, "The capital is Paris."),
        (begun, continued | {"echo": False}, " Paris."),
        (QUESTION, {"echo": True}, " Paris."),  # the user's words are not the assistant's
    ]
    async with FakeCore(outputs=says(" Paris.")) as core, running(text, [core]) as front_end:
        for messages, fields, content in expected:
            create = front_end.openai.chat.completions.create
            options: Any = {"model": MODEL, "messages": messages, "extra_body": fields, "logprobs": True}
            if stream:
                chunks = [chunk async for chunk in await create(stream=True, **options)]
                found = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            else:
                found = (await create(**options)).choices[0].message.content or ""
            assert found == content
