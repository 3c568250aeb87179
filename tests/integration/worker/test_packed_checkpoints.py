"""Models whose weights are quantized in safetensors: what they compute is what their dense twins do."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tercet_shared.checkpoint import Checkpoint
from tercet_shared.errors import CheckpointError
from tercet_tools.doctor.model import Model, read_model
from tercet_tools.doctor.processor import read_processor
from tercet_worker.attention.select import load_kernels_or_warn
from tercet_worker.layers.parameters import Placement
from tercet_worker.loading import load_model
from tercet_worker.loading import weights as loading
from tercet_worker.parallel.topology import Topology
from tercet_worker.program.weights import PackedWeights
from tests.fakes.packed_checkpoints import (
    PACKINGS,
    Written,
    edit_config,
    read_tensors,
    write_packed_llama,
    write_tensors,
)
from tests.integration.worker.driver import Driver, engine_for
from tests.integration.worker.logits import prompt_logits

V = 384
PROMPT = np.random.default_rng(3).integers(3, V, 120).tolist()
FLAGS = ("--num-kv-blocks=40", "--max-num-seqs=6", "--max-model-len=256", "--max-num-batched-tokens=128")
FLOAT32, BFLOAT16 = ("--dtype=float32", *FLAGS), ("--dtype=bfloat16", *FLAGS)
SHAPE = {"hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 192, "tied": False}
KEPT = ("awq", "gptq", "gptq, zeros", "gptq, 8 bits", "gptq, 8 bits, zeros", "packed, zeros", "int8")
DENSE = ("gptq, act-order", "fp8", "fp8, blocks")


@pytest.fixture
def written(tmp_path: Path, request: pytest.FixtureRequest) -> Written:
    return write_packed_llama(tmp_path, PACKINGS[request.param], **SHAPE)


def greedy(model: Path, *flags: str) -> list[int]:
    driver = Driver(engine_for(model, *flags).runner)
    request = driver.start(0, PROMPT[:20])
    driver.run(budget=64, outputs=24)
    return request.output


@pytest.mark.parametrize("written", PACKINGS, indirect=True)
def test_in_float32_it_is_the_dense_model(written: Written) -> None:
    packed, dense = (prompt_logits(engine_for(path, *FLOAT32), PROMPT) for path in (written.packed, written.dense))
    torch.testing.assert_close(packed, dense, atol=0, rtol=0)
    assert greedy(written.packed, *FLOAT32) == greedy(written.dense, *FLOAT32)


@pytest.mark.parametrize("written", KEPT, indirect=True)
def test_what_stays_quantized_is_nearer_than_rounded_weights(written: Written) -> None:
    exact = prompt_logits(engine_for(written.dense, *FLOAT32), PROMPT)
    kept = engine_for(written.packed, *BFLOAT16)
    dense = engine_for(written.packed, *BFLOAT16, "--quantization=none", "--no-compact-weights")
    assert kept.weight_bytes < 0.9 * dense.weight_bytes
    errors = [float((prompt_logits(engine, PROMPT) - exact).square().mean().sqrt()) for engine in (kept, dense)]
    assert errors[0] < 1.1 * errors[1]
    assert errors[1] < 0.1 * float(exact.square().mean().sqrt())


@pytest.mark.parametrize("written", DENSE, indirect=True)
def test_what_cannot_stay_quantized_is_rounded_as_dense_weights_are(written: Written) -> None:
    packed, dense = (engine_for(path, *BFLOAT16) for path in (written.packed, written.dense))
    assert packed.weight_bytes == dense.weight_bytes
    torch.testing.assert_close(prompt_logits(packed, PROMPT), prompt_logits(dense, PROMPT), atol=0, rtol=0)


@pytest.mark.parametrize("written", ["awq", "gptq, act-order", "fp8, compressed", "packed, 8 bits"], indirect=True)
def test_without_the_kernels_layout_all_is_dense(written: Written) -> None:
    # As on a GPU.
    place = Placement(torch.bfloat16, torch.device("cpu"))
    load = partial(load_model, place=place, available=1 << 40, progress=lambda _fraction: None)
    packed, dense = (load(Checkpoint.open(str(path))) for path in (written.packed, written.dense))
    for layer, twin in zip(packed._layers, dense._layers, strict=True):  # type: ignore[attr-defined]
        for name in ("_qkv", "_output", "_gate_up", "_down"):
            assert torch.equal(getattr(layer, name).matrix.weight, getattr(twin, name).matrix.weight)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cut_within_a_block_makes_a_matrix_dense(tmp_path: Path, rank: int) -> None:
    # Three of six heads of 16 are 48 columns of the output projection, one and a half blocks.
    written = write_packed_llama(tmp_path, PACKINGS["awq"], **SHAPE | {"hidden": 96, "heads": 6})
    library = load_kernels_or_warn()
    assert library is not None
    matrices = []
    for path in (written.packed, written.dense):
        place = Placement(torch.bfloat16, torch.device("cpu"), PackedWeights(library, torch.bfloat16))
        model = load_model(
            Checkpoint.open(str(path)),
            place,
            available=1 << 40,
            progress=lambda _fraction: None,
            topology=Topology(tensor=2, rank=rank),
        )
        layer = model._layers[0]  # type: ignore[attr-defined]
        matrices.append((layer._output.matrix, layer._qkv.matrix, layer._down.matrix))
    packed, dense = matrices
    assert [matrix.format.name for matrix in packed] == ["DENSE", "FOUR_WIDE", "FOUR_WIDE"]
    assert packed[0].in_features == 48
    assert torch.equal(packed[0].memory, dense[0].memory)


@pytest.mark.parametrize("written", ["awq", "gptq, act-order", "packed, zeros", "fp8, blocks"], indirect=True)
def test_tensors_are_stored_in_pieces(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [prompt_logits(engine_for(written.packed, *flags), PROMPT) for flags in (FLOAT32, BFLOAT16)]
    monkeypatch.setattr(loading, "_PIECE", 900)  # neither a divisor nor a multiple of any tensor
    pieces = [prompt_logits(engine_for(written.packed, *flags), PROMPT) for flags in (FLOAT32, BFLOAT16)]
    assert all(torch.equal(one, other) for one, other in zip(whole, pieces, strict=True))


def test_some_projections_may_be_dense_and_embeddings_tied(tmp_path: Path) -> None:
    skip = ("self_attn.k_proj", "mlp.down_proj")
    written = write_packed_llama(tmp_path, PACKINGS["awq"], skip=skip, **SHAPE | {"tied": True})
    packed, exact = (prompt_logits(engine_for(path, *FLOAT32), PROMPT) for path in (written.packed, written.dense))
    torch.testing.assert_close(packed, exact, atol=0, rtol=0)
    rounded = prompt_logits(engine_for(written.packed, *BFLOAT16), PROMPT)
    assert float((rounded - exact).square().mean().sqrt()) < 0.1 * float(exact.square().mean().sqrt())


def test_a_packed_head(tmp_path: Path) -> None:
    written = write_packed_llama(tmp_path, PACKINGS["gptq"], **SHAPE)
    tensors, weight = PACKINGS["gptq"].draw(np.random.default_rng(9), V, 128)
    written.rewrite(lm_head__weight=None, **{f"lm_head__{role}": tensor for role, tensor in tensors.items()})
    dense = read_tensors(written.dense) | {"lm_head.weight": ("F32", weight.astype(np.float32))}
    write_tensors(written.dense, dense)
    logits = (prompt_logits(engine_for(path, *FLOAT32), PROMPT) for path in (written.packed, written.dense))
    torch.testing.assert_close(*logits, atol=0, rtol=0)


def test_biases(tmp_path: Path) -> None:
    written = write_packed_llama(tmp_path, PACKINGS["gptq"], biases=True, **SHAPE)
    packed, dense = (prompt_logits(engine_for(path, *FLOAT32), PROMPT) for path in (written.packed, written.dense))
    torch.testing.assert_close(packed, dense, atol=0, rtol=0)


def test_biases_that_the_model_has_no_place_for_must_be_zeros(tmp_path: Path) -> None:
    written = write_packed_llama(tmp_path, PACKINGS["gptq"], **SHAPE)
    name = "model__layers__1__mlp__up_proj__bias"
    written.rewrite(**{name: ("F16", np.zeros(192, np.float16))})
    assert engine_for(written.packed, *FLOAT32).offer.vocab_size == V
    written.rewrite(**{name: ("F16", np.full(192, 0.5, np.float16))})
    with pytest.raises(CheckpointError, match=r"'model.layers.1.mlp.up_proj.bias' that the architecture has no"):
        engine_for(written.packed, *FLOAT32)


def test_dense_ones_become_eight_bits_where_that_is_asked_for(tmp_path: Path) -> None:
    sizes = []
    for name in ("fp8", "gptq, act-order", "awq"):
        written = write_packed_llama(tmp_path / name, PACKINGS[name], **SHAPE)
        engines = [engine_for(written.packed, *BFLOAT16, f"--quantization={how}") for how in ("auto", "int8")]
        sizes.append([engine.weight_bytes for engine in engines])
        exact = prompt_logits(engine_for(written.dense, *FLOAT32), PROMPT)
        error = prompt_logits(engines[1], PROMPT) - exact
        assert float(error.square().mean().sqrt()) < 0.12 * float(exact.square().mean().sqrt())
    for auto, eight in sizes:
        assert eight < auto
    assert sizes[0] == sizes[1]
    assert sizes[2][1] < sizes[0][1]


@pytest.mark.parametrize("written", PACKINGS, indirect=True)
def test_the_doctor_knows_what_it_takes(written: Written) -> None:
    read = partial(
        read_model,
        revision=None,
        dtype="bfloat16",
        quantization="auto",
        fast_bfloat16=True,
        compact_bfloat16=read_processor(Path("/")).compact_bfloat16,
    )
    model: Model = read(str(written.packed))
    held = engine_for(written.packed, *BFLOAT16).weight_bytes
    assert model.parameters == read(str(written.dense)).parameters
    assert model.weights.nbytes == pytest.approx(held, rel=0.02)
    dense = engine_for(written.packed, *BFLOAT16, "--quantization=none").weight_bytes
    assert model.forms["bfloat16"].nbytes == pytest.approx(dense, rel=0.02)
    assert sum(model.stored.values()) < model.forms["float32"].nbytes


@pytest.mark.parametrize("written", ["fp8"], indirect=True)
def test_what_is_not_used_is_said(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        engine_for(written.packed, *FLOAT32)
    assert "neither activations nor the KV cache are scaled by the checkpoint's 14 scales" in caplog.text


def test_other_scales_are_another_model(tmp_path: Path) -> None:
    written = write_packed_llama(tmp_path, PACKINGS["gptq"], **SHAPE)
    first = Checkpoint.open(str(written.packed)).fingerprint
    name = "model.layers.0.mlp.up_proj.scales"
    kind, scales = written.tensors[name]
    written.rewrite(**{name.replace(".", "__"): (kind, scales * np.float16(2))})
    assert Checkpoint.open(str(written.packed)).fingerprint != first


def test_what_is_not_read_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    written = write_packed_llama(tmp_path, PACKINGS["gptq"], **SHAPE)
    edit_config(written.packed, quantization_config=PACKINGS["gptq"].config | {"bits": 3})
    with pytest.raises(CheckpointError, match="weights quantized with 'gptq' and 3 bits are not supported; what is"):
        engine_for(written.packed, *FLOAT32)
