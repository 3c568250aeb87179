"""Several ranks compute what one does where weights are quantized in safetensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tercet_shared.sampling_params import SamplingParams
from tests.fakes.packed_checkpoints import PACKINGS, Packing, write_packed_llama
from tests.integration.worker.driver import Driver, engine_for
from tests.integration.worker.episode import compare, play
from tests.integration.worker.ranks import ranks_of

V = 384
PROMPTS = [np.random.default_rng(length).integers(3, V, length).tolist() for length in (48, 1, 20, 33, 64)]
FLAGS = ("--num-kv-blocks=40", "--max-num-seqs=6", "--max-model-len=256", "--max-num-batched-tokens=64")
SHAPE = {"hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 192, "tied": False}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["gptq, act-order", "fp8, blocks"])
def test_ranks_compute_what_one_does(tmp_path: Path, name: str) -> None:
    written = write_packed_llama(tmp_path, PACKINGS[name], **SHAPE)
    alone = play(Driver(engine_for(written.dense, "--dtype=float32", *FLAGS).runner), PROMPTS, V, outputs=9)
    with ranks_of(written.packed, 2, 1, "--dtype=float32", *FLAGS) as ranks:
        compare(play(Driver(ranks), PROMPTS, V, outputs=9), alone)  # type: ignore[arg-type]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("packing", "heads"), [(PACKINGS["gptq, zeros"], 4), (Packing("awq", group=128), 3)])
def test_parts_stay_quantized_where_the_cut_falls_between_blocks(tmp_path: Path, packing: Packing, heads: int) -> None:
    # Three heads of 64: two in the first rank, one in the second, so that a group of 128 columns is cut in two.
    shape = SHAPE | {"heads": heads, "kv_heads": heads, "hidden": 64 * heads, "intermediate": 384}
    written = write_packed_llama(tmp_path, packing, **shape)
    flags = ("--dtype=bfloat16", *FLAGS)
    alone = engine_for(written.packed, *flags)
    with ranks_of(written.packed, 2, 1, *flags) as ranks:
        assert sum(ranks.weight_bytes) < 1.1 * alone.weight_bytes
        scores = []
        for runner in (alone.runner, ranks):
            driver = Driver(runner)  # type: ignore[arg-type]
            driver.start(0, PROMPTS[0], SamplingParams(temperature=0.0, prompt_logprobs=0, max_tokens=9))
            result = driver.step({0: len(PROMPTS[0])})
            assert result.prompt_logprobs is not None
            scores.append(result.prompt_logprobs.logprobs)
    np.testing.assert_allclose(scores[0], scores[1], atol=0.3)  # sums of bfloat16 round elsewhere
