"""Every Triton kernel becomes machine code of the GPUs that the worker is for: what the interpreter accepts is not all
that a GPU's compiler asks for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are compiled with Triton")

from triton.runtime.interpreter import InterpretedFunction

REPOSITORY = Path(__file__).parents[4]
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes that a block of threads can have."""
MODULES = ("cache", "inputs", "layers", "matmul", "sampling")
HELPERS = {"_place_of", "_mix", "_gumbel"}
"""Not launched, but called by kernels."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.worker.cuda.compile_kernels", *map(str, SHARED_MEMORY)],
        capture_output=True, text=True, env=environment, cwd=REPOSITORY, timeout=240, check=False,
    )  # fmt: skip
    if "0 compatible backends for target (cuda)" in done.stderr:
        pytest.skip("this Triton has no compiler for NVIDIA GPUs")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def kernels() -> set[str]:
    """Returns the names of all functions that Triton compiles."""
    modules = [import_module(f"tercet_worker.cuda.kernels.{name}") for name in MODULES]
    return {
        name for module in modules for name, value in vars(module).items() if isinstance(value, InterpretedFunction)
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_every_kernel_is_compiled(made: list[dict[str, Any]], arch: int) -> None:
    here = [each for each in made if each["arch"] == arch]
    assert {each["kernel"] for each in here} == kernels() - HELPERS
    for each in here:
        assert each["cubin"] > 0
        assert each["shared"] <= SHARED_MEMORY[arch]


@pytest.mark.timeout(300)
def test_what_is_too_large_for_eight_bits_becomes_the_largest(made: list[dict[str, Any]]) -> None:
    eight = [each["ptx"] for each in made if each["kernel"] == "_write" and "e4m3" in each["ptx"]]
    assert eight
    assert all("cvt.rn.satfinite.e4m3x2.f32" in ptx for ptx in eight)


@pytest.mark.timeout(300)
def test_the_invariant_product_runs_on_matrix_units(made: list[dict[str, Any]]) -> None:
    products = [each["ptx"] for each in made if each["kernel"] == "_multiply"]
    assert products
    assert all("mma.sync" in ptx or "wgmma" in ptx for ptx in products)
