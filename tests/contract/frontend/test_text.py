"""What is sent as text: whole characters only, nothing of a stop string or the prompt, streamed as when it is not."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tests.contract.frontend.conftest import EOS, MODEL, FrontEnd, events, running
from tests.fakes.core import FakeCore, FakeRequest

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

PROMPT = "Tell 🙂 me"
PIECES = ["The", " capital", " of", "🙂", "你好", "é", " ", "\n\n", "STO", "P", "\u200d", "🇫🇷", "x", "\ufffd"]
COMBINATIONS = list(
    itertools.product([1, 3], [None, "STOP", ["🙂é", "\n\nx", "of"]], [None, 0, 2], [False, True], [False, True])
)


def _answers(text: ModelText, seed: int) -> list[list[int]]:
    """Outputs of random pieces, some of them with ids that end within a character."""
    chance = random.Random(seed)
    found = []
    for _ in range(3):
        ids = text.tokenizer.encode("".join(chance.choices(PIECES, k=20)), add_special_tokens=False)
        if chance.random() < 0.5:
            ids.insert(chance.randrange(len(ids)), text.tokenizer.encode("🙂", add_special_tokens=False)[0])
        if chance.random() < 0.3:
            ids.append(text.tokenizer.encode("你", add_special_tokens=False)[0])
        found.append([*ids, EOS])
    return found


async def _streamed(front_end: FrontEnd, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    async with front_end.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        *chunks, _ = await events(response)
    for chunk in map(orjson.loads, chunks):
        (choice,) = chunk["choices"]
        own = found.setdefault(choice["index"], {"text": "", "tokens": [], "end": None})
        choice["text"].encode()  # no half of a surrogate pair: every piece is text by itself
        own["text"] += choice["text"]
        own["tokens"] += (choice["logprobs"] or {"tokens": []})["tokens"]
        if choice["finish_reason"]:
            assert own["end"] is None
            own["end"] = (choice["finish_reason"], choice["stop_reason"])
    return found


@pytest.mark.parametrize("seed", range(4))
async def test_streamed_as_when_it_is_not(text: ModelText, seed: int) -> None:
    answers = _answers(text, seed)

    def outputs(request: FakeRequest) -> list[int]:
        return answers[core.requests.index(request) % 3]

    async with FakeCore(outputs=outputs) as core, running(text, [core]) as front_end:
        for n, stop, logprobs, include, echo in COMBINATIONS:
            core.requests.clear()
            body = {
                "model": MODEL, "prompt": PROMPT, "n": n, "stop": stop, "logprobs": logprobs, "max_tokens": 200,
                "include_stop_str_in_output": include, "echo": echo,
            }  # fmt: skip
            whole = (await front_end.http.post("/v1/completions", json=body)).json()["choices"]
            core.requests.clear()
            streamed = await _streamed(front_end, body)
            for choice in whole:
                own = streamed[choice["index"]]
                assert own["text"] == choice["text"], body
                assert own["end"] == (choice["finish_reason"], choice["stop_reason"])
                assert own["tokens"] == (choice["logprobs"] or {"tokens": []})["tokens"]
                _check(choice, answers[choice["index"]], body, text)


def _check(choice: dict[str, Any], ids: list[int], body: dict[str, Any], text: ModelText) -> None:
    full = text.tokenizer.decode(ids)
    said = choice["text"]
    if body["echo"]:
        assert said.startswith(PROMPT)
        said = said[len(PROMPT) :]
    stops = [body["stop"]] if isinstance(body["stop"], str) else (body["stop"] or [])
    ends = [full.index(stop) + len(stop) for stop in stops if stop in full]
    if not ends:
        assert (said, choice["stop_reason"]) == (full, None)
        return
    found = choice["stop_reason"]
    assert full[: min(ends)].endswith(found)
    assert said == full[: min(ends) - (0 if body["include_stop_str_in_output"] else len(found))]


async def test_endless_invalid_bytes(text: ModelText) -> None:
    (first, *_) = text.tokenizer.encode("🙂", add_special_tokens=False)
    body = {"model": MODEL, "prompt": "a", "max_tokens": 600, "logprobs": 0}
    async with FakeCore(outputs=lambda _: [first] * 600) as core, running(text, [core]) as front_end:
        whole = (await front_end.http.post("/v1/completions", json=body)).json()["choices"][0]
        streamed = await _streamed(front_end, body)
    assert set(whole["text"]) == {"\ufffd"}
    assert len(whole["text"]) == 600
    assert streamed[0]["text"] == whole["text"]
    assert len(whole["logprobs"]["tokens"]) == 600


async def test_nothing_of_the_prompt(text: ModelText) -> None:
    smile = text.tokenizer.encode("🙂", add_special_tokens=False)
    rest = [*smile[1:], *text.tokenizer.encode(" ok", add_special_tokens=False), EOS]
    async with FakeCore(outputs=lambda _: rest) as core, running(text, [core]) as front_end:
        # The prompt ends within a character, which the answer completes.
        body = {"model": MODEL, "prompt": [*text.tokenizer.encode("hi "), smile[0]], "logprobs": 0}
        (choice,) = (await front_end.http.post("/v1/completions", json=body)).json()["choices"]
        streamed = await _streamed(front_end, body)
    assert choice["text"] == streamed[0]["text"] == "🙂 ok"
