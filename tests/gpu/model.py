"""The whole worker on the GPU: against the CPU's, with and without graphs, and on several GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from tercet_shared.config import WorkerSettings, parse
from tercet_shared.sampling_params import SamplingParams
from tercet_worker import startup
from tercet_worker.graphs.capture import Work
from tercet_worker.platforms.cuda import CudaPlatform, Machine
from tercet_worker.runner import ModelRunner
from tests.fakes.checkpoints import write_tiny_llama
from tests.integration.worker import ranks as ranks_module
from tests.integration.worker.driver import Driver, Request

FLAGS = ("--max-num-seqs=16", "--max-num-batched-tokens=640", "--max-model-len=1024", "--num-kv-blocks=600")
PROMPTS = [np.random.default_rng(length).integers(3, 384, length).tolist() for length in (37, 1, 200, 64, 2, 500)]
KINDS = (
    SamplingParams(temperature=0.0, prompt_logprobs=0),
    SamplingParams(temperature=0.8, seed=11, frequency_penalty=0.4, repetition_penalty=1.2),
    SamplingParams(temperature=1.1, top_p=0.8, top_k=40, seed=5),
)
OUTPUTS = 24
NEAR, NEAR_FP8 = 0.25, 1.0
"""By how much the logarithm of a probability may differ between two ways of rounding to bfloat16 (the CPU's own way and
float32 are 0.11 apart); and where keys and values have four bits of precision, which nobody has measured."""
MEAN_FP8_WEIGHTS = 1.0
"""The same for weights, and inputs of products, of eight bits, on average: the stand-in for a GPU is off by 0.48."""
RANKS_START_S = 150.0
"""In which every rank must have compiled and captured; or answered a step."""

Check = tuple[str, Callable[[], None]]
Scores = dict[tuple[int, int], float]


class Uncaptured:
    """Implements ``Capturer``: a graph is the same work on the same tensors, launched anew."""

    def capture(self, work: Work) -> Work:
        work()
        return work


def checks(machine: Machine, invariant: Machine, folder: Path, gpus: int) -> Iterator[Check]:
    """Yields the checks, by name.

    Args:
        machine: a GPU.
        invariant: the same for ``--batch-invariant``.
        folder: for the checkpoint.
        gpus: that ranks can be started on.
    """
    # Heads of 128, for which the checks of attention have compiled FlashInfer's kernels already; several layers,
    # biases, and heads that GPUs can divide.
    model = write_tiny_llama(
        folder / "tiny",
        hidden=512, layers=4, heads=4, kv_heads=2, biases=True, dtype="bfloat16", max_len=1024,
    )  # fmt: skip
    held: dict[str, tuple[dict[int, list[int]], Scores]] = {}

    def load(chosen: Machine | None, *flags: str) -> ModelRunner:
        settings = parse(WorkerSettings, [str(model), *FLAGS, *flags])
        if chosen is None:
            return startup.load_engine(settings, lambda _stage, _fraction: None).runner
        with patch.object(startup, "choose_platform", lambda _settings: CudaPlatform(settings, chosen)):
            return startup.load_engine(settings, lambda _stage, _fraction: None).runner

    def run(name: str, chosen: Machine | None, *flags: str) -> None:
        held[name] = play(load(chosen, *flags))

    def run_cpu() -> None:
        run("cpu", None, "--device=cpu", "--dtype=float32")

    def differences(name: str) -> list[float]:
        if "cpu" not in held:
            run_cpu()  # another process had it
        found, expected = _of(held, name)[1], held["cpu"][1]
        assert found.keys() == expected.keys(), "other tokens were scored"
        return [abs(found[key] - expected[key]) for key in found]

    def near(name: str, most: float = NEAR) -> None:
        worst = max(differences(name))
        assert worst < most, f"a token's log-probability differs by {worst:.3f}"

    def fp8_weights() -> None:
        run("fp8 weights", machine, "--quantization=fp8")
        found = differences("fp8 weights")
        mean = sum(found) / len(found)
        assert mean < MEAN_FP8_WEIGHTS, f"log-probabilities differ by {mean:.3f} on average"

    def same(name: str, other: str) -> None:
        found, expected = _of(held, name), _of(held, other)
        tokens = sum(found[0][slot] != expected[0][slot] for slot in expected[0])
        worst = max(abs(found[1][key] - expected[1][key]) for key in expected[1])
        assert found == expected, f"{tokens} of {len(expected[0])} outputs, and log-probabilities by {worst:.5f}"

    def alone() -> None:
        runner = load(invariant, "--batch-invariant")
        together = play(runner)
        for slot in range(len(PROMPTS)):
            runner.reset()
            tokens, scores = play(runner, only=slot)
            assert tokens[slot] == together[0][slot], f"request {slot} yields other tokens alone"
            assert all(together[1][key] == score for key, score in scores.items()), f"request {slot} has other scores"

    def parallel(tensor: int, pipeline: int) -> None:
        with (
            patch.object(ranks_module, "_WAIT_S", RANKS_START_S),
            ranks_module.ranks_of(model, tensor, pipeline, *FLAGS, "--device=cuda") as ranks,
        ):
            held["parallel"] = play(ranks)  # type: ignore[arg-type]  # it stands where a runner is expected
        near("parallel")

    yield "whole model: the CPU", run_cpu
    yield "whole model: our kernels", lambda: run("eager", machine, "--enforce-eager")
    yield "our kernels near the CPU", lambda: near("eager")
    # The same sizes and plans as with graphs: another number of rows may be added up in another order.
    yield "whole model: compiled", lambda: run("compiled", replace(machine, capturer=Uncaptured()))
    yield "compiled near the CPU", lambda: near("compiled")
    yield "whole model: graphs", lambda: run("graphs", machine)
    yield "graphs equal to the same without", lambda: same("graphs", "compiled")
    yield "whole model: batch-invariant", lambda: run("invariant", invariant, "--batch-invariant")
    yield "batch-invariant near the CPU", lambda: near("invariant")
    yield "batch-invariant: alone as together", alone
    if machine.capability >= (8, 9):
        yield "whole model: cache of eight bits", lambda: run("fp8", machine, "--kv-cache-dtype=fp8")
        yield "cache of eight bits near the CPU", lambda: near("fp8", NEAR_FP8)
    # Two heads of keys and values: with four ranks each is on two of them.
    for tensor, pipeline in ((2, 1), (1, 2), (4, 1), (2, 2)):
        if tensor * pipeline <= gpus:
            name = f"tensor parallel {tensor}, pipeline parallel {pipeline}, near the CPU"
            yield name, lambda t=tensor, p=pipeline: parallel(t, p)  # type: ignore[misc]  # names of a loop
    if machine.capability >= (8, 9):
        yield "whole model: weights of eight bits, near the CPU", fp8_weights


def _of(held: dict[str, tuple[dict[int, list[int]], Scores]], name: str) -> tuple[dict[int, list[int]], Scores]:
    assert name in held, f"the run {name!r} failed"
    return held[name]


def play(runner: ModelRunner, *, only: int | None = None) -> tuple[dict[int, list[int]], Scores]:
    """Runs requests of all kinds at once, or one; returns their tokens, and the scores of greedy ones' prompts."""
    driver = Driver(runner, seed=4)
    scores: Scores = {}
    for slot, prompt in enumerate(PROMPTS):
        if only is None or slot == only:
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
