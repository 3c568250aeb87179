"""The whole worker on the GPU: against the CPU's, with and without graphs, and on several GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from tercet_shared.config import WorkerSettings, parse
from tercet_shared.sampling_params import SamplingParams
from tercet_worker import startup
from tercet_worker.attention.interface import AttentionBackend
from tercet_worker.graphs.dispatch import Dispatcher
from tercet_worker.models.interface import StepModel
from tercet_worker.platforms.cuda import CudaPlatform, Machine
from tercet_worker.platforms.interface import Report, StepParts
from tercet_worker.runner import ModelRunner
from tercet_worker.state.checks import PlanLimits
from tercet_worker.state.slots import SlotState
from tests.fakes.checkpoints import write_tiny_llama
from tests.integration.worker.driver import Driver, Request
from tests.integration.worker.ranks import ranks_of

FLAGS = ("--max-num-seqs=16", "--max-num-batched-tokens=640", "--max-model-len=1024", "--num-kv-blocks=600")
PROMPTS = [np.random.default_rng(length).integers(3, 384, length).tolist() for length in (37, 1, 200, 64, 2, 500)]
KINDS = (
    SamplingParams(temperature=0.0, prompt_logprobs=0),
    SamplingParams(temperature=0.8, seed=11, frequency_penalty=0.4, repetition_penalty=1.2),
    SamplingParams(temperature=1.1, top_p=0.8, top_k=40, seed=5),
)
OUTPUTS = 24
NEAR = 0.15
"""By how much the logarithm of a probability may differ between two ways of rounding to bfloat16."""

Check = tuple[str, Callable[[], None]]
Scores = dict[tuple[int, int], float]


class Ungraphed(CudaPlatform):
    """The same compiled functions, without graphs."""

    def step_parts(
        self, model: StepModel, attention: AttentionBackend, state: SlotState, limits: PlanLimits, report: Report
    ) -> StepParts:
        self._dispatcher = Dispatcher.eager()
        return super().step_parts(model, attention, state, limits, report)


def checks(machine: Machine, folder: Path) -> Iterator[Check]:
    """Yields the checks, by name."""
    # Heads of 64, as FlashInfer has kernels for; several layers, biases, and heads that GPUs can divide.
    model = write_tiny_llama(
        folder / "tiny", hidden=512, layers=4, heads=8, kv_heads=2, biases=True, dtype="bfloat16", max_len=1024
    )
    held: dict[str, tuple[dict[int, list[int]], Scores]] = {}

    def run(name: str, kind: type[CudaPlatform] | None, *flags: str) -> None:
        settings = parse(WorkerSettings, [str(model), *FLAGS, *flags])
        choose = startup.choose_platform
        if kind is not None:
            startup.choose_platform = lambda _settings: kind(settings, machine)  # type: ignore[assignment]  # for this one
        try:
            engine = startup.load_engine(settings, lambda _stage, _fraction: None)
        finally:
            startup.choose_platform = choose
        held[name] = play(engine.runner)

    def near(name: str, other: str) -> None:
        found, expected = held[name][1], held[other][1]
        assert found.keys() == expected.keys()
        worst = max(abs(found[key] - expected[key]) for key in found)
        assert worst < NEAR, f"a token's log-probability differs by {worst:.3f}"

    def same(name: str, other: str) -> None:
        assert held[name] == held[other], "tokens or log-probabilities differ"

    yield "whole model: the CPU", lambda: run("cpu", None, "--device=cpu", "--dtype=float32")
    yield "whole model: our kernels", lambda: run("eager", CudaPlatform, "--enforce-eager")
    yield "our kernels near the CPU", lambda: near("eager", "cpu")
    yield "whole model: compiled", lambda: run("compiled", Ungraphed)
    yield "compiled near the CPU", lambda: near("compiled", "cpu")
    yield "whole model: graphs", lambda: run("graphs", CudaPlatform)
    yield "graphs equal to the same without", lambda: same("graphs", "compiled")
    yield "whole model: batch-invariant", lambda: run("invariant", CudaPlatform, "--batch-invariant")
    yield "batch-invariant near the CPU", lambda: near("invariant", "cpu")
    if machine.capability >= (8, 9):
        yield "whole model: cache of eight bits", lambda: run("fp8", CudaPlatform, "--kv-cache-dtype=fp8")
    count = torch.cuda.device_count()
    if count > 1:

        def parallel() -> None:
            with ranks_of(model, 2 if count < 4 else 4, 1, *FLAGS, "--device=cuda") as ranks:
                held["parallel"] = play(ranks)  # type: ignore[arg-type]  # it stands where a runner is expected

        yield f"tensor parallel on {2 if count < 4 else 4} GPUs", parallel
        yield "tensor parallel near the CPU", lambda: near("parallel", "cpu")


def play(runner: ModelRunner) -> tuple[dict[int, list[int]], Scores]:
    """Runs requests of all kinds at once; returns their tokens, and the scores of greedy ones' prompts."""
    driver = Driver(runner, seed=4)
    scores: Scores = {}
    for slot, prompt in enumerate(PROMPTS):
        driver.start(slot, prompt, KINDS[slot % len(KINDS)])
    while counts := _counts(driver.requests, 640):
        result = driver.step(counts)
        columns = result.prompt_logprobs
        if columns is not None:
            for number, row in enumerate(columns.rows.tolist()):
                begin, end = columns.token_offsets[number : number + 2].tolist()
                for token in range(begin, end):
                    place = int(columns.first[number]) + token - begin
                    scores[list(counts)[row], place] = float(columns.logprobs[token])
    return {slot: request.output for slot, request in driver.requests.items()}, scores


def _counts(requests: dict[int, Request], left: int) -> dict[int, int]:
    counts = {}
    for slot, request in requests.items():
        count = min(request.need, left, 300) if len(request.output) < OUTPUTS else 0
        if count:
            counts[slot] = count
            left -= count
    return counts
