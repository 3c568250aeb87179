from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from transformers import LlamaConfig

from tercet_shared.checkpoint import Checkpoint, Llama3RopeScaling, RopeConfig, RopeDivisors
from tercet_shared.errors import CheckpointError
from tests.fakes.checkpoints import write_tiny_llama, write_tiny_llama_gguf

if TYPE_CHECKING:
    from pathlib import Path

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def edited(path: Path, changes: dict[str, Any], remove: tuple[str, ...] = ()) -> Checkpoint:
    """A tiny checkpoint whose config.json was changed."""
    model = write_tiny_llama(path / "model")
    config = json.loads((model / "config.json").read_text())
    config = {name: value for name, value in {**config, **changes}.items() if name not in remove}
    (model / "config.json").write_text(json.dumps(config))
    return Checkpoint.open(str(model))


def test_smollm2(smollm2: Checkpoint) -> None:
    config = smollm2.config
    assert (config.architecture, config.family) == ("LlamaForCausalLM", "llama")
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (576, 1536, 30)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.rope == RopeConfig(100_000.0, 64)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (True, False, False)
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (1, (2,), None)
    assert smollm2.eos_token_ids == (2,)


def test_same_model_in_both_formats(tmp_path: Path) -> None:
    ours = Checkpoint.open(str(write_tiny_llama(tmp_path / "hf", tied=False, biases=True))).config
    theirs = Checkpoint.open(str(write_tiny_llama_gguf(tmp_path / "a.gguf", tied=False, biases=True))).config
    for name in ours.__dataclass_fields__:
        if name not in ("raw", "rms_norm_eps"):
            assert getattr(ours, name) == getattr(theirs, name), name


def test_what_transformers_writes(tmp_path: Path) -> None:
    stated = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000,
        rope_parameters={**LLAMA3, "rope_theta": 500_000.0},
        attention_bias=True,
        tie_word_embeddings=True,
        eos_token_id=[2, 7],
        architectures=["LlamaForCausalLM"],
    )
    model = write_tiny_llama(tmp_path / "model")
    stated.save_pretrained(model)
    config = Checkpoint.open(str(model)).config
    assert (config.hidden_size, config.num_kv_heads, config.head_dim) == (128, 4, 16)
    assert config.rope == RopeConfig(500_000.0, 16, Llama3RopeScaling(8.0, 1.0, 4.0, 512))
    assert (config.attention_bias, config.tie_word_embeddings, config.eos_token_ids) == (True, True, (2, 7))


def test_rope_as_transformers_4_wrote_it(tmp_path: Path) -> None:
    for key in ("rope_type", "type"):
        scaling = {key if name == "rope_type" else name: value for name, value in LLAMA3.items()}
        old = edited(tmp_path, {"rope_theta": 5e5, "rope_scaling": scaling}, remove=("rope_parameters", "head_dim"))
        assert old.config.rope == RopeConfig(5e5, 16, Llama3RopeScaling(8.0, 1.0, 4.0, 512))
    bare = edited(tmp_path, {"rope_scaling": None}, remove=("rope_parameters",))
    assert bare.config.rope == RopeConfig(10_000.0, 16)
    partial = edited(tmp_path, {"partial_rotary_factor": 0.5})
    assert partial.config.rope.rotary_dim == 8


def test_gguf_rope_divisors(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    checkpoint = Checkpoint.open(str(write_tiny_llama_gguf(tmp_path / "a.gguf", rope_divisors=divisors)))
    scaling = checkpoint.config.rope.scaling
    assert isinstance(scaling, RopeDivisors)
    assert np.array_equal(checkpoint.weights.read_float32(scaling.tensor), divisors)
    wrong = write_tiny_llama_gguf(tmp_path / "b.gguf", rope_divisors=divisors[:5])
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight.* is not a vector of 8 float32"):
        _ = Checkpoint.open(str(wrong)).config


def test_unknown_architectures_keep_their_names(tmp_path: Path) -> None:
    checkpoint = edited(
        tmp_path, {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}, ("rms_norm_eps",)
    )
    assert checkpoint.architecture == "GPTNeoXForCausalLM"
    with pytest.raises(CheckpointError, match=r"GPTNeoXForCausalLM\): 'rms_norm_eps' is missing"):
        _ = checkpoint.config
    gguf = Checkpoint.open(str(write_tiny_llama_gguf(tmp_path / "a.gguf", architecture="mamba")))
    assert gguf.architecture == "mamba"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "64"}, "'hidden_size' is '64', which is not an integer"),
        ({"hidden_size": True}, "'hidden_size' is True, which is not an integer"),
        ({"hidden_size": 65, "head_dim": None}, r"num_attention_heads \(4\) does not divide hidden_size \(65\)"),
        ({"num_attention_heads": 0, "head_dim": None}, "does not divide"),
        ({"num_key_value_heads": 3}, r"num_kv_heads \(3\) does not divide num_heads \(4\)"),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0, not between"),
        ({"num_hidden_layers": -1}, "num_layers is -1, not between"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000, not between"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0.0, not between"),
        ({"rms_norm_eps": [1]}, "'rms_norm_eps' is .1., which is not a number"),
        ({"head_dim": 15}, "rotary dimension is 15: not even"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes', which is not true or false"),
        ({"eos_token_id": 384}, "token id 384 is not in the vocabulary of 384"),
        ({"eos_token_id": [2, -1]}, "'eos_token_id' is .2, -1., which is not a token id"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope theta is 0.0"),
        ({"rope_parameters": {**LLAMA3, "factor": None}}, "rope_parameters: 'factor' is missing"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor < high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs by layer type"),
        ({"rope_parameters": []}, "'rope_parameters' is .., which is not an object"),
        ({"partial_rotary_factor": 1.5}, "'partial_rotary_factor' is 1.5"),
        ({"architectures": [], "model_type": None}, "names no model class"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantized with 'hqq' are not supported; what is read"),
    ],
)
def test_nonsense_is_refused_by_name(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=sentence) as caught:
        _ = edited(tmp_path, changes).config
    assert "config.json" in str(caught.value) or "/model" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"[1]", "holds a JSON list where an object is expected"),
        (b'{"rms_norm_eps": NaN}', "NaN is not JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b" " * ((8 << 20) + 1), "is larger than"),
    ],
)
def test_damaged_json(text: bytes, sentence: str, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    (model / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=sentence):
        _ = Checkpoint.open(str(model)).config
