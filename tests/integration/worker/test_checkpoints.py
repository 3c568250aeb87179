"""Models of all shapes against Transformers, and checkpoints that cannot be loaded: one sentence each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tercet_shared.errors import CheckpointError, ConfigurationError
from tercet_worker.loading import weights as loading
from tests.fakes.checkpoints import write_tiny_llama, write_tiny_llama_gguf
from tests.integration.worker.driver import engine_for
from tests.integration.worker.logits import prompt_logits

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 384, 150)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SMALL = ("--dtype=float32", "--num-kv-blocks=16", "--max-num-seqs=2")


@torch.inference_mode()
def reference_logits(path: Path) -> torch.Tensor:
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied, in shards": {"tied": False, "shards": 3},
    "biases": {"biases": True, "tied": False},
    "llama3 rope": {"rope_scaling": LLAMA3, "rope_theta": 500_000.0},
    "three query heads per kv head, heads of 16": {"hidden": 96, "heads": 6, "kv_heads": 2},
    "one kv head": {"heads": 2, "kv_heads": 1, "intermediate": 100},
    "heads of 8, which the kernels do not take": {"hidden": 40, "heads": 5, "kv_heads": 5},
    "stored in bfloat16": {"dtype": "bfloat16"},
    "stored in float16": {"dtype": "float16", "tied": False},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(tmp_path: Path, shape: str) -> None:
    path = write_tiny_llama(tmp_path / "tiny", **SHAPES[shape])
    ours = prompt_logits(engine_for(path, *SMALL), PROMPT)
    torch.testing.assert_close(ours, reference_logits(path), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("biases", [False, True])
def test_a_gguf_file_gives_the_logits_of_its_twin(tmp_path: Path, biases: bool) -> None:
    twin = write_tiny_llama(tmp_path / "tiny", biases=biases, tied=False)
    file = write_tiny_llama_gguf(tmp_path / "tiny.gguf", biases=biases, tied=False)
    torch.testing.assert_close(
        prompt_logits(engine_for(file, *SMALL), PROMPT), reference_logits(twin), atol=2e-4, rtol=1e-4
    )


def test_rope_divisors_of_a_gguf_file_are_llama3_scaling(tmp_path: Path) -> None:
    # llama.cpp's converter writes the factors that the scaling divides the frequencies by.
    frequencies = 10_000.0 ** -(np.arange(0, 16, 2) / 16)
    wavelengths = 2 * np.pi / frequencies
    blend = (64 / wavelengths - 1.0) / 3.0
    middle = 1 / ((1 - blend) / 8.0 + blend)
    divisors = np.where(wavelengths < 16, 1.0, np.where(wavelengths > 64, 8.0, middle)).astype(np.float32)
    file = write_tiny_llama_gguf(tmp_path / "tiny.gguf", rope_divisors=divisors)
    twin = write_tiny_llama(tmp_path / "tiny", rope_scaling=LLAMA3)
    torch.testing.assert_close(
        prompt_logits(engine_for(file, *SMALL), PROMPT), reference_logits(twin), atol=2e-4, rtol=1e-4
    )


def test_tensors_are_stored_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_llama_gguf(tmp_path / "tiny.gguf", quantization=gguf.GGMLQuantizationType.Q8_0)
    whole = prompt_logits(engine_for(path, *SMALL), PROMPT)
    monkeypatch.setattr(loading, "_PIECE", 700)  # neither a divisor nor a multiple of any tensor
    torch.testing.assert_close(prompt_logits(engine_for(path, *SMALL), PROMPT), whole, atol=0, rtol=0)


def edit_config(path: Path, **values: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def rename_tensor(path: Path, old: str, new: str) -> None:
    file = path / "model.safetensors"
    data = file.read_bytes()
    assert len(old) == len(new)
    file.write_bytes(data.replace(old.encode(), new.encode(), 1))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny")


def refused(path: Path, *flags: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        engine_for(path, *(flags or SMALL))
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_missing_tensor_is_named(tiny: Path) -> None:
    rename_tensor(tiny, "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_porj.weight")
    assert "lacks the tensor 'model.layers.1.mlp.up_proj.weight'" in refused(tiny)


def test_a_tensor_without_a_place_is_named(tiny: Path) -> None:
    edit_config(tiny, num_hidden_layers=1)
    assert refused(tiny) == (
        "The checkpoint holds a tensor 'model.layers.1.self_attn.q_proj.weight' that the architecture has no place for."
    )


def test_a_tensor_of_another_shape_is_named(tiny: Path) -> None:
    edit_config(tiny, intermediate_size=100)
    assert refused(tiny) == (
        "The tensor 'model.layers.0.mlp.gate_proj.weight' has the shape [128, 64], "
        "and the configuration says [100, 64]."
    )


def test_the_head_of_a_tied_checkpoint_may_come_again(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny", tied=False)
    edit_config(path, tie_word_embeddings=True)
    assert engine_for(path, *SMALL).offer.vocab_size == 384


def test_an_unknown_architecture_is_named(tiny: Path) -> None:
    edit_config(tiny, architectures=["BloomForCausalLM"], model_type="bloom")
    assert refused(tiny) == ("The architecture BloomForCausalLM is not supported (supported: LlamaForCausalLM).")


def test_an_unknown_gguf_architecture_is_named(tmp_path: Path) -> None:
    file = write_tiny_llama_gguf(tmp_path / "other.gguf", architecture="mamba")
    assert "mamba is not supported" in refused(file)


def test_an_unknown_activation_is_named(tiny: Path) -> None:
    edit_config(tiny, hidden_act="relu2")
    assert "'relu2' is not supported" in refused(tiny)


def test_a_truncated_file_is_called_so(tiny: Path) -> None:
    file = tiny / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "truncated" in refused(tiny)


def test_a_model_that_does_not_fit_is_refused_before_it_is_allocated(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tercet_worker.platforms.cpu.available_memory", lambda: 200 * 1024**2)
    assert refused(tiny) == "The model tiny in float32 needs 0.3 GiB of memory, and only 0.2 GiB are available."


def test_a_length_beyond_the_model_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigurationError, match="at most 2048 tokens, not 2049"):
        engine_for(tiny, *SMALL, "--max-model-len=2049")


def test_a_small_pool_shortens_the_context(tiny: Path) -> None:
    offer = engine_for(tiny, *SMALL).offer
    assert (offer.num_blocks, offer.block_size, offer.max_model_len) == (16, 16, 256)
