"""Threads that share a step while one of them has no processor: nobody waits for it, and it changes nothing later."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.step import NewSlot, NewSlots, Slot, StepPlan, empty_i32
from tercet_worker.attention.cpu import CpuAttention
from tercet_worker.kernels.build import SOURCES
from tercet_worker.kernels.decode_abi import DecodeOutcome
from tercet_worker.kernels.library import Isa
from tercet_worker.kernels.toolchain import find_compiler
from tercet_worker.layers.parameters import Placement
from tercet_worker.models import create_model
from tercet_worker.program.compiled import CompiledModel
from tercet_worker.program.decode import DecodeSteps
from tercet_worker.program.weights import PackedWeights, Quantization
from tercet_worker.quantization import WeightFormat
from tercet_worker.state.checks import PlanLimits
from tercet_worker.state.slots import SlotState
from tests.unit.worker.test_program import BLOCK, CONFIG, spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tercet_worker.kernels.library import KernelLibrary

TEAMS = (2, 3, 8)


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of ``stages_check.cpp``."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("stages") / "check"
    sources = [Path(__file__).with_name("stages_check.cpp"), SOURCES / "stages.cpp", SOURCES / "team.cpp"]
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{SOURCES}", "-o", str(program)]
    finished = compiler.run([*flags, *map(str, sources)])
    assert finished.returncode == 0, finished.stderr
    return program


@pytest.mark.parametrize("threads", TEAMS)
@pytest.mark.parametrize("case", ["helper-away", "caller-away", "sleeping", "busy"])
def test_nobody_waits_for_a_thread_that_is_away(check: Path, case: str, threads: int) -> None:
    finished = subprocess.run([check, case, str(threads)], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_a_team_that_the_system_has_no_memory_for_is_an_error(check: Path) -> None:
    finished = subprocess.run([check, "refused", "200"], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


MODEL = replace(
    CONFIG, hidden_size=192, intermediate_size=768, num_layers=2, vocab_size=8_003, tie_word_embeddings=False
)
"""The head is several units of each thread, and the number of its panels is odd."""
STEPS = {1: 16, 2: 12, 16: 5, 40: 2}
"""By rows."""
SLOTS, MORE = max(STEPS), 48
LONG = 3_000
"""Tokens of context with which the task of a head is cut along it."""
GREEDY = [SamplingParams(temperature=0.0)]
DRAWN = [
    SamplingParams(temperature=1.2, seed=11),
    SamplingParams(temperature=0.8, top_p=0.9, seed=12),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_k=7, min_p=0.01, seed=13),
]
KINDS = {"dense": Quantization.NONE, "quantized": Quantization.INT8}
ISA = Isa.GENERIC
"""The slowest: a step takes longer than the system leaves a thread its processor where others want it."""


class World:
    """A random model that decodes from ``context`` cached tokens on. Worlds of one kind have the same weights."""

    def __init__(self, library: KernelLibrary, kind: str, threads: int, context: int = 0) -> None:
        cpu, dtype = torch.device("cpu"), torch.bfloat16
        weights = PackedWeights(library, dtype, KINDS[kind])
        model = create_model(MODEL, Placement(dtype, cpu, weights))
        destinations = model.destinations()
        for destination in destinations.values():
            if destination.quantized is not None:
                destination.quantized.announce(WeightFormat.DENSE)
        generator = torch.Generator().manual_seed(5)
        for name, destination in destinations.items():
            rows = torch.randn(destination.shape, generator=generator) * (0.15 if len(destination.shape) == 2 else 0.5)
            destination.store(0, (rows + 1 if "norm" in name else rows).to(dtype))
        assert any(matrix.format is not WeightFormat.DENSE for matrix in weights.matrices) == (kind == "quantized")
        max_len = context + MORE
        blocks = -(-max_len // BLOCK)
        attention = CpuAttention(spec_of(MODEL, dtype), library, threads=threads, isa=ISA)
        values = attention.allocate_kv(MODEL.num_layers, SLOTS * blocks).memory.view(dtype)
        values.copy_(torch.randn(values.shape, generator=generator))
        self._model = CompiledModel(
            model,
            library,
            dtype=dtype,
            threads=threads,
            max_tokens=SLOTS,
            vocab_size=MODEL.vocab_size,
            isa=ISA,
        )
        self._state = SlotState(slots=SLOTS, max_model_len=max_len, block_size=BLOCK, device=cpu)
        limits = PlanLimits(MODEL.vocab_size, SLOTS * blocks, BLOCK, SLOTS)
        self._decode = DecodeSteps(self._model, attention, self._state, limits)
        order = np.random.default_rng(2).permutation(SLOTS * blocks)
        self._blocks = order.astype(np.int32).reshape(SLOTS, blocks)
        self._context = context

    def steps(self, rows: int, params: list[SamplingParams]) -> list[tuple[list[int], str]]:
        """Returns of every step the tokens of ``rows`` requests, and a digest of what they were found from."""
        self._state.reset()
        tokens = np.arange(3, self._context + 4, dtype=np.int32)
        new = [
            NewSlot(Slot(row), len(tokens), len(tokens), tokens + np.int32(17 * row), params[row % len(params)])
            for row in range(rows)
        ]
        plan = StepPlan(
            step_id=0,
            freed=empty_i32(),
            new=NewSlots.build(new),
            slots=np.arange(rows, dtype=np.int32),
            num_tokens=np.ones(rows, np.int32),
            computed=np.full(rows, self._context, np.int32),
            samples=np.ones(rows, np.bool_),
            block_offsets=np.zeros(rows + 1, np.int32),
            block_ids=empty_i32(),
        )
        self._state.apply(plan)
        plan.new = NewSlots.empty()
        found = []
        for step in range(STEPS[rows]):
            position = self._context + step
            plan.computed = np.full(rows, position, np.int32)
            held, needed = (-(-position // BLOCK) if step else 0), position // BLOCK + 1
            plan.block_offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(needed - held)
            plan.block_ids = self._blocks[:rows, held:needed].ravel()
            assert self._decode.run(plan) is DecodeOutcome.DRAWN
            digest = blake2b(self._model.hidden[:rows].contiguous().view(torch.uint8).numpy().tobytes())
            if params is DRAWN:
                digest.update(self._decode.logits[:rows].numpy().tobytes())
            result = self._decode.result(plan)
            assert not len(result.not_finite)
            found.append((result.token_ids.tolist(), digest.hexdigest()))
        return found


CASES = list(product(STEPS, (GREEDY, DRAWN)))
_BUSY = """
import os, sys
cpu, parent = map(int, sys.argv[1:])
os.sched_setaffinity(0, {cpu})
print(flush=True)
while os.getppid() == parent:
    pass
"""


@pytest.fixture(scope="module")
def alone(library: KernelLibrary) -> Callable[[str], list[list[tuple[list[int], str]]]]:
    """What one thread gives in every case, by kind."""

    @cache
    def of(kind: str) -> list[list[tuple[list[int], str]]]:
        world = World(library, kind, 1)
        return [world.steps(rows, params) for rows, params in CASES]

    return of


@pytest.fixture
def crowded() -> Iterator[Callable[[], None]]:
    """Puts this thread, and those of programs made in the test, on one processor, which another process keeps busy."""
    allowed, before = os.sched_getaffinity(0), _kernel_threads()
    cpu = max(allowed)
    arguments = [sys.executable, "-c", _BUSY, str(cpu), str(os.getpid())]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as other:

        def confine() -> None:
            assert other.stdout is not None
            other.stdout.readline()
            for thread in {0} | _kernel_threads() - before:
                os.sched_setaffinity(thread, {cpu})

        try:
            yield confine
        finally:
            os.sched_setaffinity(0, allowed)
            other.kill()


def _kernel_threads() -> set[int]:
    return {
        int(task.name)
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().strip() == "tercet-kernels"
    }


@pytest.mark.parametrize("threads", TEAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_threads_without_processors_give_what_one_gives(
    library: KernelLibrary,
    alone: Callable[[str], list[list[tuple[list[int], str]]]],
    crowded: Callable[[], None],
    kind: str,
    threads: int,
) -> None:
    expected = alone(kind)
    world = World(library, kind, threads)
    crowded()
    for (rows, params), steps in zip(CASES, expected, strict=True):
        assert world.steps(rows, params) == steps, rows


def test_long_contexts_do_not_wait_for_processors_either(library: KernelLibrary, crowded: Callable[[], None]) -> None:
    expected = World(library, "dense", 1, LONG).steps(2, GREEDY)
    world = World(library, "dense", 3, LONG)
    crowded()
    assert world.steps(2, GREEDY) == expected
