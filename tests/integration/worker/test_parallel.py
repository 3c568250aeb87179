"""Several ranks compute what one computes: tensor parallel, in a pipeline, and both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from tercet_shared.checkpoint import Tokenizer
from tercet_shared.errors import ConfigurationError, ProtocolError
from tercet_shared.sampling_params import SamplingParams
from tests.fakes.checkpoints import write_tiny_llama, write_tiny_llama_gguf
from tests.integration.worker.driver import Driver, engine_for
from tests.integration.worker.episode import Play, compare, play
from tests.integration.worker.ranks import ranks_of

V = 384
FLAGS = ("--num-kv-blocks=40", "--max-num-seqs=6", "--max-model-len=256", "--max-num-batched-tokens=64")
PROMPTS = [np.random.default_rng(length).integers(3, V, length).tolist() for length in (48, 1, 20, 33, 64)]
TEXTS = (
    "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is",
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "Water boils at 100 degrees Celsius. On a high mountain",
    "def fibonacci(n):\n    return n if n < 2 else",
)


def played_alone(model: Path, *flags: str, prompts: list[list[int]] = PROMPTS, outputs: int = 9) -> Play:
    runner = engine_for(model, *flags, *FLAGS).runner
    return play(Driver(runner), prompts, runner.limits.vocab_size, outputs=outputs)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_the_real_model_in_parts(
    smollm: Path, tokenizer: Tokenizer, real_alone: Play, tensor: int, pipeline: int
) -> None:
    with ranks_of(smollm, tensor, pipeline, "--dtype=float32", *FLAGS) as ranks:
        prompts = [tokenizer.encode(text) for text in TEXTS]
        compare(play(Driver(ranks), prompts, ranks.limits.vocab_size, outputs=10), real_alone)


@pytest.fixture(scope="module")
def real_alone(smollm: Path, tokenizer: Tokenizer) -> Play:
    prompts = [tokenizer.encode(text) for text in TEXTS]
    return played_alone(smollm, "--dtype=float32", prompts=prompts, outputs=10)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight query heads of two key/value heads, biases, untied, and layers and vocabulary that do not come out even."""
    shape = {"layers": 3, "heads": 8, "kv_heads": 2, "vocab": V + 1, "intermediate": 100}
    return write_tiny_llama(tmp_path_factory.mktemp("wide") / "wide", biases=True, tied=False, hidden=128, **shape)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def wide_alone(wide: Path) -> Play:
    return played_alone(wide, "--dtype=float32")


def test_key_value_heads_are_repeated_where_ranks_are_more(wide: Path, wide_alone: Play) -> None:
    with ranks_of(wide, 4, 1, "--dtype=float32", *FLAGS) as ranks:
        compare(play(Driver(ranks), PROMPTS, V + 1, outputs=9), wide_alone)
        assert sum(ranks.weight_bytes) < 1.3 * engine_for(wide, "--dtype=float32", *FLAGS).weight_bytes


def test_without_kernels(wide: Path, wide_alone: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("TERCET_CACHE", str(tmp_path / "cache"))
    with ranks_of(wide, 2, 2, "--dtype=float32", *FLAGS) as ranks:
        assert ranks.offers[0].device == "cpu-torch"
        compare(play(Driver(ranks), PROMPTS, V + 1, outputs=9), wide_alone)


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_quantized_weights_stay_so_in_parts(tmp_path: Path, quantization: str) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0 if quantization == "auto" else gguf.GGMLQuantizationType.F32
    model = write_tiny_llama_gguf(tmp_path / "tiny.gguf", hidden=128, heads=2, kv_heads=2, quantization=kind)
    flags = ("--dtype=bfloat16", f"--quantization={quantization}", *FLAGS)
    alone = engine_for(model, *flags)
    with ranks_of(model, 2, 1, *flags) as ranks:
        # The matrices of a rank are half of all; what is not divided is small.
        assert sum(ranks.weight_bytes) < 1.1 * alone.weight_bytes
        assert max(ranks.weight_bytes) < 0.6 * alone.weight_bytes
        scores = []
        for runner in (alone.runner, ranks):
            driver = Driver(runner)  # type: ignore[arg-type]
            driver.start(0, PROMPTS[0], SamplingParams(temperature=0.0, prompt_logprobs=0, max_tokens=9))
            result = driver.step({0: len(PROMPTS[0])})
            assert result.prompt_logprobs is not None
            scores.append(result.prompt_logprobs.logprobs)
        np.testing.assert_allclose(scores[0], scores[1], atol=0.2)  # sums of bfloat16 round elsewhere


def test_all_ranks_refuse_a_plan_alike_and_go_on(wide: Path) -> None:
    with ranks_of(wide, 2, 2, "--dtype=float32", *FLAGS) as ranks:
        driver = Driver(ranks)  # type: ignore[arg-type]
        request = driver.start(0, PROMPTS[0])
        driver.run(budget=64, outputs=2)
        plan, pending = driver.submit({0: 1})
        driver.land(plan, pending.result())
        with pytest.raises(ProtocolError, match="another number of computed tokens"):
            ranks.execute(replace(plan, step_id=99)).result()
        driver.run(budget=64, outputs=5)
        assert len(request.output) == 5


def test_the_smallest_cache_of_a_rank_is_that_of_all(wide: Path, tmp_path: Path) -> None:
    # Three key/value heads: two in the first rank, one in the second, which could hold twice the blocks.
    model = write_tiny_llama(tmp_path / "odd", heads=3, kv_heads=3, hidden=96)
    with ranks_of(model, 2, 1, "--dtype=float32", "--kv-cache-memory=1MiB", "--max-num-seqs=4") as ranks:
        per_block = 2 * 2 * 2 * 16 * 32 * 4  # keys and values, layers, heads, tokens, elements, bytes
        assert [offer.num_blocks for offer in ranks.offers] == [2**20 // per_block] * 2
        assert len({offer.group for offer in ranks.offers}) == 1
        assert [(offer.rank, offer.ranks, offer.answers) for offer in ranks.offers] == [(0, 2, True), (1, 2, False)]


def test_ranks_that_were_started_differently_say_so(wide: Path) -> None:
    with pytest.raises(ConfigurationError, match="were not started with the same --max-num-seqs"):
        with ranks_of(wide, 2, 1, "--num-kv-blocks=40", of_rank={1: ("--max-num-seqs=7",)}):
            pass
