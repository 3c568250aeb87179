from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from tercet_shared.checkpoint import Checkpoint, to_float32, unpermute_rope_rows
from tercet_shared.errors import CheckpointError
from tests.fakes.checkpoints import tiny_weights, write_tiny_llama, write_tiny_llama_gguf

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": 384}
Q4_1 = gguf.GGMLQuantizationType.Q4_1


def expected(**changes: Any) -> dict[str, Any]:
    return tiny_weights(**{**SIZES, "intermediate": 128, "tied": True, "biases": False, "seed": 0, **changes})


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0), ("float16", 2**-11), ("bfloat16", 2**-8)])
def test_safetensors(tmp_path: Path, shards: int, dtype: str, tolerance: float) -> None:
    weights = Checkpoint.open(str(write_tiny_llama(tmp_path / "m", shards=shards, dtype=dtype, tied=False))).weights
    want = expected(tied=False)
    assert set(weights) == set(want)
    assert len({entry.file for entry in weights.entries.values()}) == shards
    assert weights.total_elements == sum(array.size for array in want.values())
    assert weights.total_bytes == weights.total_elements * (4 if dtype == "float32" else 2)
    for name, array in want.items():
        got = weights.read_float32(name)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, array, rtol=tolerance, atol=1e-7 if tolerance else 0)


def test_bfloat16_comes_as_bits(tmp_path: Path) -> None:
    weights = Checkpoint.open(str(write_tiny_llama(tmp_path / "m", dtype="bfloat16"))).weights
    name = "model.norm.weight"
    assert weights[name].dtype == "BF16"
    bits = weights.read(name)
    assert (bits.dtype, bits.shape) == (np.dtype(np.uint16), (64,))
    assert np.array_equal(bits, weights.read_float32(name).view(np.uint32) >> 16)


def test_arrays_are_mapped_and_read_only(tmp_path: Path) -> None:
    weights = Checkpoint.open(str(write_tiny_llama(tmp_path / "m"))).weights
    array = weights.read("model.embed_tokens.weight")
    assert isinstance(array, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1


@pytest.mark.parametrize("biases", [False, True])
def test_gguf_rows_come_back_in_order(tmp_path: Path, biases: bool) -> None:
    weights = Checkpoint.open(str(write_tiny_llama_gguf(tmp_path / "a.gguf", biases=biases, tied=False))).weights
    want = expected(biases=biases, tied=False)
    assert set(weights) == set(want)
    permuted = {name for name in weights if weights[name].rope_permuted}
    assert permuted == {name for name in want if "q_proj" in name or "k_proj" in name}
    for name, array in want.items():
        got = weights.read_float32(name)
        if weights[name].rope_permuted:
            assert not np.array_equal(got, array)
            got = unpermute_rope_rows(got, 4 if "q_proj" in name else 2)
        assert np.array_equal(got, array), name


def test_quantized_rows_can_be_reordered_as_bytes(tmp_path: Path) -> None:
    weights = Checkpoint.open(str(write_tiny_llama_gguf(tmp_path / "a.gguf", quantization=Q4_1))).weights
    name = "model.layers.1.self_attn.q_proj.weight"
    entry, stored = weights[name], weights.read(name)
    assert (entry.dtype, entry.quantized, entry.shape) == ("Q4_1", True, (64, 64))
    assert (stored.dtype, stored.shape) == (np.dtype(np.uint8), (64, 40))
    as_bytes = to_float32(unpermute_rope_rows(stored, 4), entry)
    assert np.array_equal(as_bytes, unpermute_rope_rows(weights.read_float32(name), 4))
    np.testing.assert_allclose(as_bytes, expected()[name], atol=0.1)


def test_smollm2(smollm2: Checkpoint) -> None:
    weights = smollm2.weights
    kinds = [entry.dtype for entry in weights.entries.values()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert weights["model.embed_tokens.weight"].shape == (49152, 576)
    assert "lm_head.weight" not in weights
    assert weights.total_elements == 134_515_008
    norm = weights.read_float32("model.norm.weight")
    assert norm.shape == (576,)
    assert np.isfinite(norm).all()


def test_gguf_agrees_with_the_package_reader(tmp_path: Path) -> None:
    path = write_tiny_llama_gguf(tmp_path / "a.gguf", quantization=Q4_1, tied=False)
    weights = Checkpoint.open(str(path)).weights
    by_stored_name = {entry.stored_name: entry for entry in weights.entries.values()}
    reference = gguf.GGUFReader(path)
    assert set(by_stored_name) == {tensor.name for tensor in reference.tensors}
    for tensor in reference.tensors:
        entry = by_stored_name[tensor.name]
        assert (entry.offset, entry.nbytes, entry.dtype) == (
            tensor.data_offset,
            tensor.n_bytes,
            tensor.tensor_type.name,
        )
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert np.array_equal(weights.read(entry.name), tensor.data)


def test_missing_tensor(smollm2: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'lm_head\.weight'"):
        smollm2.weights.read("lm_head.weight")


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
def test_truncated_safetensors(tmp_path: Path, kept: int) -> None:
    model = write_tiny_llama(tmp_path / "m")
    file = model / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        _ = Checkpoint.open(str(model)).weights


def test_sharded_checkpoint_is_checked_against_its_index(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m", shards=2)
    index = model / "model.safetensors.index.json"
    stated = json.loads(index.read_text())

    def refuse(weight_map: object, sentence: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=sentence):
            _ = Checkpoint.open(str(model)).weights

    refuse({}, "'weight_map' is missing or empty")
    refuse(
        {**stated["weight_map"], "extra.weight": "model-00001-of-00002.safetensors"}, r"lacks tensor 'extra\.weight'"
    )
    refuse({"a": "../model-00001-of-00002.safetensors"}, "is not the name of a safetensors file")
    refuse({"a": "pytorch_model-00001.bin"}, "is not the name of a safetensors file")
    refuse({"a": 7}, "is not the name of a safetensors file")
    index.unlink()
    with pytest.raises(CheckpointError, match="2 safetensors files but no model"):
        _ = Checkpoint.open(str(model)).weights


def header_of(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (struct.pack("<Q", 1 << 60) + b"{}", "is not a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "holds a JSON list"),
        (header_of({"a": 1}), "is not an object"),
        (
            header_of({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}),
            "has dtype 'F99', which is not read",
        ),
        (header_of({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}), "no valid shape or offsets"),
        (header_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "of 8 bytes has 4"),
        (header_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"), "does not follow"),
    ],
)
def test_damaged_safetensors(content: bytes, sentence: str, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m")
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=sentence):
        _ = Checkpoint.open(str(model)).weights
