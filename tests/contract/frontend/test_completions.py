"""Plain completions, and the model list, as the official client sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.contract.frontend.conftest import EOS, MODEL, running
from tests.fakes.core import FakeCore

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

PROMPT = "The capital of France"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["string", "strings", "ids", "lists of ids"])
async def test_prompt_forms(text: ModelText, says: Any, form: str, stream: bool) -> None:
    ids = text.tokenizer.encode(PROMPT)
    prompt: Any = {"string": PROMPT, "strings": [PROMPT], "ids": ids, "lists of ids": [ids]}[form]
    async with FakeCore(outputs=says(" is Paris.")) as core, running(text, [core]) as front_end:
        create = front_end.openai.completions.create
        if stream:
            chunks = [chunk async for chunk in await create(model=MODEL, prompt=prompt, stream=True)]
            assert {chunk.object for chunk in chunks} == {"text_completion"}
            found = "".join(chunk.choices[0].text for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            answer = await create(model=MODEL, prompt=prompt)
            assert answer.id.startswith("cmpl-")
            assert answer.object == "text_completion"
            found, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert (found, reason) == (" is Paris.", "stop")
    assert core.requests[0].prompt_ids == ids
    assert core.requests[0].submit.sampling.max_tokens == 16


async def test_several_prompts_with_several_choices(text: ModelText) -> None:
    prompts = ["One", "Two", "Three"]

    def outputs(request: Any) -> list[int]:
        said = text.tokenizer.decode(request.prompt_ids)
        seed = request.submit.sampling.seed
        return [*text.tokenizer.encode(f" {said} {seed}", add_special_tokens=False), EOS]

    async with FakeCore(outputs=outputs) as core, running(text, [core]) as front_end:
        create = front_end.openai.completions.create
        answer = await create(model=MODEL, prompt=prompts, n=2, seed=1, max_tokens=100)
        alone = await create(model=MODEL, prompt="Three", n=2, seed=1, max_tokens=100)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text.split()[0] for choice in answer.choices] == ["One", "One", "Two", "Two", "Three", "Three"]
    assert [choice.text for choice in answer.choices[4:]] == [choice.text for choice in alone.choices]
    assert len({choice.text for choice in alone.choices}) == 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(text.tokenizer.encode(prompt)) for prompt in prompts)


async def test_models(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        listed = [model async for model in front_end.openai.models.list()]
        one = await front_end.openai.models.retrieve(MODEL)
    assert [model.id for model in listed] == [MODEL]
    assert (one.id, one.object, one.owned_by) == (MODEL, "model", "tercet")


async def test_openapi_is_complete(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        document = (await front_end.http.get("/openapi.json")).json()
    for path, schema in [("/v1/chat/completions", "ChatRequest"), ("/v1/completions", "CompletionRequest")]:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{schema}"}
        assert "temperature" in document["components"]["schemas"][schema]["properties"]
    assert "Message" in document["components"]["schemas"]
