"""Weights of eight bits: the product against float64, what torch asks for on a GPU, and how checkpoints fill them."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tercet_shared.checkpoint import Checkpoint
from tercet_shared.config import WorkerSettings, parse
from tercet_shared.errors import CheckpointError, ConfigurationError, InternalError
from tercet_worker.layers.fp8 import E4M3, Fp8Choice, Fp8Matrix, Fp8Weights, multiply, quantize
from tercet_worker.layers.matrix import DenseMatrix
from tercet_worker.layers.parameters import Placement
from tercet_worker.loading import load_model
from tercet_worker.models import CausalLM
from tercet_worker.parallel.topology import SINGLE, Topology
from tercet_worker.platforms.cpu import CpuPlatform
from tests.fakes.packed_checkpoints import PACKINGS, write_packed_llama

CPU, META = torch.device("cpu"), torch.device("meta")
SHAPE: dict[str, Any] = {"hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 192, "tied": False, "biases": True}
NAMES = ("_qkv", "_output", "_gate_up", "_down")
UNIT = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""By how much of the largest result one may be rounded: to the dtype, and once more with a bias."""


def matrix(
    parts: tuple[int, ...], columns: int, dtype: torch.dtype, *, row_scaled: bool, bias: bool = False
) -> Fp8Matrix:
    choice = Fp8Choice(every=True, row_scaled=row_scaled)
    return Fp8Matrix(columns, parts, bias=bias, dtype=dtype, device=CPU, choice=choice)


def product(x: torch.Tensor, held: Fp8Weights) -> torch.Tensor:
    return multiply(x, held.weight, held.scales, held.one, held.bias, outputs=held.outputs, row_scaled=held.row_scaled)


def eight(made: Fp8Matrix) -> Fp8Weights:
    assert isinstance(made.held, Fp8Weights)
    return made.held


@pytest.mark.parametrize("row_scaled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(12))
def test_the_product_is_that_of_float64(seed: int, dtype: torch.dtype, row_scaled: bool) -> None:
    rng = np.random.default_rng(seed)
    tokens, columns = (int(rng.integers(1, most)) for most in (40, 300))
    parts = tuple(int(rows) for rows in rng.integers(1, 70, rng.integers(1, 4)))
    generator = torch.Generator().manual_seed(seed)
    made = matrix(parts, columns, dtype, row_scaled=row_scaled, bias=seed % 2 == 0)
    blocks, biases = [], []
    for part, rows in enumerate(parts):
        # Parts, and rows, of very different sizes: each row has a scale of its own.
        sizes = 10.0 ** torch.randint(-3, 3, (rows, 1), generator=generator) * 100.0**part
        blocks.append((torch.randn((rows, columns), generator=generator) * sizes).to(dtype))
        middle = rows // 2
        made.weight_destination(part).store(0, blocks[-1][:middle])
        made.weight_destination(part).store(middle, blocks[-1][middle:])
        destination = made.bias_destination(part)
        biases.append(torch.randn(rows, generator=generator).to(dtype) * (destination is not None))
        if destination is not None:
            destination.store(0, biases[-1])
    held, weight, bias = eight(made), torch.cat(blocks).double(), torch.cat(biases).double()
    assert all(extent % 16 == 0 for extent in held.weight.shape)
    x = (torch.randn((tokens, columns), generator=generator) * 10.0 ** torch.randint(-3, 3, (tokens, 1))).to(dtype)
    found = product(x, held).double()
    assert found.shape == (tokens, sum(parts))
    q, scales = quantize(x)
    kept = (held.weight.double() * held.scales.double().t())[: sum(parts), :columns]
    inputs = q.double() * scales.double()
    expected = inputs @ kept.t() + bias
    # What is added up, however much of it cancels.
    size = inputs.abs() @ kept.abs().t() + bias.abs()
    assert ((found - expected).abs() <= UNIT[dtype] * size).all()
    # Four bits of precision on both sides: each factor errs by a sixteenth of itself, or half the smallest number.
    for exact, near, scale in ((weight, kept, held.scales[0, : sum(parts), None]), (x.double(), inputs, scales)):
        assert ((near - exact).abs() <= exact.abs() / 16 + scale.double() * 2**-10).all()


def test_what_is_not_finite_is_seen_and_stays_in_its_row() -> None:
    rows = torch.randn((5, 32), generator=torch.Generator().manual_seed(1))
    rows[1] = 0
    rows[2, 3], rows[3, 7] = torch.inf, torch.nan
    rows[4] *= 1e-36
    made = matrix((16,), 32, torch.float32, row_scaled=True)
    made.weight_destination(0).store(0, torch.eye(16, 32))
    found = product(rows, eight(made))
    assert torch.equal(found.isfinite().all(dim=1), torch.tensor([True, True, False, False, True]))
    assert not found[1].any()
    q, scales = quantize(rows[:1])
    assert q.float().abs().max() == 448
    assert scales.item() == pytest.approx(rows[0].abs().max().item() / 448)


class OnGpuInName(TorchDispatchMode):
    """Makes each product once more with tensors without values that are on a GPU in name: torch then asks for what it
    asks for there, in sizes, layouts and types.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_mm.default:
            x, weight, *scales = args[:4]
            with FakeTensorMode():
                there = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in (*scales,)]
                for columns, refusal in ((x.shape[1], nullcontext()), (8, pytest.raises(RuntimeError, match="by 16"))):
                    left = torch.empty_strided((len(x), columns), x.stride(), dtype=x.dtype, device="cuda")
                    right = torch.empty_strided(
                        (columns, weight.shape[1]), weight.stride(), dtype=weight.dtype, device="cuda"
                    )
                    with refusal:
                        self.shapes.append(tuple(func(left, right, *there, *args[4:], **kwargs or {}).shape))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("row_scaled", [True, False])
@pytest.mark.parametrize("tokens", [1, 3])
def test_torch_takes_the_call_on_a_gpu(tokens: int, row_scaled: bool) -> None:
    held = eight(matrix((33, 9), 70, torch.bfloat16, row_scaled=row_scaled))
    with OnGpuInName() as mode:
        assert product(torch.zeros((tokens, 70), dtype=torch.bfloat16), held).shape == (tokens, 42)
    assert mode.shapes == [(tokens, 48)]


@pytest.mark.parametrize("row_scaled", [True, False])
def test_the_product_needs_no_value_of_the_device(row_scaled: bool) -> None:
    held = Fp8Weights(70, (42,), bias=True, dtype=torch.bfloat16, device=META, row_scaled=row_scaled)
    assert product(torch.zeros((3, 70), dtype=torch.bfloat16, device=META), held).shape == (3, 42)


def load(path: Path, choice: Fp8Choice | None, topology: Topology = SINGLE, *, available: int = 1 << 40) -> CausalLM:
    place = Placement(torch.bfloat16, CPU, fp8=choice)
    return load_model(
        Checkpoint.open(str(path)), place, available=available, progress=lambda _fraction: None, topology=topology
    )


def held_of(model: CausalLM) -> list[DenseMatrix | Fp8Weights]:
    found = []
    for layer in model._layers:  # type: ignore[attr-defined]  # of the only architecture
        for name in NAMES:
            matrix = getattr(layer, name).matrix
            found.append(matrix.held if isinstance(matrix, Fp8Matrix) else matrix)
    return found


def weight_of(held: DenseMatrix | Fp8Weights) -> torch.Tensor:
    if isinstance(held, DenseMatrix):
        return held.weight.float()
    return held.weight.float() * held.scales.t()


KEPT, EVERY = Fp8Choice(every=False, row_scaled=True), Fp8Choice(every=True, row_scaled=True)


@pytest.mark.parametrize("kind", ["fp8", "fp8, inverse", "fp8, compressed", "fp8, compressed, one scale"])
@pytest.mark.parametrize("choice", [KEPT, EVERY])
def test_weights_of_a_checkpoint_are_kept_as_they_are(tmp_path: Path, kind: str, choice: Fp8Choice) -> None:
    written = write_packed_llama(tmp_path, PACKINGS[kind], **SHAPE)
    kept = load(written.packed, choice)
    exact = load_model(
        Checkpoint.open(str(written.dense)), Placement(torch.float32, CPU), available=1 << 40, progress=lambda _: None
    )
    for found, expected in zip(held_of(kept), held_of(exact), strict=True):
        assert isinstance(found, Fp8Weights)
        assert torch.equal(weight_of(found), weight_of(expected))
        assert found.bias is None or torch.equal(found.bias.float(), expected.bias.to(torch.bfloat16).float())  # type: ignore[union-attr]  # both have one
    # Ranks have the same numbers, cut.
    inner = [weight_of(held_of(load(written.packed, choice, Topology(2, 1, rank)))[3]) for rank in (0, 1)]
    assert torch.equal(torch.cat(inner, dim=1), weight_of(held_of(exact)[3]))
    merged = [weight_of(held_of(load(written.packed, choice, Topology(2, 1, rank)))[2]) for rank in (0, 1)]
    halves = [half.chunk(2)[part] for part in (0, 1) for half in merged]
    assert torch.equal(torch.cat(halves), weight_of(held_of(exact)[2]))


def test_what_cannot_be_kept_is_dense_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tercet_worker.loading.weights")
    blocks = write_packed_llama(tmp_path / "blocks", PACKINGS["fp8, blocks"], **SHAPE)
    mixed = write_packed_llama(tmp_path / "mixed", PACKINGS["fp8"], skip=("self_attn.k_proj",), **SHAPE)
    single = write_packed_llama(tmp_path / "single", PACKINGS["fp8"], **SHAPE)
    for path, choice, dense in (
        (blocks.packed, KEPT, 14),  # scales of blocks
        (mixed.packed, KEPT, 4),  # of a merged matrix one part is dense
        (single.packed, None, 14),
        (single.packed, KEPT, 0),
        (blocks.packed, EVERY, 0),
        (single.dense, EVERY, 0),
    ):
        caplog.clear()
        assert all(isinstance(held, Fp8Weights) for held in held_of(load(path, choice))) == (dense == 0)
        said = [f"{dense} FP8 weights of the checkpoint are made dense"] if dense else []
        assert [text for text in caplog.messages if "FP8" in text] == said
    qkv, output, *_ = held_of(load(mixed.packed, KEPT))
    assert isinstance(qkv, DenseMatrix)
    assert isinstance(output, Fp8Weights)


def test_memory_is_one_byte_for_each_weight(tmp_path: Path) -> None:
    written = write_packed_llama(tmp_path, PACKINGS["fp8"], **SHAPE)
    sizes = []
    for choice in (None, KEPT, EVERY):
        model = load(written.packed, choice)
        sizes.append(sum(destination.nbytes for destination in model.destinations().values()))
        with pytest.raises(CheckpointError, match=r"needs 0\.3 GiB"):
            load(written.packed, choice, available=(256 << 20) + sizes[-1] - 1)
        load(written.packed, choice, available=(256 << 20) + sizes[-1])
    held = [weights.weight for weights in held_of(load(written.packed, KEPT))]
    rows = sum(len(weight) for weight in held)
    assert sizes[0] - sizes[1] == sum(weight.numel() for weight in held) - 4 * rows
    assert sizes[1] == sizes[2]


def test_what_it_will_hold_is_not_told_too_late() -> None:
    made = matrix((16,), 32, torch.float32, row_scaled=True)
    announce = made.weight_destination(0).fp8
    assert announce is not None
    announce.announce(True)
    assert eight(made).weight.dtype is E4M3
    with pytest.raises(InternalError):
        announce.announce(False)


def test_a_cpu_refuses() -> None:
    with pytest.raises(ConfigurationError, match="--quantization fp8 is for GPUs"):
        CpuPlatform(parse(WorkerSettings, ["none", "--quantization=fp8"]))
