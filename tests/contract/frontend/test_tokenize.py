"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.contract.frontend.conftest import MODEL, running
from tests.fakes.core import FakeCore

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

TEXT = "Hello, wörld! 🙂"


async def test_a_prompt(text: ModelText) -> None:
    ids = text.tokenizer.encode(TEXT)
    async with FakeCore() as core, running(text, [core]) as front_end:
        plain = (await front_end.http.post("/tokenize", json={"prompt": TEXT})).json()
        named = (
            await front_end.http.post("/tokenize", json={"model": MODEL, "prompt": TEXT, "return_token_strs": True})
        ).json()
        back = (await front_end.http.post("/detokenize", json={"model": MODEL, "tokens": ids})).json()
        nothing = (await front_end.http.post("/tokenize", json={"prompt": ""})).json()
        empty = (await front_end.http.post("/detokenize", json={"tokens": []})).json()
    assert plain == {"count": len(ids), "max_model_len": 2048, "tokens": ids, "token_strs": None}
    assert named == plain | {"token_strs": [text.tokenizer.token(token) for token in ids]}
    assert back == {"prompt": TEXT}
    assert (nothing["count"], nothing["tokens"]) == (0, [])
    assert empty == {"prompt": ""}
    assert not core.requests


async def test_a_conversation(text: ModelText) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    async with FakeCore(outputs=lambda _: [2]) as core, running(text, [core]) as front_end:
        answer = (await front_end.http.post("/tokenize", json={"messages": messages})).json()
        # What is counted is what a chat request computes.
        await front_end.openai.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
        back = (await front_end.http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert answer["tokens"] == core.requests[0].prompt_ids
    assert answer["count"] == len(answer["tokens"])
    assert back["prompt"].endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


async def test_long_texts_leave_the_event_loop_free(text: ModelText) -> None:
    story = "Once upon a time. " * 20_000
    async with FakeCore() as core, running(text, [core]) as front_end:
        answer = (await front_end.http.post("/tokenize", json={"prompt": story})).json()
        back = (await front_end.http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert answer["count"] > 2048  # more than the model could take
    assert back["prompt"] == story


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a\0"}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, 400, "return_token_strs"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [49_152]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, True]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": "1"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_bad_input(text: ModelText, path: str, body: dict[str, Any], status: int, param: str) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        answer = await front_end.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_bodies_are_bounded(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core], max_body_bytes=4_000_000) as front_end:
        too_long = await front_end.http.post("/tokenize", json={"prompt": "a" * 2_000_001})
        too_large = await front_end.http.post("/detokenize", json={"tokens": [1] * 2_000_000})
    assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "prompt")
    assert too_large.status_code == 413
