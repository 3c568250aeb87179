"""Whole models with compact weights and without: the same bits, in three quarters of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tercet_shared.sampling_params import SamplingParams
from tercet_worker.kernels.library import KernelLibrary, load_kernels
from tercet_worker.runner import ModelRunner
from tercet_worker.startup import Engine
from tests.fakes.checkpoints import write_tiny_llama
from tests.integration.worker.driver import GREEDY, Driver, engine_for
from tests.integration.worker.logits import prompt_logits

PROMPTS = [np.random.default_rng(length).integers(3, 384, length).tolist() for length in (130, 1, 47, 16)]
PARAMS = (GREEDY, GREEDY, SamplingParams(temperature=0.9, top_p=0.9, seed=1, max_tokens=100), GREEDY)
LARGE: dict[str, Any] = {"hidden": 256, "heads": 4, "kv_heads": 2}
MIXED: dict[str, Any] = {"hidden": 80, "heads": 5, "kv_heads": 5}
"""With int8 the down projections become eight bits; 80 columns are no whole blocks, so all else stays dense."""


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    return load_kernels()


def load(path: Path, *flags: str) -> Engine:
    return engine_for(
        path, "--dtype=bfloat16", "--num-kv-blocks=64", "--max-num-seqs=8", "--max-num-batched-tokens=192",
        "--threads=2", *flags,
    )  # fmt: skip


def outputs(runner: ModelRunner) -> list[list[int]]:
    runner.reset()
    driver = Driver(runner)
    requests = [
        driver.start(slot, prompt, params) for slot, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    driver.run(budget=100, outputs=24)  # less than a prompt: some steps are chunks, and decode beside them
    return [request.output for request in requests]


@pytest.mark.parametrize(
    ("shape", "quantization", "least", "most"),
    [
        pytest.param(LARGE, "auto", 0.75, 0.76, id="tied"),
        pytest.param(LARGE | {"tied": False, "biases": True}, "none", 0.75, 0.76, id="own-head-biases"),
        pytest.param(MIXED, "int8", 0.76, 0.9, id="beside-eight-bits"),
    ],
)
def test_nothing_changes_but_the_memory(
    library: KernelLibrary, tmp_path: Path, shape: dict[str, Any], quantization: str, least: float, most: float
) -> None:
    path = write_tiny_llama(tmp_path / "tiny", dtype="bfloat16", **shape)
    compact, dense = (
        load(path, f"--quantization={quantization}", flag) for flag in ("--compact-weights", "--no-compact-weights")
    )
    for prompt in PROMPTS:
        found, expected = prompt_logits(compact, prompt), prompt_logits(dense, prompt)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert outputs(compact.runner) == outputs(dense.runner)
    if library.cdll.tercet_weights_compacts(int(library.best_isa)):
        assert least * dense.weight_bytes < compact.weight_bytes < most * dense.weight_bytes
    else:
        assert compact.weight_bytes == dense.weight_bytes


def test_weights_are_compact_unless_told_otherwise(library: KernelLibrary, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny", dtype="bfloat16", **LARGE)
    usual, dense = load(path), load(path, "--no-compact-weights")
    compacts = library.cdll.tercet_weights_compacts(int(library.best_isa))
    assert (usual.weight_bytes < dense.weight_bytes) == compacts


def test_float32_stays(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny", **LARGE)
    usual, dense = load(path, "--dtype=float32"), load(path, "--dtype=float32", "--no-compact-weights")
    assert usual.weight_bytes == dense.weight_bytes
    assert torch.equal(prompt_logits(usual, PROMPTS[0]), prompt_logits(dense, PROMPTS[0]))
