"""``/v1/embeddings`` as the official client sees it."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest

from tercet_proto.v1 import engine_pb2 as pb
from tests.contract.frontend.conftest import MODEL, running
from tests.fakes.core import STOP, FakeCore

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

VECTOR = [3.0, 4.0, 0.0, 12.0]
UNIT = [3 / 13, 4 / 13, 0.0, 12 / 13]


async def test_one_text(text: ModelText) -> None:
    async with FakeCore(outputs=lambda _: [], pooled=VECTOR) as core, running(text, [core]) as front_end:
        # The client asks for base64 by itself, and decodes it.
        answer = await front_end.openai.embeddings.create(model=MODEL, input="Hello, world")
        floats = await front_end.openai.embeddings.create(model=MODEL, input="Hello, world", encoding_format="float")
    assert answer.object == "list"
    assert answer.model == MODEL
    (one,) = answer.data
    assert (one.object, one.index) == ("embedding", 0)
    assert one.embedding == pytest.approx(UNIT, abs=1e-7)
    assert floats.data[0].embedding == pytest.approx(UNIT, abs=1e-7)
    request = core.requests[0]
    assert request.prompt_ids == text.tokenizer.encode("Hello, world")
    assert request.submit.pooling == pb.POOLING_LAST
    tokens = len(request.prompt_ids)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)


async def test_base64_is_little_endian_float32(text: ModelText) -> None:
    async with FakeCore(outputs=lambda _: [], pooled=VECTOR) as core, running(text, [core]) as front_end:
        body = {"model": MODEL, "input": "Hi", "encoding_format": "base64", "normalize": False}
        answer = (await front_end.http.post("/v1/embeddings", json=body)).json()
    raw = base64.b64decode(answer["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4").tolist() == VECTOR


@pytest.mark.parametrize(
    "given",
    [["One", "Two", "Three"], [[5, 6, 7], [8], [9, 10]]],
)
async def test_several_texts_are_computed_together_and_kept_in_order(text: ModelText, given: list[Any]) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        create = front_end.openai.embeddings.create
        call = asyncio.ensure_future(create(model=MODEL, input=given, encoding_format="float"))
        requests = [await core.next_request() for _ in given]
        for number in (1, 0, 2):
            vector = [0.0] * 3
            vector[number] = 2.0
            requests[number].send(finish=STOP, pooled=vector)
        answer = await call
    ids = [item if isinstance(item, list) else text.tokenizer.encode(item) for item in given]
    assert [request.prompt_ids for request in requests] == ids
    assert [(one.index, one.embedding) for one in answer.data] == [
        (0, [1.0, 0.0, 0.0]), (1, [0.0, 1.0, 0.0]), (2, [0.0, 0.0, 1.0])
    ]  # fmt: skip
    assert answer.usage.prompt_tokens == sum(map(len, ids))


async def test_token_ids_and_mean(text: ModelText) -> None:
    async with FakeCore(outputs=lambda _: [], pooled=VECTOR) as core, running(text, [core]) as front_end:
        await front_end.openai.embeddings.create(model=MODEL, input=[5, 6, 7], extra_body={"pooling": "mean"})
    (request,) = core.requests
    assert request.prompt_ids == [5, 6, 7]
    assert request.submit.pooling == pb.POOLING_MEAN


async def test_dimensions(text: ModelText) -> None:
    async with FakeCore(outputs=lambda _: [], pooled=VECTOR) as core, running(text, [core]) as front_end:
        create = front_end.openai.embeddings.create
        short = await create(model=MODEL, input="Hi", dimensions=2, encoding_format="float")
        assert short.data[0].embedding == pytest.approx([0.6, 0.8])
        zero = await create(
            model=MODEL, input="Hi", dimensions=1, encoding_format="float", extra_body={"normalize": False}
        )
        assert zero.data[0].embedding == [3.0]
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model=MODEL, input="Hi", dimensions=5)
    assert caught.value.param == "dimensions"


async def test_a_vector_of_zeros_stays_one(text: ModelText) -> None:
    async with FakeCore(outputs=lambda _: [], pooled=[0.0, 0.0]) as core, running(text, [core]) as front_end:
        answer = await front_end.openai.embeddings.create(model=MODEL, input="Hi")
    assert answer.data[0].embedding == [0.0, 0.0]


async def test_many_long_vectors(text: ModelText) -> None:
    vector = np.linspace(-1, 1, 4096).tolist()
    async with FakeCore(outputs=lambda _: [], pooled=vector) as core, running(text, [core]) as front_end:
        answer = await front_end.openai.embeddings.create(model=MODEL, input=[[number + 1] for number in range(64)])
    assert len(answer.data) == 64
    assert all(np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-5) for one in answer.data)


async def test_long_texts_can_be_cut(text: ModelText) -> None:
    long = "la " * 3000
    ids = text.tokenizer.encode(long)
    async with FakeCore(outputs=lambda _: [], pooled=[1.0]) as core, running(text, [core]) as front_end:
        for fields in ({"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 7, "priority": -3}):
            extra = fields | {"embed_dtype": "float32", "endianness": "little"}
            await front_end.openai.embeddings.create(model=MODEL, input=[long, "Hi"], extra_body=extra)
    assert [request.prompt_ids for request in core.requests[::2]] == [ids[-2047:], ids[-7:]]
    assert [request.submit.priority for request in core.requests] == [0, 0, -3, -3]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input": None}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": ["a", [1]]}, 400, "input"),
        ({"input": [1, True]}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input[1]"),
        ({"input": [49_152]}, 400, "input"),
        ({"input": "la " * 3000}, 400, "input"),
        ({"input": ["a"] * 1025}, 400, "input"),
        ({"model": "other"}, 404, "model"),
        ({"encoding_format": "hex"}, 400, "encoding_format"),
        ({"dimensions": 0}, 400, "dimensions"),
        ({"pooling": "max"}, 400, "pooling"),
        ({"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2048}, 400, "truncate_prompt_tokens"),
        ({"embed_dtype": "bfloat16"}, 400, "embed_dtype"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, 400, "messages"),
    ],
)
async def test_bad_input(text: ModelText, change: dict[str, Any], status: int, param: str) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        answer = await front_end.http.post("/v1/embeddings", json={"model": MODEL, "input": "Hi"} | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert not core.requests


async def test_one_failure_ends_the_request_and_gives_the_others_up(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        call = asyncio.ensure_future(front_end.openai.embeddings.create(model=MODEL, input=["One", "Two", "Three"]))
        requests = [await core.next_request() for _ in range(3)]
        requests[0].reject(pb.ERROR_KIND_OVERLOADED, "The queue is full.")
        with pytest.raises(openai.RateLimitError):
            await call
        await core.wait_for(lambda: requests[1].aborted and requests[2].aborted)


async def test_a_client_that_goes_away(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        call = asyncio.ensure_future(front_end.openai.embeddings.create(model=MODEL, input=["One", "Two"]))
        requests = [await core.next_request() for _ in range(2)]
        call.cancel()
        await core.wait_for(lambda: all(request.aborted for request in requests))
        assert len(front_end.admission.running) == 0
