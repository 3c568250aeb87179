"""Log-probabilities, echo, best_of and token ids, as clients see them; the fake core's scores are known."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import orjson
import pytest

from tests.contract.frontend.conftest import EOS, MODEL, FrontEnd, events, running
from tests.fakes.core import FakeCore, scored

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "Paris. 🙂 Ça va? 你好"
PROMPT = "The capital of France"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


async def _stream(front_end: FrontEnd, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with front_end.http.stream("POST", path, json=body | {"stream": True}) as response:
        *chunks, done = await events(response)
        assert response.status_code == 200, chunks
    assert done == "[DONE]"
    return [orjson.loads(chunk) for chunk in chunks]


async def _whole(front_end: FrontEnd, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await front_end.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.mark.parametrize("top", [None, 0, 3, 20])
async def test_chat(text: ModelText, says: Any, top: int | None) -> None:
    async with FakeCore(outputs=says(ANSWER)) as core, running(text, [core]) as front_end:
        answer = await front_end.openai.chat.completions.create(
            model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=top
        )
        chunks = [
            chunk.choices[0]
            async for chunk in await front_end.openai.chat.completions.create(
                model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=top, stream=True
            )
        ]
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.refusal is None
    content = choice.logprobs.content or []
    assert b"".join(bytes(entry.bytes or ()) for entry in content).decode() == choice.message.content == ANSWER
    ids = [*text.tokenizer.encode(ANSWER, add_special_tokens=False), EOS]
    assert answer.usage is not None
    assert len(content) == len(ids) == answer.usage.completion_tokens
    for position, (token, entry) in enumerate(zip(ids, content, strict=True)):
        logprob, _, tops = scored(position, token, top or 0)
        assert entry.logprob == logprob
        assert [found.logprob for found in entry.top_logprobs] == [value for _, value in tops]
        for (alternative, _), found in zip(tops, entry.top_logprobs, strict=True):
            assert bytes(found.bytes or ()) == text.detokenizer.raw(alternative)
    assert (content[-1].token, content[-1].bytes) == ("<|im_end|>", [])
    assert content[0].token == "Paris"
    assert any(entry.token.startswith("\\x") for entry in content)  # a token within a character
    # Streamed: the same entries, each with the chunk that has its text.
    streamed = [entry for chunk in chunks for entry in (chunk.logprobs.content if chunk.logprobs else None) or ()]
    assert streamed == content
    said, spelled = "", b""
    for chunk in chunks:
        said += chunk.delta.content or ""
        entries = (chunk.logprobs.content if chunk.logprobs else None) or []
        spelled += b"".join(bytes(entry.bytes or ()) for entry in entries)
        assert said.startswith(spelled.decode("utf-8", "replace"))
    assert spelled.decode() == said


async def test_without_logprobs_there_are_none(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says(ANSWER)) as core, running(text, [core]) as front_end:
        for extra in ({}, {"logprobs": False}, {"logprobs": None}):
            answer = await _whole(front_end, CHAT, {"model": MODEL, "messages": QUESTION, **extra})
            assert answer["choices"][0]["logprobs"] is None
    assert not any(request.submit.sampling.HasField("logprobs") for request in core.requests)


@pytest.mark.parametrize("count", [0, 2])
async def test_completions(text: ModelText, says: Any, count: int) -> None:
    async with FakeCore(outputs=says(ANSWER)) as core, running(text, [core]) as front_end:
        body = {"model": MODEL, "prompt": PROMPT, "logprobs": count, "max_tokens": 100}
        (choice,) = (await _whole(front_end, COMPLETION, body))["choices"]
        chunks = [chunk["choices"][0] for chunk in await _stream(front_end, COMPLETION, body)]
    logprobs = choice["logprobs"]
    ids = [*text.tokenizer.encode(ANSWER, add_special_tokens=False), EOS]
    assert logprobs["tokens"][0] == "Paris"
    assert logprobs["tokens"][-1] == "<|im_end|>"
    assert any(token.startswith("bytes:\\x") for token in logprobs["tokens"])
    assert logprobs["token_logprobs"] == [scored(at, token, count)[0] for at, token in enumerate(ids)]
    assert logprobs["text_offset"][-1] == len(choice["text"])
    for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    for position, (token, tops) in enumerate(zip(ids, logprobs["top_logprobs"], strict=True)):
        _, _, expected = scored(position, token, count)
        assert len(tops) in (len(expected), len(expected) + 1)
        assert logprobs["token_logprobs"][position] in tops.values()
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"] == ANSWER
    for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for chunk in chunks for value in (chunk["logprobs"] or {column: []})[column]] == logprobs[column]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stop", [None, "ris", [". 🙂 Ç", "never"], "你"])
@pytest.mark.parametrize("include", [False, True])
async def test_cut_at_stop_strings(text: ModelText, says: Any, n: int, stop: Any, include: bool) -> None:
    async with FakeCore(outputs=says(ANSWER)) as core, running(text, [core]) as front_end:
        body = {
            "model": MODEL, "messages": QUESTION, "logprobs": True, "top_logprobs": 1, "n": n, "stop": stop,
            "include_stop_str_in_output": include, "return_token_ids": True,
        }  # fmt: skip
        answer = await _whole(front_end, CHAT, body)
        chunks = await _stream(front_end, CHAT, body)
    strings = [stop] if isinstance(stop, str) else (stop or [])
    found = next((string for string in strings if string in ANSWER), None)
    expected = ANSWER if found is None else ANSWER[: ANSWER.index(found) + (len(found) if include else 0)]
    joined: dict[int, str] = dict.fromkeys(range(n), "")
    spelled: dict[int, list[Any]] = {index: [] for index in range(n)}
    ids: dict[int, list[int]] = {index: [] for index in range(n)}
    reasons: dict[int, Any] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        joined[choice["index"]] += choice["delta"].get("content", "")
        spelled[choice["index"]] += choice["logprobs"]["content"] if choice["logprobs"] else []
        ids[choice["index"]] += choice.get("token_ids", [])
        if choice["finish_reason"]:
            reasons[choice["index"]] = (choice["finish_reason"], choice["stop_reason"])
    for choice in answer["choices"]:
        index, content = choice["index"], choice["logprobs"]["content"]
        assert choice["message"]["content"] == joined[index] == expected
        assert spelled[index] == content
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == expected
        assert len(content) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"] / n
        assert ids[index] == choice["token_ids"]
        assert (choice["finish_reason"], choice["stop_reason"]) == reasons[index] == ("stop", found)
    if found is not None:
        await core.wait_for(lambda: all(request.finished_at is not None for request in core.requests))
        assert {request.finished_at for request in core.requests} == {len(answer["choices"][0]["token_ids"])}


@pytest.mark.parametrize("form", ["string", "ids"])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo(text: ModelText, says: Any, stream: bool, form: str) -> None:
    ids = text.tokenizer.encode(PROMPT)
    prompt: Any = PROMPT if form == "string" else ids
    async with FakeCore(outputs=says(" is Paris.")) as core, running(text, [core]) as front_end:
        body = {"model": MODEL, "prompt": prompt, "echo": True, "logprobs": 1, "n": 2}
        plain = {"model": MODEL, "prompt": prompt, "echo": True}
        if stream:
            found: dict[int, dict[str, Any]] = {}
            for chunk in await _stream(front_end, COMPLETION, body):
                (choice,) = chunk["choices"]
                own = found.setdefault(choice["index"], {"text": "", "logprobs": {}})
                own["text"] += choice["text"]
                for column, values in (choice["logprobs"] or {}).items():
                    own["logprobs"].setdefault(column, []).extend(values)
            choices = [found[index] for index in sorted(found)]
            (other,) = {"".join(chunk["choices"][0]["text"] for chunk in await _stream(front_end, COMPLETION, plain))}
        else:
            choices = (await _whole(front_end, COMPLETION, body))["choices"]
            other = (await _whole(front_end, COMPLETION, plain))["choices"][0]["text"]
    assert other == f"{PROMPT} is Paris."
    assert len(choices) == 2
    for choice in choices:
        logprobs = choice["logprobs"]
        assert choice["text"] == other
        assert "".join(logprobs["tokens"][:-1]) == other  # the last one ends the sequence
        assert logprobs["text_offset"][:-1] == [
            len("".join(logprobs["tokens"][:at])) for at in range(len(logprobs["tokens"]) - 1)
        ]
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        expected = [scored(position, token, 1)[0] for position, token in enumerate(ids)][1:]
        assert logprobs["token_logprobs"][1 : len(ids)] == expected
    assert [request.submit.sampling.HasField("prompt_logprobs") for request in core.requests] == [True, True, False]


@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_a_prompt(text: ModelText, says: Any, stream: bool) -> None:
    async with FakeCore(outputs=says(" is Paris.")) as core, running(text, [core]) as front_end:
        body = {"model": MODEL, "prompt": [PROMPT, "Two"], "echo": True, "logprobs": 2, "max_tokens": 0}
        if stream:
            options = {"stream_options": {"include_usage": True}}
            *chunks, last = await _stream(front_end, COMPLETION, body | options)
            usage = last["usage"]
            parts = [chunk["choices"][0] for chunk in chunks]
            choices = [part for part in parts if part["text"]]
            assert [part["finish_reason"] for part in parts if not part["text"]] == ["length", "length"]
        else:
            answer = await _whole(front_end, COMPLETION, body)
            choices, usage = answer["choices"], answer["usage"]
            assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    assert sorted(choice["text"] for choice in choices) == [PROMPT, "Two"]
    for choice in choices:
        assert len(choice["logprobs"]["tokens"]) == len(text.tokenizer.encode(choice["text"]))
        assert choice["logprobs"]["token_logprobs"][0] is None
    assert usage["completion_tokens"] == 0
    assert {request.submit.sampling.max_tokens for request in core.requests} == {1}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_logprobs_and_token_ids(text: ModelText, says: Any, path: str, stream: bool) -> None:
    asks = {"messages": QUESTION} if path == CHAT else {"prompt": PROMPT}
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        body = {"model": MODEL, "prompt_logprobs": 2, "return_token_ids": True, **asks}
        answer: Any
        if stream:
            chunks = await _stream(front_end, path, body)
            holders = chunks if path == CHAT else [chunk["choices"][0] for chunk in chunks]
            (answer,) = [holder for holder in holders if "prompt_logprobs" in holder]
            ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
        else:
            whole = await _whole(front_end, path, body)
            ids = whole["choices"][0]["token_ids"]
            answer = whole if path == CHAT else whole["choices"][0]
    prompt = core.requests[0].prompt_ids
    assert answer["prompt_token_ids"] == prompt
    assert ids == [*text.tokenizer.encode("Yes", add_special_tokens=False), EOS]
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(prompt) - 1
    for position, (token, table) in enumerate(zip(prompt[1:], rest, strict=True), 1):
        logprob, rank, tops = scored(position, token, 2)
        assert table[str(token)] == {
            "logprob": logprob, "rank": rank, "decoded_token": text.detokenizer.raw(token).decode("utf-8", "replace")
        }  # fmt: skip
        assert set(table) == {str(token), *(str(top) for top, _ in tops)}
        assert [table[str(top)]["rank"] for top, _ in tops] == [1, 2]


async def test_tokens_as_ids(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        own = {"model": MODEL, "return_tokens_as_token_ids": True}
        chat = await _whole(front_end, CHAT, own | {"messages": QUESTION, "logprobs": True, "top_logprobs": 1})
        plain = await _whole(front_end, COMPLETION, own | {"prompt": PROMPT, "logprobs": 1})
    (token,) = text.tokenizer.encode("Yes", add_special_tokens=False)
    entry = chat["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == f"token_id:{token}"
    assert bytes(entry["bytes"]) == b"Yes"
    assert entry["top_logprobs"][0]["token"] == f"token_id:{token + 1}"
    assert plain["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}", f"token_id:{EOS}"]
    assert f"token_id:{token}" in plain["choices"][0]["logprobs"]["top_logprobs"][0]


async def test_best_of(text: ModelText) -> None:
    answers = [" bad bad", " good", " fair fair fair"]

    def outputs(request: Any) -> list[int]:
        number = core.requests.index(request) % 3
        return [*text.tokenizer.encode(answers[number], add_special_tokens=False), EOS]

    def mean(answer: str) -> float:
        ids = [*text.tokenizer.encode(answer, add_special_tokens=False), EOS]
        return sum(scored(at, token, 0)[0] for at, token in enumerate(ids)) / len(ids)

    async with FakeCore(outputs=outputs) as core, running(text, [core]) as front_end:
        create = front_end.openai.completions.create
        best = await create(model=MODEL, prompt=["One", "Two"], best_of=3, n=2)
        shown = await create(model=MODEL, prompt="One", best_of=3, logprobs=0)
        all_of_them = await create(model=MODEL, prompt="One", best_of=3, n=3, stream=True)
        texts = {chunk.choices[0].index async for chunk in all_of_them}
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model=MODEL, prompt="One", best_of=3, n=2, stream=True)
        assert caught.value.param == "best_of"
    ranked = sorted(answers, key=mean, reverse=True)
    assert [choice.text for choice in best.choices] == ranked[:2] * 2
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage is not None
    each = sum(len(text.tokenizer.encode(answer, add_special_tokens=False)) + 1 for answer in answers)
    assert best.usage.completion_tokens == 2 * each
    assert shown.choices[0].text == ranked[0]
    assert shown.choices[0].logprobs is not None
    assert texts == {0, 1, 2}


async def test_minus_infinity(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        call = asyncio.create_task(
            _whole(front_end, CHAT, {"model": MODEL, "messages": QUESTION, "logprobs": True, "top_logprobs": 1})
        )
        request = await core.next_request()
        request.send(100, starts=0, scores=[(float("-inf"), 9, [(5, float("-inf"))])], finish=2)
        (choice,) = (await call)["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_continuous_usage(text: ModelText, says: Any, path: str) -> None:
    asks = {"messages": QUESTION} if path == CHAT else {"prompt": PROMPT}
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with FakeCore(outputs=says(ANSWER)) as core, running(text, [core]) as front_end:
        body = {"model": MODEL, "max_tokens": 50, **asks}
        *chunks, last = await _stream(front_end, path, body | {"stream_options": options})
        ignored = await _stream(front_end, path, body | {"stream_options": {"continuous_usage_stats": True}})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert len(set(counts)) > 5
    assert counts[-1] == last["usage"]["completion_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {len(core.requests[0].prompt_ids)}
    assert all(
        chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + chunk["usage"]["completion_tokens"]
        for chunk in chunks
    )
    assert not any("usage" in chunk for chunk in ignored)


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_also_when_a_stop_string_ends_it(text: ModelText, says: Any, stream: bool) -> None:
    async with FakeCore(outputs=says(ANSWER), cached=16) as core, running(text, [core]) as front_end:
        body = {"model": MODEL, "messages": QUESTION, "stop": "va"}
        if stream:
            usage = (await _stream(front_end, CHAT, body | {"stream_options": {"include_usage": True}}))[-1]["usage"]
        else:
            usage = (await _whole(front_end, CHAT, body))["usage"]
        await core.wait_for(lambda: core.requests[0].finished_at is not None)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 16
