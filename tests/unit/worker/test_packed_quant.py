"""Weights that several tensors stand for: what is read of each format is what its definition says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tercet_shared.checkpoint import Checkpoint, TensorEntry
from tercet_shared.errors import CheckpointError
from tercet_worker.kernels.library import KernelLibrary
from tercet_worker.kernels.step_abi import Epilogue
from tercet_worker.program.weights import PackedWeights
from tercet_worker.quantization import WeightFormat, open_packed
from tests.fakes.packed_checkpoints import PACKINGS, Packing, Tensor, write_tensors
from tests.unit.worker.test_quantized import activations, multiply

FORMATS = {
    "awq": "FOUR_WIDE",
    "awq, groups of 64": "FOUR_WIDE",
    "awq, one group": "FOUR_WIDE",
    "gptq": "FOUR",
    "gptq, zeros": "FOUR_WIDE",
    "gptq, v2": "FOUR_WIDE",
    "gptq, blocks out of order": "FOUR_WIDE",
    "gptq, one group": "FOUR",
    "gptq, 8 bits": "EIGHT",
    "gptq, 8 bits, zeros": "EIGHT_WIDE",
    "gptq, float32 scales": "FOUR_WIDE",
    "packed": "FOUR",
    "packed, zeros": "FOUR_WIDE",
    "packed, channels": "FOUR",
    "packed, 8 bits": "EIGHT",
    "int8": "EIGHT",
    "int8, zeros": "EIGHT_WIDE",
    "int8, one scale": "EIGHT_WIDE",
}
"""What a weight is kept in; all others become dense."""
SHAPES = ((64, 128), (24, 64), (200, 320))


def stored(path: Path, packing: Packing, tensors: dict[str, Tensor]) -> TensorEntry:
    """Writes a checkpoint of one module and returns its weight."""
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": packing.config}
    (path / "config.json").write_text(json.dumps(config))
    write_tensors(path, {f"m.{role}": tensor for role, tensor in tensors.items()})
    return Checkpoint.open(str(path)).weights["m.weight"]


def drawn(path: Path, name: str, rows: int, columns: int, seed: int = 0) -> tuple[TensorEntry, np.ndarray]:
    tensors, weight = PACKINGS[name].draw(np.random.default_rng(seed), rows, columns)
    return stored(path, PACKINGS[name], tensors), weight


def columns_of(name: str, columns: int) -> int:
    return columns if PACKINGS[name].group != 20 else columns // 5 * 5 // 8 * 8


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PACKINGS)
def test_weights_are_those_of_the_definition(tmp_path: Path, name: str, shape: tuple[int, int]) -> None:
    entry, weight = drawn(tmp_path, name, *shape, seed=sum(shape))
    assert entry.shape == shape
    packed = open_packed(entry)
    assert packed.format.name == FORMATS.get(name, "DENSE")
    rows, columns = shape
    rng = np.random.default_rng(1)
    parts = [(0, rows, 0, columns)]
    parts += [
        (*sorted(rng.choice(rows + 1, 2, replace=False)), *sorted(rng.choice(columns + 1, 2, replace=False)))
        for _ in range(4)
    ]
    for top, bottom, left, right in parts:
        part = packed.dense(slice(top, bottom), slice(left, right))
        assert part.dtype == np.float32
        np.testing.assert_array_equal(part, weight[top:bottom, left:right].astype(np.float32))
    if packed.format is WeightFormat.DENSE:
        return
    size = packed.format.block
    for top, bottom, left, right in parts:
        left, right = left // size * size, -(-right // size) * size  # noqa: PLW2901  # between blocks
        blocks = packed.blocks(slice(top, bottom), slice(left, right))
        assert blocks.format is packed.format
        if PACKINGS[name].scale == "F32":
            # Scale times zero is rounded to float32.
            largest = np.abs(weight).max()
            np.testing.assert_allclose(blocks.dense(), weight[top:bottom, left:right], rtol=0, atol=largest * 2.0**-22)
        else:
            np.testing.assert_array_equal(blocks.dense(), weight[top:bottom, left:right].astype(np.float32))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_zero_of_both_versions(tmp_path: Path, bits: int, version: int) -> None:
    packing = Packing("gptq", bits=bits, version=version, group=32)
    rows, columns = 1 << bits, 64
    rng = np.random.default_rng(2)
    q, zeros = rng.integers(0, rows, (rows, columns)), np.stack([np.arange(rows), np.arange(rows)[::-1]], axis=1)
    scales, groups = np.full((rows, 2), 0.25), np.arange(columns) // 32
    entry = stored(tmp_path, packing, packing._tensors(q, zeros, scales, groups))
    everything = slice(0, rows), slice(0, columns)
    np.testing.assert_array_equal(open_packed(entry).dense(*everything), 0.25 * (q - zeros[:, groups]))


@pytest.mark.parametrize("zeros", [None, "I8"])
def test_a_zero_that_is_not_packed(tmp_path: Path, zeros: str | None) -> None:
    packing = Packing("packed", symmetric=zeros is None)
    tensors, _ = Packing("packed", symmetric=True).draw(np.random.default_rng(0), 16, 64)
    if zeros is not None:
        tensors["weight_zero_point"] = ("I8", np.full((16, 2), 3, np.int8))
    entry = stored(tmp_path, packing, tensors)
    q = np.stack([tensors["weight_packed"][1] >> 4 * i & 15 for i in range(8)], axis=-1).reshape(16, 64).astype(int)
    scales = np.repeat(tensors["weight_scale"][1].astype(float), 32, axis=1)
    expected = (q - (8 if zeros is None else 11)) * scales
    np.testing.assert_array_equal(open_packed(entry).dense(slice(0, 16), slice(0, 64)), expected)


def test_every_float_of_eight_bits(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    scale = ("F32", np.array([0.5], np.float32))
    entry = stored(tmp_path, PACKINGS["fp8"], {"weight": ("F8_E4M3", codes), "weight_scale": scale})
    weight = open_packed(entry).dense(slice(0, 2), slice(0, 128))
    assert np.flatnonzero(np.isnan(weight)).tolist() == [127, 255]
    assert weight[0, 126] == 224.0  # half of the largest
    assert weight[0, 1] == 2.0**-10  # and of the smallest


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "gptq, groups of 20"])
def test_products_match_float64(library: KernelLibrary, tmp_path: Path, name: str) -> None:
    matrix = PackedWeights(library, torch.bfloat16)(256, (65, 40), bias=False, gated=False)
    packed, exact = [], []
    for part, rows in enumerate((72, 40)):
        (tmp_path / str(part)).mkdir()
        entry, weight = drawn(tmp_path / str(part), name, rows, 256, seed=part)
        packed.append(open_packed(entry))
        exact.append(weight[: (65, 40)[part]])
    for part, rows in enumerate(packed):
        quantized = matrix.weight_destination(part).quantized
        assert quantized is not None
        quantized.announce(rows.format)
    assert matrix.format is packed[0].format
    for part, rows in enumerate(packed):
        quantized = matrix.weight_destination(part).quantized
        assert quantized is not None
        assert quantized.takes_blocks()
        for start in range(0, len(exact[part]), 13):
            down = slice(start, min(start + 13, len(exact[part])))
            quantized.store(start, rows.blocks(down, slice(0, 256)))
    x, weight = activations(5, 256), torch.from_numpy(np.concatenate(exact))
    y = multiply(library, library.best_isa, matrix, x, Epilogue.STORE_FLOAT).double()
    # The bound of other formats, with the integers' scale in place of theirs.
    size = x.double().abs() @ weight.abs().T + 16 * x.double().abs().sum(dim=1, keepdim=True) * weight.abs().max()
    assert bool(((y - x.double() @ weight.T).abs() <= 1e-6 * size + 1e-6).all())


DAMAGE = {
    "scales that are not finite": ("gptq", "scales", "holds scales that are not finite"),
    "a group that is none": ("gptq, act-order", "g_idx", "names groups that are not among 4"),
    "a negative group": ("gptq, act-order", "g_idx", "names groups that are not among 4"),
    "another shape": (
        "packed",
        "weight_shape",
        r"'m.weight_shape' says .64, 127., and 'm.weight_packed' holds .64, 128.",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_contents_that_cannot_be(tmp_path: Path, what: str) -> None:
    name, role, sentence = DAMAGE[what]
    tensors, _ = PACKINGS[name].draw(np.random.default_rng(0), 64, 128)
    kind, values = tensors[role]
    values = values.copy()
    values.flat[-1] = {"scales": np.inf, "g_idx": -1 if "negative" in what else 4, "weight_shape": 127}[role]
    entry = stored(tmp_path, PACKINGS[name], tensors | {role: (kind, values)})
    with pytest.raises(CheckpointError, match=sentence) as caught:
        open_packed(entry)
    assert f"m.{role}" in caught.value.message
