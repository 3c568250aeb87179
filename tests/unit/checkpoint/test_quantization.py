"""Quantized safetensors: what their configuration says, which tensors stand for a weight, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tercet_shared.checkpoint import Checkpoint
from tercet_shared.errors import CheckpointError, InternalError
from tests.fakes.packed_checkpoints import PACKINGS, Packing, Tensor, edit_config, write_tensors

if TYPE_CHECKING:
    from pathlib import Path

ROWS, COLUMNS = 64, 128


def written(path: Path, packing: Packing, **changes: Tensor | None) -> Checkpoint:
    """Writes one module ``m``; a tensor that is None is left out."""
    tensors, _ = packing.draw(np.random.default_rng(0), ROWS, COLUMNS)
    kept = {f"m.{role}": tensor for role, tensor in (tensors | changes).items() if tensor is not None}
    write_tensors(path, kept)
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    edit_config(path, quantization_config=packing.config)
    return Checkpoint.open(str(path))


def refusal(checkpoint: Checkpoint) -> str:
    with pytest.raises(CheckpointError) as caught:
        _ = checkpoint.weights
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("name", PACKINGS)
def test_a_weight_is_one_entry(tmp_path: Path, name: str) -> None:
    packing = PACKINGS[name]
    bias = ("F32", np.zeros(ROWS, np.float32))
    weights = written(tmp_path, packing, bias=bias).weights
    assert list(weights) == ["m.weight", "m.bias"]
    entry = weights["m.weight"]
    assert entry.shape == (ROWS, COLUMNS)
    assert entry.packed is not None
    assert entry.nbytes == sum(part.nbytes for part in entry.stored)
    assert weights.unused == (("m.input_scale",) if packing.activations else ())
    dense = packing.kind == "fp8" or packing.order == "columns" or packing.group == 20
    assert (entry.kept_nbytes is None) == dense
    assert (weights["m.bias"].packed, weights["m.bias"].kept_nbytes) == (None, None)
    with pytest.raises(InternalError):
        weights.read("m.weight")


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown method": ({"quant_method": "hqq"}, "quantized with 'hqq' are not supported; what is read is fp8"),
    "none": ({"bits": 4}, "quantized with 'unknown' are not supported"),
    "a method that is no name": ({"quant_method": 4}, "'quant_method' is 4, which is not a string"),
    "awq without bits": ({"quant_method": "awq"}, "'bits' is None, which is not the number of bits"),
    "awq with 8 bits": ({"quant_method": "awq", "bits": 8}, "with 'awq' and 8 bits are not"),
    "awq for vectors": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "with 'awq' and version 'gemv' are not"),
    "awq for marlin": ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "version 'marlin' are not"),
    "awq of llm-awq": ({"quant_method": "awq", "w_bit": 4, "backend": "llm-awq"}, "backend 'llm-awq' are not"),
    "awq in groups of nothing": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 0},
        "'q_group_size' is 0, which is not a number of columns",
    ),
    "gptq with 2 bits": ({"quant_method": "gptq", "bits": 2}, "with 'gptq' and 2 bits are not"),
    "gptq with 3 bits": ({"quant_method": "gptq", "bits": 3}, "with 'gptq' and 3 bits are not"),
    "gptq for marlin": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        "with 'gptq' and format 'marlin' are not",
    ),
    "gptq for marlin, formerly": ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "format 'marlin' are"),
    "gptq in other words": ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "pack_dtype 'int16' are not"),
    "gptq with rules": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*lm_head.*": {}, "+:.*down.*": {"bits": 8}}},
        "other settings for some modules",
    ),
    "fp8 of another kind": ({"quant_method": "fp8", "fmt": "e5m2"}, "with 'fp8' and fmt 'e5m2' are not"),
    "fp8 in blocks of nothing": (
        {"quant_method": "fp8", "weight_block_size": [128]},
        "'weight_block_size' is .128., which is not rows and columns",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CONFIGS)
def test_configurations_that_are_refused(tmp_path: Path, what: str) -> None:
    config, sentence = CONFIGS[what]
    checkpoint = written(tmp_path, PACKINGS["gptq"])
    edit_config(tmp_path, quantization_config=config)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        _ = checkpoint.config
    assert "config.json (LlamaForCausalLM)" in caught.value.message
    assert caught.value.message == refusal(checkpoint)


GROUPS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "activations alone": ({}, {"weights": None}, "and weights that are not quantized .activations are. are not"),
    "no groups": ({"config_groups": {}}, {}, "and no config_groups are not"),
    "another format": ({"format": "nvfp4-pack-quantized"}, {}, "and format 'nvfp4-pack-quantized' are not"),
    "marlin": ({"format": "marlin-24"}, {}, "and format 'marlin-24' are not"),
    "a format of its own": ({}, {"format": "mxfp4-pack-quantized"}, "and format 'mxfp4-pack-quantized' are not"),
    "sparse weights": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "and sparsity 'sparse-24-bitmask'"),
    "rotations": ({"transform_config": {"config_groups": {}}}, {}, "and transforms are not"),
    "3 bits": ({}, {"num_bits": 3}, "and format 'pack-quantized' of int with 3 bits are not"),
    "floats": ({}, {"type": "float"}, "and format 'pack-quantized' of float with 4 bits are not"),
    "a strategy": ({}, {"strategy": "tensor_group"}, "and strategy 'tensor_group' are not"),
    "blocks": ({}, {"strategy": "block", "block_structure": [16, 16]}, "and blocks of integers are not"),
    "nonsense": ({"config_groups": {"a": 3}}, {}, "config_groups: 'a' is 3, which is not an object"),
}  # fmt: skip


@pytest.mark.parametrize("what", GROUPS)
def test_compressed_tensors_that_are_refused(tmp_path: Path, what: str) -> None:
    fields, of_group, sentence = GROUPS[what]
    checkpoint = written(tmp_path, PACKINGS["packed"])
    config = PACKINGS["packed"].config
    group = config["config_groups"]["group_0"]
    for name, value in of_group.items():
        (group if name in ("weights", "format") else group["weights"])[name] = value
    edit_config(tmp_path, quantization_config=config | fields)
    with pytest.raises(CheckpointError, match=sentence):
        _ = checkpoint.config
    assert "config.json" in refusal(checkpoint)


def test_groups_of_modules_that_differ_are_refused(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, PACKINGS["packed"])
    groups = PACKINGS["packed"].config["config_groups"] | {
        "group_1": PACKINGS["packed, 8 bits"].config["config_groups"]["group_0"]
    }
    edit_config(tmp_path, quantization_config=PACKINGS["packed"].config | {"config_groups": groups})
    assert "groups of weights that differ are not supported" in refusal(checkpoint)


def test_what_the_configuration_was_called_before(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, PACKINGS["packed"])
    edit_config(tmp_path, quantization_config=None, compression_config=PACKINGS["packed"].config)
    assert checkpoint.weights["m.weight"].dtype == "PACKED-4"


def test_rules_that_only_leave_modules_out(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, PACKINGS["gptq"])
    edit_config(tmp_path, quantization_config=PACKINGS["gptq"].config | {"dynamic": {"-:.*lm_head.*": {}}})
    assert checkpoint.weights["m.weight"].dtype == "GPTQ-4"


def half(*shape: int) -> Tensor:
    return "F16", np.ones(shape, np.float16)


def whole(*shape: int) -> Tensor:
    return "I32", np.zeros(shape, np.int32)


TENSORS: dict[str, tuple[str, dict[str, Tensor | None], str]] = {
    "no scales": ("awq", {"scales": None}, "lacks the tensor 'm.scales'"),
    "no zeros": ("gptq", {"qzeros": None}, "lacks the tensor 'm.qzeros'"),
    "no groups": ("gptq, act-order", {"g_idx": None}, "lacks the tensor 'm.g_idx'"),
    "no shape": ("packed", {"weight_shape": None}, "lacks the tensor 'm.weight_shape'"),
    "no packed zeros": ("packed, zeros", {"weight_zero_point": None}, "lacks the tensor 'm.weight_zero_point'"),
    "no packed groups": ("packed, act-order", {"weight_g_idx": None}, "lacks the tensor 'm.weight_g_idx'"),
    "no scale": ("fp8", {"weight_scale": None}, "lacks the tensor 'm.weight_scale'"),
    "numbers twice": ("awq", {"weight": half(64, 128)}, "both tensors 'm.qweight' and 'm.weight'"),
    "numbers of floats": ("awq", {"qweight": half(128, 8)}, "'m.qweight' is of type F16, not I32"),
    "numbers in a row": ("awq", {"qweight": whole(1024)}, r"'m.qweight' has the shape .1024., which is no matrix"),
    "no numbers": ("awq", {"qweight": whole(0, 8)}, r"'m.qweight' has the shape .0, 8., which is no matrix"),
    "truncated scales": (
        "awq",
        {"scales": half(3, 64)},
        r"'m.scales' has the shape .3, 64., and it should be .4, 64. beside 'm.qweight' of .128, 8.",
    ),
    "other groups": ("gptq", {"scales": half(1, 64)}, r"'m.scales' has the shape .1, 64., and it should be .4, 64."),
    "truncated zeros": ("gptq", {"qzeros": whole(4, 7)}, r"'m.qzeros' has the shape .4, 7., and it should be .4, 8."),
    "truncated groups": ("gptq", {"g_idx": whole(127)}, r"'m.g_idx' has the shape .127., and it should be .128."),
    "groups of floats": ("gptq", {"g_idx": half(128)}, "'m.g_idx' is of type F16, not I32 or I64"),
    "scales of integers": ("gptq", {"scales": whole(4, 64)}, "'m.scales' is of type I32, not F16 or BF16 or F32"),
    "scales the wrong way round": ("packed", {"weight_scale": half(4, 64)}, r"'m.weight_scale' has .*be .64, 4."),
    "zeros as scales": ("packed, zeros", {"weight_zero_point": whole(64, 4)}, r"'m.weight_zero_point' has .*be .8, 4."),
    "scales of other blocks": ("fp8, blocks", {"weight_scale_inv": half(4, 4)}, r"_inv' has .*should be .2, 4."),
    "blocks where there are none": ("fp8", {"weight_scale": half(2, 4)}, r"'m.weight_scale' has .*should be .. or .1."),
    "rows of others": ("fp8, compressed", {"weight_scale": half(63, 1)}, r"'m.weight_scale' has .*or .64, 1."),
    "zeros of words": ("int8, zeros", {"weight_zero_point": whole(64, 1)}, "'m.weight_zero_point' is of type I32,"),
}  # fmt: skip


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, what: str) -> None:
    name, changes, sentence = TENSORS[what]
    checkpoint = written(tmp_path, PACKINGS[name], **changes)
    with pytest.raises(CheckpointError, match=sentence):
        _ = checkpoint.weights
    refusal(checkpoint)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_numbers_that_nothing_explains_are_no_weights(tmp_path: Path, name: str) -> None:
    checkpoint = written(tmp_path, PACKINGS[name])
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"'m.weight' of type .* holds no weights"):
        checkpoint.weights.read_float32("m.weight")
