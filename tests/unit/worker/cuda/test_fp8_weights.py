"""The CUDA worker as a whole with weights of eight bits, on the CPU: every way to run a step yields the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels are run with Triton's interpreter")

from tercet_shared.config import WorkerSettings, parse
from tercet_shared.errors import ConfigurationError
from tercet_shared.sampling_params import SamplingParams
from tercet_worker import startup
from tercet_worker.cuda.machine import compiled
from tercet_worker.graphs.model import ProgramModel
from tercet_worker.platforms.cuda import CudaPlatform, Machine
from tercet_worker.startup import Engine
from tests.fakes.checkpoints import write_tiny_llama
from tests.fakes.gpu import RerunCapturer, fake_machine
from tests.fakes.gpu_ranks import gpu_ranks_of
from tests.fakes.packed_checkpoints import PACKINGS, Written, write_packed_llama
from tests.integration.worker.driver import Driver, engine_for

pytestmark = pytest.mark.timeout(300)  # the interpreter is slow

FLAGS = ("--max-num-seqs=2", "--num-kv-blocks=32", "--max-num-batched-tokens=8", "--max-model-len=64")
PROMPTS = [np.random.default_rng(length).integers(3, 384, length).tolist() for length in (7, 1)]
GREEDY = SamplingParams(temperature=0.0, prompt_logprobs=0)
FP8 = "--quantization=fp8"
NEAR = 0.2
"""Difference of logits from those of dense weights, by their size (both as root of the mean square): 0.12 and 0.09 are
seen. Each product errs by 0.035 of its size, for the roundings of its two factors, and four products make what a layer
adds; a wrong scale would make it about 1."""

PROMPT_TOKENS = 7
"""Logits that are of prompts at least; they come first."""

Outcome = tuple[list[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny", hidden=128, biases=True)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_packed_llama(tmp_path_factory.mktemp("packed"), PACKINGS["fp8, compressed"], hidden=128, biases=True)


def load(model: Path, machine: Machine, *flags: str) -> Engine:
    with patch.object(startup, "choose_platform", lambda settings: CudaPlatform(settings, machine)):
        return engine_for(model, *FLAGS, *flags)


def play(engine: Engine) -> Outcome:
    """Returns greedy tokens of all prompts, and all logits that were computed on the way."""
    logits: list[torch.Tensor] = []
    compute: Callable[..., torch.Tensor] = ProgramModel.logits

    def keep(self: ProgramModel, hidden: torch.Tensor) -> torch.Tensor:
        logits.append(compute(self, hidden).clone())
        return logits[-1].clone()

    with patch.object(ProgramModel, "logits", keep):
        driver = Driver(engine.runner, seed=4)
        for slot, prompt in enumerate(PROMPTS):
            driver.start(slot, prompt, GREEDY)
        driver.run(budget=8, outputs=2)
    return [request.output for request in driver.requests.values()], torch.cat(logits)


def differs(found: Outcome, expected: Outcome) -> float:
    """Returns by how much logits differ, of the first ones: later ones are of other tokens where one was close."""
    near, exact = found[1][:PROMPT_TOKENS], expected[1][:PROMPT_TOKENS]
    return float((near - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def test_graphs_eager_and_compiled_are_the_same_and_near_dense(model: Path) -> None:
    functions: list[object] = []

    def compiler(function: object) -> object:
        functions.append(function)
        return compiled(function, backend="aot_eager")  # type: ignore[arg-type]  # all that inductor does but code

    machine = fake_machine()
    graphs = play(load(model, machine, FP8))
    assert isinstance(machine.capturer, RerunCapturer)
    assert machine.capturer.replayed > 0
    pieces = play(load(model, fake_machine(compiler=compiler), FP8))  # type: ignore[arg-type]
    assert len(functions) == 3
    eager = play(load(model, fake_machine(), FP8, "--enforce-eager"))
    later = play(load(model, replace(fake_machine(), capability=(12, 0)), FP8, "--enforce-eager"))
    for other in (pieces, eager, later):
        assert other[0] == graphs[0]
        torch.testing.assert_close(other[1], graphs[1], rtol=1e-3, atol=1e-3)
    dense = play(load(model, fake_machine(), "--enforce-eager"))
    assert 0.001 < differs(graphs, dense) < NEAR


def test_a_checkpoint_of_eight_bits_keeps_its_weights(packed: Written) -> None:
    machine = fake_machine()
    kept, same, none, old, invariant = (
        load(packed.packed, chosen, "--enforce-eager", *flags)
        for chosen, flags in (
            (machine, ()),
            (machine, (FP8,)),
            (machine, ("--quantization=none",)),
            (replace(machine, capability=(8, 0)), ()),
            (machine, ("--batch-invariant",)),
        )
    )
    assert kept.weight_bytes == same.weight_bytes < none.weight_bytes == old.weight_bytes == invariant.weight_bytes
    assert differs(play(kept), play(none)) < NEAR


def test_ranks_have_their_share(packed: Written) -> None:
    expected = play(load(packed.packed, fake_machine()))[0]
    with gpu_ranks_of(packed.packed, 2, 1, *FLAGS) as ranks:
        driver = Driver(ranks, seed=4)  # type: ignore[arg-type]  # it stands where a runner is expected
        for slot, prompt in enumerate(PROMPTS):
            driver.start(slot, prompt, GREEDY)
        driver.run(budget=8, outputs=2)
        assert [request.output for request in driver.requests.values()] == expected


def test_what_cannot_be_is_refused_in_a_sentence(model: Path) -> None:
    settings = parse(WorkerSettings, [str(model), FP8])
    with pytest.raises(ConfigurationError, match=r"^--quantization fp8 needs .* a GPU in name has none\.$"):
        CudaPlatform(settings, replace(fake_machine(), capability=(8, 6)))
    with pytest.raises(ConfigurationError, match="does not go with --batch-invariant"):
        CudaPlatform(parse(WorkerSettings, [str(model), FP8, "--batch-invariant"]), fake_machine())
    CudaPlatform(settings, replace(fake_machine(), capability=(8, 9)))
