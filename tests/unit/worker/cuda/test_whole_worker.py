"""The CUDA worker as a whole on the CPU: every way to run a step yields what the CPU's worker yields."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels are run with Triton's interpreter")

from tercet_shared.config import WorkerSettings, parse
from tercet_shared.errors import ConfigurationError
from tercet_shared.sampling_params import SamplingParams
from tercet_worker.cuda.machine import compiled
from tercet_worker.platforms.cuda import CudaPlatform, Machine
from tercet_worker.startup import Engine
from tests.fakes.checkpoints import write_tiny_llama
from tests.fakes.gpu import FakeWrappers, RerunCapturer, fake_machine
from tests.integration.worker.driver import Driver, engine_for

pytestmark = pytest.mark.timeout(300)  # the interpreter is slow

FLAGS = ("--max-num-seqs=12", "--num-kv-blocks=96", "--max-num-batched-tokens=48", "--max-model-len=256")
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(3, 384, length).tolist() for length in (37, 1, 20, 64, 2)]
SEEDED = SamplingParams(temperature=0.8, seed=11, frequency_penalty=0.4, repetition_penalty=1.2, min_p=0.02)
TRUNCATED = SamplingParams(temperature=1.1, top_p=0.8, top_k=40, seed=5, logit_bias=((7, 2.0),))
GREEDY = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1)

Load = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny", biases=True)


@pytest.fixture
def load(model: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    def load(machine: Machine, *flags: str) -> Engine:
        def choose(settings: WorkerSettings) -> CudaPlatform:
            return CudaPlatform(settings, machine)

        monkeypatch.setattr("tercet_worker.startup.choose_platform", choose)
        engine = engine_for(model, *FLAGS, *flags)
        assert isinstance(machine.wrappers, FakeWrappers)
        machine.wrappers.log.clear()  # of what was tried and captured
        return engine

    return load


def play(engine: Engine) -> dict[int, list[int]]:
    """Runs requests of all kinds at once, prompts in chunks beside those that decode."""
    driver = Driver(engine.runner, seed=4)
    for slot, prompt in enumerate(PROMPTS):
        driver.start(slot, prompt, (GREEDY, SEEDED, TRUNCATED)[slot % 3])
    driver.run(budget=48, outputs=9)
    return {slot: request.output for slot, request in driver.requests.items()}


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    return play(engine_for(model, *FLAGS, "--device=cpu", "--dtype=float32", "--threads=1"))


@pytest.mark.parametrize("flags", [(), ("--enforce-eager",), ("--batch-invariant",)])
def test_tokens_are_those_of_the_cpu(load: Load, flags: tuple[str, ...], expected: dict[int, list[int]]) -> None:
    machine = fake_machine()
    assert play(load(machine, *flags)) == expected
    capturer, wrappers = machine.capturer, machine.wrappers
    assert isinstance(capturer, RerunCapturer)
    assert isinstance(wrappers, FakeWrappers)
    if flags:
        assert capturer.captured == 0
        assert set(wrappers.log) == {"decode", "prefill"}
    else:
        # Two layers: three segments for each piecewise size, and one graph for each full one.
        assert capturer.captured == 3 * len((1, 2, 4, 8, 16, 24, 32, 40, 48)) + len((1, 2, 4, 8, 12))
        assert capturer.replayed > 0
        assert {"prefill", "graph 8"} <= set(wrappers.log)
        assert "decode" not in wrappers.log


def test_compiled_pieces_yield_the_same(load: Load, expected: dict[int, list[int]]) -> None:
    functions = []

    def compiler(function: object) -> object:
        functions.append(function)
        return compiled(function, backend="aot_eager")  # type: ignore[arg-type]  # all that inductor does but code

    assert play(load(fake_machine(compiler=compiler))) == expected  # type: ignore[arg-type]
    assert len(functions) == 3  # what comes before, between and behind attention, however many layers there are


def test_rows_that_share_a_prefix_attend_to_it_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet_worker.cuda.cascade.LEAST_TOKENS", 32)  # the interpreter is slow
    machine = fake_machine()
    runner = load(machine, "--enforce-eager").runner
    prompt = PROMPTS[3][:40]

    def outputs(*, together: bool) -> list[list[int]]:
        runner.reset()
        driver = Driver(runner)
        rows = [driver.start(0, prompt)]
        driver.step({0: len(prompt)})
        for slot in range(1, 9):
            rows.append(driver.start(slot, [*prompt[:32], 10 * slot], shared=rows[0].blocks[:2]))
            driver.step({slot: 1})
        for _ in range(3):
            for part in [rows] if together else [[row] for row in rows]:
                driver.step({request.slot: 1 for request in part})
        return [request.output for request in rows]

    one_by_one = outputs(together=False)
    wrappers = machine.wrappers
    assert isinstance(wrappers, FakeWrappers)
    assert "cascade" not in wrappers.log
    assert outputs(together=True) == one_by_one
    assert wrappers.log.count("cascade") == 3


def test_a_cache_of_eight_bits_holds_twice_as_many_blocks(load: Load) -> None:
    sizes = []
    for flags in ((), ("--kv-cache-dtype=fp8",)):
        engine = load(fake_machine(dtype=torch.bfloat16), "--enforce-eager", *flags)
        sizes.append(engine.kv_bytes)
        assert engine.offer.device == ("cuda-flashinfer-fp8kv" if flags else "cuda-flashinfer")
        driver = Driver(engine.runner)
        driver.start(0, PROMPTS[4])
        driver.run(budget=48, outputs=2)
        assert len(driver.requests[0].output) == 2
    assert sizes[0] == 2 * sizes[1]


def test_memory_that_weights_and_steps_leave_is_cache(model: Path, load: Load) -> None:
    engine = load(fake_machine(memory=2**30), "--gpu-memory-utilization=0.5", "--enforce-eager", "--max-num-seqs=1")
    # One request of 256 tokens is all that can be used of it.
    assert engine.offer.num_blocks == 96
    settings = parse(WorkerSettings, [str(model), "--kv-cache-dtype=fp8"])
    old = fake_machine()
    with pytest.raises(ConfigurationError, match="a GPU in name has"):
        CudaPlatform(settings, Machine(**{**_fields(old), "capability": (8, 0)}))
    for flag in ("--dtype=float32", "--quantization=int8"):
        with pytest.raises(ConfigurationError, match=flag.replace("=", " ")):
            CudaPlatform(parse(WorkerSettings, [str(model), flag]), old)


def _fields(machine: Machine) -> dict[str, object]:
    return {name: getattr(machine, name) for name in Machine.__dataclass_fields__}


def test_a_gpu_that_is_not_there_is_one_sentence(model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--device cuda: this torch .* is built without CUDA\."):
        engine_for(model, "--device=cuda")
