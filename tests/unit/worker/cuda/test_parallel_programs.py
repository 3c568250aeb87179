"""A recorded program divided among ranks, as stages and as shares of every layer, yields what one rank yields."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels are run with Triton's interpreter")

from tercet_worker.runner import ModelRunner
from tests.fakes.checkpoints import write_tiny_llama
from tests.fakes.gpu_ranks import gpu_ranks_of
from tests.integration.worker.driver import GREEDY, Driver, engine_for

FLAGS = ("--max-num-seqs=4", "--num-kv-blocks=32", "--max-num-batched-tokens=16", "--max-model-len=64")
PROMPTS = ([7, 3, 200, 15, 8, 91, 92, 93, 94], [5], [300, 301, 302, 303, 9])


def play(runner: ModelRunner) -> list[list[int]]:
    driver = Driver(runner, seed=4)
    for slot, prompt in enumerate(PROMPTS):
        driver.start(slot, prompt, GREEDY)
    driver.run(budget=16, outputs=5)
    return [request.output for request in driver.requests.values()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny", biases=True)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return play(engine_for(model, *FLAGS, "--device=cpu", "--dtype=float32", "--threads=1").runner)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_yield_what_one_yields(model: Path, expected: list[list[int]], tensor: int, pipeline: int) -> None:
    with gpu_ranks_of(model, tensor, pipeline, *FLAGS) as ranks:
        assert play(ranks) == expected  # type: ignore[arg-type]  # it stands where a runner is expected
