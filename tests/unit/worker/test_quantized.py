"""Quantized weights: taken apart as ggml does, packed, multiplied and gathered, in every format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor

from tercet_worker.kernels.library import Isa, KernelLibrary
from tercet_worker.kernels.step_abi import Epilogue, Op, OpKind, ProgramProblem
from tercet_worker.layers.cut import Cut
from tercet_worker.program.weights import PackedMatrix, PackedWeights, Quantization
from tercet_worker.quantization import Blocks, WeightFormat, common_format, decode, format_of, quantize_rows
from tests.unit.worker.matmul_cases import OneOp, assert_margin_untouched, poisoned

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
FORMAT_KINDS = ("Q4_1", "Q4_K", "Q8_0", "Q6_K")  # one for each format
ROWS = (1, 2, 3, 5, 6, 7, 13, 16, 17, 31, 33, 64, 97)


@pytest.fixture(params=[isa.name for isa in Isa])
def isa(request: pytest.FixtureRequest, library: KernelLibrary) -> Isa:
    chosen = Isa[request.param]
    if chosen not in library.isas():
        pytest.skip(f"this machine has no {request.param}")
    return chosen


def stored_rows(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Returns rows of a tensor as a file has them: random integers, and scales of a sensible size."""
    rng = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    halves = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(kind, (0, 2))
    for at in halves:
        values = (rng.standard_normal((rows, columns // block)) / 16).astype(np.float16)
        raw[..., at : at + 2] = values.view(np.uint8).reshape(rows, -1, 2)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_ggml(kind: str) -> None:
    raw = stored_rows(kind, 5, 1024)
    expected = quants.dequantize(raw, GGMLQuantizationType[kind])
    blocks = decode(kind, raw)
    assert blocks.format is format_of(kind)
    np.testing.assert_array_equal(blocks.dense(), expected)
    np.testing.assert_array_equal(blocks.to(WeightFormat.EIGHT_WIDE).dense(), expected)
    if blocks.format.four_bits:
        np.testing.assert_array_equal(blocks.to(WeightFormat.FOUR_WIDE).dense(), expected)


def test_types_without_a_format_are_dense() -> None:
    assert format_of("F16") is WeightFormat.DENSE
    assert format_of("IQ2_XXS") is WeightFormat.DENSE


def test_the_common_format_holds_each() -> None:
    four, wide, eight, most = (WeightFormat[name] for name in ("FOUR", "FOUR_WIDE", "EIGHT", "EIGHT_WIDE"))
    assert common_format([four, four]) is four
    assert common_format([four, wide]) is wide
    assert common_format([four, eight]) is most
    assert common_format([wide, most, eight]) is most
    assert common_format([four, WeightFormat.DENSE]) is WeightFormat.DENSE


def test_eight_bits_are_as_near_as_they_can_be() -> None:
    rng = np.random.default_rng(3)
    rows = (rng.standard_normal((40, 96)) * np.exp(rng.standard_normal((40, 1)) * 3)).astype(np.float32)
    rows[3] = 0.0
    rows[4, :32] = 1e-9  # a scale that float16 has no number for
    error = np.abs(quantize_rows(rows).dense() - rows).reshape(40, -1, 32)
    largest = np.abs(rows).reshape(40, -1, 32).max(axis=2, keepdims=True)
    # Half a step, and up to 127 times what float16 rounds of the scale, which below 6e-5 is 2^-25.
    assert (error <= largest / 254 * 1.13 + 128 * 2.0**-25).all()


@dataclass
class Quantized:
    dense: Tensor  # float64 [N, K]
    packed: PackedMatrix


def make(
    library: KernelLibrary, kinds: tuple[str, ...], columns: int, outputs: tuple[int, ...], *, gated: bool
) -> Quantized:
    weights = PackedWeights(library, torch.bfloat16)
    matrix = weights(columns, outputs, bias=False, gated=gated)
    destinations = [matrix.weight_destination(part) for part in range(len(outputs))]
    for destination, kind in zip(destinations, kinds, strict=True):
        assert destination.quantized is not None
        destination.quantized.announce(format_of(kind))
    weights.allocate()
    parts = []
    for part, (destination, kind) in enumerate(zip(destinations, kinds, strict=True)):
        raw = stored_rows(kind, outputs[part], columns, seed=part)
        quantized = destination.quantized
        assert quantized is not None
        assert quantized.takes_blocks()
        for start in range(0, len(raw), 7):
            quantized.store(start, decode(kind, raw[start : start + 7]))
        parts.append(torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind]).astype(np.float64)))
    return Quantized(torch.cat(parts), matrix)


def op_of(matrix: PackedMatrix, epilogue: Epilogue) -> Op:
    return Op(
        kind=OpKind.LINEAR,
        epilogue=epilogue,
        in_features=matrix.in_features,
        out_features=matrix.columns,
        panels=matrix.panels,
        format=matrix.format,
        weight=matrix.memory.data_ptr(),
    )


def multiply(
    library: KernelLibrary, isa: Isa, matrix: PackedMatrix, x: Tensor, epilogue: Epilogue, threads: int = 2
) -> Tensor:
    dtype = torch.bfloat16 if epilogue in {Epilogue.STORE, Epilogue.GATED_SILU} else torch.float32
    y, whole = poisoned(len(x), matrix.columns, dtype)
    if epilogue is Epilogue.ADD:
        y.fill_(0.5)
    program = OneOp(library, isa, torch.bfloat16, threads, op_of(matrix, epilogue))
    assert program(x, y) == ProgramProblem.NONE
    program.close()
    assert_margin_untouched(whole, len(x), matrix.columns)
    return y


def activations(rows: int, columns: int, seed: int = 1) -> Tensor:
    view, _ = poisoned(rows, columns, torch.bfloat16, margin=5)
    view.copy_(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)))
    return view


@pytest.mark.parametrize("kind", FORMAT_KINDS)
@pytest.mark.parametrize(("columns", "outputs"), [(256, 16), (512, 65), (768, 130)])
def test_products_match_float64(library: KernelLibrary, isa: Isa, kind: str, columns: int, outputs: int) -> None:
    case = make(library, (kind,), columns, (outputs,), gated=False)
    x = activations(97, columns)
    exact = x.double() @ case.dense.T
    # What single precision loses, with sixteen added to every integer in between.
    bound = 1e-6 * (x.double().abs() @ case.dense.abs().T + 16 * x.double().abs().sum(dim=1, keepdim=True) * 0.4)
    for rows in ROWS:
        y = multiply(library, isa, case.packed, x[:rows], Epilogue.STORE_FLOAT)
        assert bool(((y.double() - exact[:rows]).abs() <= bound[:rows] + 1e-6).all()), rows


@pytest.mark.parametrize("kind", FORMAT_KINDS)
def test_a_row_does_not_depend_on_the_others(library: KernelLibrary, isa: Isa, kind: str) -> None:
    case = make(library, (kind,), 512, (100,), gated=False)
    x = activations(97, 512)
    alone = torch.cat(
        [multiply(library, isa, case.packed, x[r : r + 1], Epilogue.STORE_FLOAT, 1) for r in range(len(x))]
    )
    for rows in ROWS:
        assert torch.equal(multiply(library, isa, case.packed, x[:rows], Epilogue.STORE_FLOAT), alone[:rows]), rows


@pytest.mark.parametrize("kind", FORMAT_KINDS)
@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.ADD, Epilogue.GATED_SILU])
def test_epilogues(library: KernelLibrary, isa: Isa, kind: str, epilogue: Epilogue) -> None:
    gated = epilogue is Epilogue.GATED_SILU
    case = make(library, (kind, kind), 256, (48, 48), gated=gated)
    x = activations(19, 256)
    exact = x.double() @ case.dense.T
    if gated:
        gate, up = exact.chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up
    if epilogue is Epilogue.ADD:
        exact = exact + 0.5
    y = multiply(library, isa, case.packed, x, epilogue).double()
    tolerance = 1e-4 if epilogue is Epilogue.ADD else 2**-7
    assert bool(((y - exact).abs() <= tolerance * exact.abs() + 2e-3).all())


def test_parts_of_different_types_share_a_matrix(library: KernelLibrary, isa: Isa) -> None:
    case = make(library, ("Q4_K", "Q4_K", "Q6_K"), 256, (64, 16, 16), gated=False)
    assert case.packed.format is WeightFormat.EIGHT_WIDE
    x = activations(5, 256)
    y = multiply(library, isa, case.packed, x, Epilogue.STORE_FLOAT).double()
    exact = x.double() @ case.dense.T
    assert bool(((y - exact).abs() <= 1e-4 * exact.abs() + 1e-3).all())


@pytest.mark.parametrize("kind", FORMAT_KINDS)
def test_rows_are_gathered_exactly(library: KernelLibrary, isa: Isa, kind: str) -> None:
    case = make(library, (kind,), 256, (70,), gated=False)
    matrix = case.packed
    op = Op(
        kind=OpKind.EMBED,
        in_features=matrix.columns,
        out_features=matrix.in_features,
        panels=matrix.panels,
        format=matrix.format,
        scalar=1.0,
        weight=matrix.memory.data_ptr(),
    )
    ids = torch.tensor([69, 0, 15, 16, 64, 63, 17], dtype=torch.int32)
    y, whole = poisoned(len(ids), 256, torch.float32)
    program = OneOp(library, isa, torch.bfloat16, 2, op)
    assert program(None, y, ids=ids) == ProgramProblem.NONE
    program.close()
    assert_margin_untouched(whole, len(ids), 256)
    assert torch.equal(y.double(), case.dense[ids.long()])


@pytest.mark.parametrize(
    ("quantization", "dtype", "kinds", "columns", "expected"),
    [
        (Quantization.AUTO, torch.bfloat16, ("Q4_1", "Q4_1"), 64, WeightFormat.FOUR),
        (Quantization.AUTO, torch.bfloat16, ("Q4_1", "F16"), 64, WeightFormat.DENSE),
        (Quantization.AUTO, torch.bfloat16, ("BF16", "BF16"), 64, WeightFormat.DENSE),
        (Quantization.AUTO, torch.float32, ("Q4_1", "Q4_1"), 64, WeightFormat.DENSE),
        (Quantization.NONE, torch.bfloat16, ("Q4_1", "Q4_1"), 64, WeightFormat.DENSE),
        (Quantization.INT8, torch.bfloat16, ("BF16", "BF16"), 64, WeightFormat.EIGHT),
        (Quantization.INT8, torch.bfloat16, ("Q4_1", "Q4_1"), 64, WeightFormat.FOUR),
        (Quantization.INT8, torch.bfloat16, ("BF16", "BF16"), 40, WeightFormat.DENSE),
    ],
)
def test_which_format_a_matrix_takes(
    library: KernelLibrary,
    quantization: Quantization,
    dtype: torch.dtype,
    kinds: tuple[str, str],
    columns: int,
    expected: WeightFormat,
) -> None:
    matrix = PackedWeights(library, dtype, quantization)(columns, (16, 16), bias=False, gated=False)
    for part, kind in enumerate(kinds):
        quantized = matrix.weight_destination(part).quantized
        assert quantized is not None
        quantized.announce(format_of(kind))
    assert matrix.format is expected
    assert matrix.memory.nbytes == matrix.nbytes


def test_dense_rows_become_eight_bits(library: KernelLibrary, isa: Isa) -> None:
    weights = PackedWeights(library, torch.bfloat16, Quantization.INT8)
    matrix = weights(64, (40,), bias=False, gated=False)
    destination = matrix.weight_destination(0)
    assert destination.quantized is not None
    destination.quantized.announce(WeightFormat.DENSE)
    rows = torch.randn(40, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    for start in range(0, 40, 9):
        destination.store(start, rows[start : start + 9])
    blocks: Blocks = quantize_rows(rows.float().numpy())
    x = activations(3, 64)
    y = multiply(library, isa, matrix, x, Epilogue.STORE_FLOAT).double()
    exact = x.double() @ torch.from_numpy(blocks.dense().astype(np.float64)).T
    assert bool(((y - exact).abs() <= 1e-5 * (1 + exact.abs())).all())


@pytest.mark.parametrize(
    ("begin", "expected"), [(0, WeightFormat.FOUR), (32, WeightFormat.FOUR), (16, WeightFormat.DENSE)]
)
def test_a_cut_within_blocks_makes_a_matrix_dense(library: KernelLibrary, begin: int, expected: WeightFormat) -> None:
    matrix = PackedWeights(library, torch.bfloat16)(64, (16,), bias=False, gated=False)
    destination = matrix.weight_destination(0).cut(Cut.all(16), Cut(96, begin, begin + 64))
    assert destination.quantized is not None
    destination.quantized.announce(WeightFormat.FOUR)
    assert matrix.format is expected
    assert destination.quantized.takes_blocks() == (expected is WeightFormat.FOUR)
