"""What fields of a request become on their way to the core, and what they do to the text."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.checkpoint import GenerationDefaults
from tests.contract.frontend.conftest import EOS, MODEL, FrontEnd, running
from tests.fakes.core import FakeCore, FakeRequest

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ASKS: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    COMPLETION: {"model": MODEL, "prompt": "Hi"},
}


async def _ask(front_end: FrontEnd, path: str, **fields: Any) -> dict[str, Any]:
    response = await front_end.http.post(path, json=ASKS[path] | fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


def _words(request: FakeRequest, text: ModelText) -> set[str]:
    return {text.tokenizer.decode(list(word.ids)) for word in request.submit.sampling.bad_words}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_sampling(text: ModelText, says: Any, path: str) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        await _ask(front_end, path)
        await _ask(
            front_end,
            path,
            presence_penalty=0.5,
            frequency_penalty=-2,
            repetition_penalty=1.25,
            logit_bias={"5": -100, "49151": 2.5},
            allowed_token_ids=[9, 8, 9],
            bad_words=["word", " spaced", "two words"],
        )
    default, asked = core.requests
    sampling = default.submit.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0, 0)
    assert not sampling.HasField("repetition_penalty")
    assert not sampling.bias_ids
    assert not sampling.allowed_token_ids
    assert not sampling.bad_words
    sampling = asked.submit.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -2, 1.25)
    assert dict(zip(sampling.bias_ids, sampling.bias_values, strict=True)) == {5: -100, 49_151: 2.5}
    assert list(sampling.allowed_token_ids) == [9, 8]
    assert _words(asked, text) == {"word", " word", "spaced", " spaced", "two words", " two words"}


async def test_a_checkpoint_s_repetition_penalty(text: ModelText, says: Any) -> None:
    own = replace(text, defaults=GenerationDefaults(repetition_penalty=1.5))
    async with FakeCore(outputs=says("Yes")) as core, running(own, [core]) as front_end:
        await _ask(front_end, CHAT)
        await _ask(front_end, CHAT, repetition_penalty=1)
    default, asked = (request.submit.sampling for request in core.requests)
    assert default.repetition_penalty == 1.5
    assert not asked.HasField("repetition_penalty")


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_scheduling(text: ModelText, says: Any, path: str) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core], keys=["k"]) as front_end:
        await _ask(front_end, path)
        await _ask(front_end, path, priority=-7, queue_timeout=1.5, cache_salt="pepper")
        await _ask(front_end, path, cache_salt="salt")
    plain, asked, other = (request.submit for request in core.requests)
    assert (plain.priority, plain.queue_deadline_s, plain.cache_salt) == (0, 0.0, plain.tenant)
    assert (asked.priority, asked.queue_deadline_s) == (-7, 1.5)
    # A client's salt is its own: it never equals another tenant's, whatever is sent.
    assert asked.cache_salt.startswith(f"{asked.tenant}/")
    assert len({plain.cache_salt, asked.cache_salt, other.cache_salt}) == 3


async def test_a_queue_timeout_that_runs_out_is_the_core_s_answer(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        call = asyncio.create_task(front_end.http.post(CHAT, json=ASKS[CHAT] | {"queue_timeout": 0.5}))
        (await core.next_request()).reject(pb.ERROR_KIND_OVERLOADED, "It waited too long.")
        answer = await call
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize(
    ("fields", "kept"),
    [({}, None), ({"truncate_prompt_tokens": 3}, 3), ({"truncate_prompt_tokens": 500}, None)],
)
async def test_truncated_prompts(text: ModelText, says: Any, fields: dict[str, Any], kept: int | None) -> None:
    prompt = "One two three four five six."
    ids = text.tokenizer.encode(prompt)
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        await _ask(front_end, COMPLETION, prompt=prompt, **fields)
        await _ask(front_end, COMPLETION, prompt=ids, **fields)
        echoed = await _ask(front_end, COMPLETION, prompt=prompt, echo=True, **fields)
        await _ask(front_end, CHAT, **fields)
    expected = ids if kept is None else ids[-kept:]
    assert [request.prompt_ids for request in core.requests[:3]] == [expected] * 3
    assert echoed["choices"][0]["text"] == text.tokenizer.decode(expected) + "Yes"
    assert echoed["usage"]["prompt_tokens"] == len(expected)
    assert len(core.requests[3].prompt_ids) == 3 if kept else len(core.requests[3].prompt_ids) > 3


async def test_a_prompt_that_is_too_long_is_cut_to_what_fits(text: ModelText, says: Any) -> None:
    long = "word " * 20_000  # far beyond what is read of it
    tail = text.tokenizer.encode("word " * 3_000)
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        await _ask(front_end, COMPLETION, prompt=long, truncate_prompt_tokens=-1, max_tokens=100)
        await _ask(front_end, CHAT, messages=[{"role": "user", "content": long}], truncate_prompt_tokens=-1)
        await _ask(front_end, COMPLETION, prompt=long, truncate_prompt_tokens=7)
    completion, chat, few = (request.prompt_ids for request in core.requests)
    assert completion == tail[-1948:]
    assert len(chat) == 2047
    assert text.tokenizer.decode(chat, skip_special_tokens=False).endswith("word <|im_end|>\n<|im_start|>assistant\n")
    assert few == tail[-7:]


@pytest.mark.parametrize("stream", [False, True])
async def test_special_tokens_and_stop_tokens_in_the_text(text: ModelText, stream: bool) -> None:
    start, end = text.tokenizer.encode("<|im_start|><|im_end|>", add_special_tokens=False)
    words = text.tokenizer.encode("Hello there", add_special_tokens=False)
    asks: dict[str, tuple[dict[str, Any], str, Any]] = {
        "skipped": ({}, "Hello there", None),
        "shown": ({"skip_special_tokens": False}, "Hello<|im_start|> there", None),
        "the end as well": (
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            "Hello<|im_start|> there<|im_end|>",
            None,
        ),
        "a stop token": ({"stop_token_ids": [words[1]]}, "Hello", words[1]),
        "that is included": (
            {"stop_token_ids": [words[1]], "include_stop_str_in_output": True}, "Hello there", words[1]
        ),
        "a stop string": ({"stop": "the"}, "Hello ", "the"),
        "that is also included": ({"stop": "the", "include_stop_str_in_output": True}, "Hello the", "the"),
    }  # fmt: skip
    async with (
        FakeCore(outputs=lambda _: [words[0], start, *words[1:], end]) as core,
        running(text, [core]) as front_end,
    ):
        for name, (fields, expected, stop) in asks.items():
            if stream:
                chunks = [
                    chunk.choices[0]
                    async for chunk in await front_end.openai.chat.completions.create(
                        model=MODEL, messages=ASKS[CHAT]["messages"], stream=True, extra_body=fields
                    )
                ]
                said = "".join(chunk.delta.content or "" for chunk in chunks)
                reason: Any = chunks[-1].model_dump()
            else:
                (reason,) = (await _ask(front_end, CHAT, **fields))["choices"]
                said = reason["message"]["content"]
            assert said == expected, name
            assert (reason["finish_reason"], reason["stop_reason"]) == ("stop", stop), name


@pytest.mark.parametrize("given", [None, True, False])
async def test_special_tokens_around_prompts(text: ModelText, says: Any, given: bool | None) -> None:
    seen: list[tuple[str, bool]] = []

    class Tokenizer:
        def encode(self, said: str, *, add_special_tokens: bool = True, **_: Any) -> list[int]:
            seen.append((said, add_special_tokens))
            return text.tokenizer.encode(said, add_special_tokens=add_special_tokens)

        def __getattr__(self, name: str) -> Any:
            return getattr(text.tokenizer, name)

    tokenizer: Any = Tokenizer()
    async with FakeCore(outputs=says("Yes")) as core, running(replace(text, tokenizer=tokenizer), [core]) as front_end:
        fields = {} if given is None else {"add_special_tokens": given}
        await _ask(front_end, COMPLETION, **fields)
        await _ask(front_end, CHAT, **fields)
    completion, chat = (special for _, special in seen)
    assert completion is (given is not False)
    assert chat is (given is True)


async def test_ids_of_answers_are_unique_whatever_clients_send(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        answers = [await front_end.http.post(CHAT, json=ASKS[CHAT], headers={"X-Request-Id": "mine"}) for _ in range(3)]
    assert {answer.headers["x-request-id"] for answer in answers} == {"mine"}
    identities = [answer.json()["id"] for answer in answers]
    assert len(set(identities)) == 3
    assert [request.submit.request_id for request in core.requests] == identities


async def test_the_end_of_sequence_is_the_default_end(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        answer = await _ask(front_end, CHAT)
    assert list(core.requests[0].submit.sampling.eos_token_ids) == [EOS]
    assert answer["choices"][0]["stop_reason"] is None
