"""What quantization costs in accuracy: python -m tests.bench.accuracy [MODEL] [--text FILE]

The perplexity of a fixed text, and how long greedy continuations of its pieces stay those of dense weights, for each
way of keeping the weights of one checkpoint. Weights in float32 are the reference; bfloat16 is shown beside the
quantized ones, because it rounds the same activations. One JSON object per row.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tercet_shared.checkpoint import Checkpoint
from tercet_shared.config import WorkerSettings, parse
from tercet_shared.sampling_params import SamplingParams
from tercet_worker.startup import load_engine
from tests.bench.worker_profile import default_model
from tests.integration.worker.driver import Driver

if TYPE_CHECKING:
    from tercet_worker.runner import ModelRunner

WAYS = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "auto"), ("bfloat16", "int8"))
PIECES, CONTINUATION = 16, 48
BUDGET = 512


def perplexity(runner: ModelRunner, ids: list[int]) -> float:
    """Returns the perplexity of ``ids`` after the first, as one prompt."""
    driver = Driver(runner)
    request = driver.start(0, ids, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    found: list[float] = []
    while request.need:
        counts = {0: min(request.need, BUDGET)}
        plan, pending = driver.submit(counts)
        result = pending.result()
        if result.prompt_logprobs is not None:
            found += result.prompt_logprobs.logprobs.tolist()
        driver.land(plan, result)
        if request.output:
            break
    runner.reset()
    return math.exp(-float(np.mean(found)))


def continuations(runner: ModelRunner, ids: list[int]) -> list[list[int]]:
    """Returns the greedy continuations of pieces of the text."""
    driver = Driver(runner)
    size = len(ids) // PIECES
    requests = [
        driver.start(slot, ids[slot * size : (slot + 1) * size], SamplingParams(temperature=0.0, max_tokens=1_000))
        for slot in range(PIECES)
    ]
    for request in requests:
        driver.step({request.slot: request.need})
    for _ in range(CONTINUATION - 1):
        driver.step({request.slot: 1 for request in requests})
    runner.reset()
    return [request.output for request in requests]


def agreement(mine: list[list[int]], reference: list[list[int]]) -> tuple[float, float]:
    """Returns the share of first tokens that agree, and the mean number of tokens until the first that does not."""
    first = float(np.mean([a[0] == b[0] for a, b in zip(mine, reference, strict=True)]))
    lengths = []
    for a, b in zip(mine, reference, strict=True):
        differs = [index for index, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        lengths.append(differs[0] if differs else len(a))
    return first, float(np.mean(lengths))


def main() -> None:
    """Measures every way of keeping the weights."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.accuracy", description=__doc__)
    parser.add_argument("model", nargs="?", help="what `tercet serve` takes")
    parser.add_argument("--text", type=Path, default=Path(__file__).with_name("text.txt"))
    options = parser.parse_args()
    model = options.model or default_model()
    ids = Checkpoint.open(model).tokenizer.encode(options.text.read_text(), add_special_tokens=True)
    reference: list[list[int]] = []
    for dtype, quantization in WAYS:
        flags = [model, f"--dtype={dtype}", f"--quantization={quantization}", f"--max-num-batched-tokens={BUDGET}"]
        runner = load_engine(parse(WorkerSettings, [*flags, "--num-kv-blocks=400"]), lambda _s, _f: None).runner
        found = continuations(runner, ids)
        reference = reference or found
        first, length = agreement(found, reference)
        row = {
            "dtype": dtype,
            "quantization": quantization,
            "tokens": len(ids),
            "perplexity": round(perplexity(runner, ids), 4),
            "first_tokens_equal": round(first, 3),
            "tokens_until_different": round(length, 1),
            "of": CONTINUATION,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
