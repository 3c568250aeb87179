"""The model runner against Transformers on the real model: the same greedy tokens, however the work is cut and batched.

Tokens can only be compared where the best two logits are further apart than float32 rounds; the prompts are chosen so,
and that is checked too.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tercet_shared.checkpoint import Tokenizer
from tercet_shared.sampling_params import SamplingParams
from tercet_worker.startup import Engine
from tests.integration.worker.driver import GREEDY, Driver, engine_for
from tests.integration.worker.logits import prompt_logits

pytestmark = pytest.mark.timeout(400)  # the real model, on machines that have other things to do

MARGIN = 1e-3
OUTPUTS = 6
LENGTHS = (1, 2, 3, 5, 7, 11, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 100, 129, 200, 256, 257, 1_500)

TEXT = (
    "The lighthouse keeper counted the ships that passed before breakfast, and wrote their names in a long green book. "
    "On Tuesdays the baker's daughter rowed across with bread, letters and a list of questions about the sea. "
    "How deep is it under the rocks? Which birds sleep on the water? Why does the fog smell of iron? "
    "He answered what he knew: the water is forty metres deep, the guillemots sleep on it, and nobody knows about fog. "
    "In winter the light was lit at half past three, and its beam turned once every twelve seconds until the morning. "
    "def tide(hour): return 2.4 * math.sin(hour * math.pi / 6.2)  # metres above the mark on the northern steps\n"
    "When the engine failed, three people from the village carried the spare part up 217 steps in the rain. "
)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts of all lengths, each from another place of the text."""
    ids = tokenizer.encode(TEXT * 12)
    return [ids[7 * index : 7 * index + length] for index, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy output of each prompt, run by itself in one piece."""
    engine.runner.reset()
    driver = Driver(engine.runner)
    found = []
    for prompt in prompts:
        request = driver.start(0, prompt)
        driver.run(8192, OUTPUTS)
        found.append(request.output)
        driver.finish(request)
    return found


@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers(
    reference: Any, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    # One pass over prompt and output decides about all of the output: token n is right given that those before are.
    for prompt, output in zip(prompts, alone, strict=True):
        assert len(output) == OUTPUTS
        ids = torch.tensor([prompt + output[:-1]])
        logits = reference(ids, logits_to_keep=OUTPUTS).logits[0]
        best = logits.topk(2, dim=1)
        assert float((best.values[:, 0] - best.values[:, 1]).min()) > MARGIN, "choose another prompt"
        assert output == best.indices[:, 0].tolist(), f"prompt of {len(prompt)} tokens"


def test_batched_together(driver: Driver, prompts: list[list[int]], alone: list[list[int]]) -> None:
    requests = [driver.start(slot, prompt) for slot, prompt in enumerate(prompts)]
    driver.run(8192, OUTPUTS)
    assert [request.output for request in requests] == alone


def test_in_chunks_beside_decodes(driver: Driver, prompts: list[list[int]], alone: list[list[int]]) -> None:
    # A budget of 97 cuts prompts at odd places; most steps hold decodes, the end of one prompt and a part of another.
    indices = [index for index, prompt in enumerate(prompts) if len(prompt) <= 256]
    requests = [driver.start(slot, prompts[slot]) for slot in indices]
    driver.run(97, OUTPUTS)
    assert [request.output for request in requests] == [alone[index] for index in indices]


def test_token_by_token(driver: Driver, prompts: list[list[int]], alone: list[list[int]]) -> None:
    indices = [3, 8, 12]
    requests = [driver.start(slot, prompts[index]) for slot, index in enumerate(indices)]
    while any(len(request.output) < OUTPUTS for request in requests):
        driver.step({request.slot: 1 for request in requests if len(request.output) < OUTPUTS})
    assert [request.output for request in requests] == [alone[index] for index in indices]


def test_with_shared_prefix_blocks(driver: Driver, prompts: list[list[int]], alone: list[list[int]]) -> None:
    index = LENGTHS.index(257)
    prompt = prompts[index]
    first = driver.start(0, prompt)
    driver.run(8192, OUTPUTS)
    # All whole blocks but the last token's, and fewer; both readers while the first still holds them.
    readers = [driver.start(slot, prompt, shared=first.blocks[:count]) for slot, count in ((1, 16), (2, 9))]
    driver.run(8192, OUTPUTS)
    assert [request.output for request in (first, *readers)] == [alone[index]] * 3
    # The first is gone, its slot goes to another request, its blocks stay.
    driver.finish(first, keep=16)
    other = driver.start(0, prompts[4])
    reader = driver.start(5, prompt, shared=first.blocks[:16])
    driver.run(8192, OUTPUTS)
    assert reader.output == alone[index]
    assert other.output == alone[4]


def test_with_the_whole_prompt_in_shared_blocks(
    driver: Driver, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """Only the last token is computed; its KV is not written again, and what follows goes to a block of its own."""
    indices = [LENGTHS.index(256), LENGTHS.index(16)]
    firsts = [driver.start(slot, prompts[index]) for slot, index in enumerate(indices)]
    driver.run(8192, 1)
    readers = [
        driver.start(2 + slot, prompts[index], shared=list(first.blocks[: LENGTHS[index] // 16]))
        for slot, (index, first) in enumerate(zip(indices, firsts, strict=True))
    ]
    assert [reader.need for reader in readers] == [1, 1]
    driver.run(8192, OUTPUTS)
    assert [request.output for request in (*firsts, *readers)] == [alone[index] for index in indices] * 2


def test_resumed_after_preemption(driver: Driver, prompts: list[list[int]], alone: list[list[int]]) -> None:
    long, short = driver.start(0, prompts[19]), driver.start(1, prompts[10])
    driver.run(8192, 3)
    driver.preempt(long)
    # Somebody else overwrites the blocks that were taken.
    other = driver.start(2, prompts[20])
    driver.run(150, OUTPUTS)
    assert long.output == alone[19]
    assert short.output == alone[10]
    assert other.output == alone[20]


def test_two_steps_deep(driver: Driver, prompts: list[list[int]], alone: list[list[int]]) -> None:
    """Every plan is made before the token of the step before it is known: the worker reads that token by itself."""
    indices = [5, 9, 18]
    requests = [driver.start(slot, prompts[index]) for slot, index in enumerate(indices)]
    in_flight = [driver.submit({request.slot: request.need for request in requests})]
    for _ in range(OUTPUTS - 1):
        in_flight.append(driver.submit({request.slot: 1 for request in requests}))
        plan, pending = in_flight.pop(0)
        driver.land(plan, pending.result())
    plan, pending = in_flight.pop()
    driver.land(plan, pending.result())
    assert [request.output for request in requests] == [alone[index] for index in indices]


def test_freed_slots_and_blocks_are_used_again_at_once(
    driver: Driver, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    driver.free_blocks = driver.free_blocks[:20]
    for index in (18, 17, 18, 3, 16):
        request = driver.start(7, prompts[index])
        driver.run(8192, OUTPUTS)
        assert request.output == alone[index]
        driver.finish(request)


def test_seeded_tokens_are_the_same_alone_and_in_a_batch(driver: Driver, prompts: list[list[int]]) -> None:
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=99),
        SamplingParams(temperature=1.0, seed=2**63 + 5, max_tokens=99),
        SamplingParams(temperature=1.3, top_k=40, min_p=0.02, seed=7, max_tokens=99),
        GREEDY,
        SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=7, max_tokens=99),
        SamplingParams(temperature=0.8, top_p=0.95, seed=12, max_tokens=99),
    ]
    prompt = prompts[14]
    separate = []
    for choice in params:
        request = driver.start(0, prompt, choice)
        driver.run(8192, 10)
        separate.append(request.output)
        driver.finish(request)
    assert len({tuple(output) for output in separate}) == len(params), "different choices differ"
    together = [driver.start(slot + 3, prompt, choice) for slot, choice in enumerate(params)]
    driver.run(50, 6)
    driver.preempt(together[1])
    driver.run(50, 10)
    assert [request.output for request in together] == separate


def test_min_tokens_holds_the_end_back(driver: Driver, prompts: list[list[int]], alone: list[list[int]]) -> None:
    first = alone[10][0]
    params = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=9, stop_token_ids=(first,))
    request = driver.start(0, prompts[10], params)
    driver.run(8192, 4)
    assert first not in request.output[:2]


@torch.inference_mode()
def test_bfloat16_logits_are_as_close_as_those_of_transformers(
    reference: Any, smollm: Path, prompts: list[list[int]]
) -> None:
    half = copy.deepcopy(reference).to(torch.bfloat16)
    flags = ("--num-kv-blocks=64", "--max-num-seqs=2", "--max-num-batched-tokens=512")
    ours = engine_for(smollm, "--dtype=bfloat16", *flags)
    errors = {"ours": 0.0, "theirs": 0.0}
    for index in (5, 12, 15, 17, 20):
        ids = torch.tensor([prompts[index]])
        exact = reference(ids).logits[0]
        errors["theirs"] += float((half(ids).logits[0].float() - exact).square().mean())
        errors["ours"] += float((prompt_logits(ours, prompts[index]) - exact).square().mean())
    distance = {name: np.sqrt(total / 5) for name, total in errors.items()}
    assert distance["ours"] <= 2 * distance["theirs"], distance
    assert distance["theirs"] > 0.01, "bfloat16 was not used in the reference"
