"""Greedy output through the whole system is Transformers' own, however the requests are batched, chunked or preempted.

Prompts are token ids of random pieces of text; what is compared is text, because the API gives text. A prompt is used
when the reference's two best logits are never closer than 1e-3 on the way: there rounding may decide.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GgufConfig

from tercet_shared.checkpoint import Checkpoint
from tests.e2e.conftest import Serving, engine_address, engine_idle, engine_info, serve
from tests.fakes.stream_client import Client

OUTPUT = 24
MARGIN = 1e-3
LENGTHS = [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 64, 100, 129, 200, 255, 256, 257, 400, 511, 513, 700, 1000, 1300, 1500]
SEED_TEXT = (
    "The lighthouse keeper counted the waves and wrote them down in a book that nobody would ever read. "
    "def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n"
    "In 1815 the ship left Bristol with 42 barrels of salt, 7 goats and one very old map of the northern sea. "
    "Water boils at 100 degrees Celsius at sea level; on a mountain it boils earlier, and the tea is worse. "
)


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    text: str


@pytest.fixture(scope="module")
def cases(smollm2: Path, serving: Serving) -> list[Case]:
    """Prompts whose output, asked one by one of the core itself, the reference confirms token by token."""
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        str(smollm2.parent),
        gguf_file=smollm2.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).eval()
    tokenizer = Checkpoint.open(str(smollm2)).tokenizer
    words = SEED_TEXT.split(" ")
    draw = random.Random(7)
    prompts = []
    for length in LENGTHS:
        text = " ".join(draw.choice(words) for _ in range(length + 8))
        prompts.append(list(tokenizer.encode(text))[:length])
    outputs = asyncio.run(_one_by_one(serving, prompts))
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        expected, margin = _confirm(model, prompt, output)
        if margin > MARGIN:
            assert output == expected
            found.append(Case(prompt, tokenizer.decode(output)))
    assert len(found) >= 20, "too few prompts with clear margins"
    return found


async def _one_by_one(running: Serving, prompts: list[list[int]]) -> list[list[int]]:
    async with Client(engine_address(running)) as client:
        for handle, prompt in enumerate(prompts):
            await client.submit(handle, prompt, max_tokens=OUTPUT)
            await client.finished(handle)
        return [client.choices[handle].tokens for handle in range(len(prompts))]


@torch.inference_mode()
def _confirm(model: Any, prompt: list[int], output: list[int]) -> tuple[list[int], float]:
    """Returns what the reference says after every token of prompt and output, and its two best logits' least distance.

    If the tokens agree, they are the reference's own greedy output.
    """
    logits = model(torch.tensor([prompt + output[:-1]]), logits_to_keep=len(output)).logits[0]
    best = logits.topk(2).values
    return logits.argmax(-1).tolist(), float((best[:, 0] - best[:, 1]).min())


async def _ask(http: httpx.AsyncClient, url: str, prompt: list[int], **changes: Any) -> str:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True} | changes
    reply = await http.post(f"{url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def _together(url: str, prompts: list[list[int]]) -> list[str]:
    async def run() -> list[str]:
        async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as http:
            return list(await asyncio.gather(*(_ask(http, url, prompt) for prompt in prompts)))

    return asyncio.run(run())


@pytest.mark.timeout(400)
def test_alone_together_and_with_a_warm_cache(serving: Serving, cases: list[Case]) -> None:
    expected = [case.text for case in cases]
    assert [_together(serving.url, [case.prompt])[0] for case in cases] == expected
    assert _together(serving.url, [case.prompt for case in cases]) == expected, "together, the prefix cache warm"
    assert asyncio.run(engine_info(serving)).stats.cached_tokens > 1000


@pytest.fixture(scope="module")
def cramped(smollm2: Path) -> Iterator[Serving]:
    """A pool that holds little more than the longest prompt, and steps far smaller than a prompt."""
    flags = ("--num-kv-blocks=64", "--max-num-batched-tokens=96", "--no-prefix-caching")
    with serve(smollm2, "--dtype=float32", "--served-model-name=smollm2", *flags) as running:
        yield running


@pytest.mark.timeout(400)
def test_in_chunks_with_preemptions_and_aborts(cramped: Serving, cases: list[Case]) -> None:
    async def leave(http: httpx.AsyncClient, prompt: list[int]) -> None:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 60, "ignore_eos": True, "stream": True}
        async with http.stream("POST", f"{cramped.url}/v1/completions", json=body) as reply:
            async for _ in reply.aiter_lines():
                break

    async def run() -> list[str]:
        async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as http:
            wanted = [_ask(http, cramped.url, case.prompt) for case in cases if len(case.prompt) < 420]
            leaving = [leave(http, case.prompt) for case in cases[:8]]
            growing = [_ask(http, cramped.url, [i + 40], max_tokens=160, seed=i) for i in range(8)]
            results = await asyncio.gather(*wanted, *leaving, *growing)
            return [result for result in results[: len(wanted)] if result is not None]

    assert asyncio.run(run()) == [case.text for case in cases if len(case.prompt) < 420]
    assert asyncio.run(engine_idle(cramped)).preemptions > 0, "the pool was too large for this test"
