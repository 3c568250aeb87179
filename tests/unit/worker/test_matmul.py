"""Products with packed weights against float64, and row by row against themselves, to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tercet_worker.kernels.library import Isa, KernelLibrary
from tercet_worker.kernels.logits import LogitScan
from tercet_worker.kernels.step_abi import Epilogue, Op, OpKind, ProgramProblem
from tercet_worker.sampling.sampler import best_of
from tests.unit.worker.matmul_cases import OneOp, Weights, assert_margin_untouched, make_weights, poisoned, product_op

DTYPES = [pytest.param(torch.float32, id="float32"), pytest.param(torch.bfloat16, id="bfloat16")]
SHAPES = [(1, 1), (2, 16), (3, 17), (31, 33), (64, 48), (65, 64), (95, 65), (128, 100), (577, 130)]
ROWS = (1, 2, 3, 5, 6, 7, 12, 13, 31, 32, 33, 97)


@pytest.fixture(params=[isa.name for isa in Isa])
def isa(request: pytest.FixtureRequest, library: KernelLibrary) -> Isa:
    chosen = Isa[request.param]
    if chosen not in library.isas():
        pytest.skip(f"this machine has no {request.param}")
    return chosen


def inputs(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Returns ``[rows, columns]`` whose rows are apart, with NaN between them."""
    view, _ = poisoned(rows, columns, dtype, margin=5)
    view.copy_(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)))
    return view


def run(
    library: KernelLibrary, isa: Isa, weights: Weights, x: Tensor, epilogue: Epilogue, *, threads: int = 2
) -> Tensor:
    dtype = x.dtype if epilogue in {Epilogue.STORE, Epilogue.GATED_SILU} else torch.float32
    columns = weights.packed.columns
    y, whole = poisoned(len(x), columns, dtype)
    if epilogue is Epilogue.ADD:
        y.fill_(0.5)
    program = OneOp(library, isa, x.dtype, threads, product_op(weights.packed, epilogue))
    assert program(x, y) == ProgramProblem.NONE
    program.close()
    assert_margin_untouched(whole, len(x), columns)
    return y


def expected(weights: Weights, x: Tensor, epilogue: Epilogue) -> Tensor:
    exact = x.double() @ weights.dense.T + weights.bias
    if epilogue is Epilogue.ADD:
        return exact + 0.5
    if epilogue is Epilogue.GATED_SILU:
        gate, up = exact.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up
    return exact


def assert_close(y: Tensor, exact: Tensor, inputs_count: int) -> None:
    assert bool(y.isfinite().all())
    # Rounding of the result, and of a sum of normal products as it goes.
    relative = 2.0**-8 if y.dtype == torch.bfloat16 else 1e-5
    absolute = 2e-6 * inputs_count * (1 + float(exact.abs().max()) ** 0.5)
    torch.testing.assert_close(y.double(), exact, rtol=relative, atol=max(absolute, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.STORE_FLOAT, Epilogue.ADD])
def test_odd_shapes_and_batches(isa: Isa, library: KernelLibrary, dtype: torch.dtype, epilogue: Epilogue) -> None:
    for (k, n), rows in zip(SHAPES, itertools.cycle(ROWS), strict=False):
        for bias in (False, True):
            weights = make_weights(library, dtype, k, (n,), bias=bias)
            x = inputs(rows, k, dtype)
            assert_close(run(library, isa, weights, x, epilogue), expected(weights, x, epilogue), k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_every_tile_height(isa: Isa, library: KernelLibrary, dtype: torch.dtype, rows: int) -> None:
    weights = make_weights(library, dtype, 70, (150,))
    x = inputs(rows, 70, dtype)
    assert_close(run(library, isa, weights, x, Epilogue.STORE), expected(weights, x, Epilogue.STORE), 70)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 16, 40, 72])
def test_gated(isa: Isa, library: KernelLibrary, dtype: torch.dtype, inner: int) -> None:
    weights = make_weights(library, dtype, 33, (inner, inner), gated=True, bias=inner == 40)
    for rows in (1, 7, 40):
        x = inputs(rows, 33, dtype)
        y = run(library, isa, weights, x, Epilogue.GATED_SILU)
        assert_close(y, expected(weights, x, Epilogue.GATED_SILU), 33 * 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_parts_lie_side_by_side(isa: Isa, library: KernelLibrary, dtype: torch.dtype) -> None:
    weights = make_weights(library, dtype, 64, (40, 8, 8), bias=True)
    x = inputs(3, 64, dtype)
    assert_close(run(library, isa, weights, x, Epilogue.STORE), expected(weights, x, Epilogue.STORE), 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_are_kept_between_blocks(isa: Isa, library: KernelLibrary, dtype: torch.dtype) -> None:
    k = 4_301 if dtype == torch.bfloat16 else 2_301
    weights = make_weights(library, dtype, k, (70,))
    x = inputs(107, k, dtype)
    y = run(library, isa, weights, x, Epilogue.STORE_FLOAT)
    assert_close(y, expected(weights, x, Epilogue.STORE_FLOAT), k)
    for row in (0, 50, 106):
        assert torch.equal(run(library, isa, weights, x[row : row + 1], Epilogue.STORE_FLOAT)[0], y[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_in_any_batch(isa: Isa, library: KernelLibrary, dtype: torch.dtype, threads: int) -> None:
    weights = make_weights(library, dtype, 131, (200,), bias=True)
    x = inputs(150, 131, dtype)
    alone = torch.cat(
        [run(library, isa, weights, x[row : row + 1], Epilogue.STORE_FLOAT, threads=1) for row in range(150)]
    )
    for rows in (2, 5, 8, 17, 33, 100, 150):
        y = run(library, isa, weights, x[:rows], Epilogue.STORE_FLOAT, threads=threads)
        assert torch.equal(y, alone[:rows]), f"{rows} rows"


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_stays_in_its_row(isa: Isa, library: KernelLibrary, dtype: torch.dtype) -> None:
    weights = make_weights(library, dtype, 33, (20, 20), gated=True)
    x = inputs(9, 33, dtype)
    x[4, 32] = torch.nan
    y = run(library, isa, weights, x, Epilogue.GATED_SILU)
    assert y.isnan().all(dim=1).tolist() == [row == 4 for row in range(9)]


@settings(max_examples=40, deadline=None)
@given(
    k=st.integers(1, 300),
    n=st.integers(1, 300),
    rows=st.integers(1, 300),
    threads=st.integers(1, 4),
    half=st.booleans(),
    seed=st.integers(0, 1_000),
)
def test_random_shapes(library: KernelLibrary, k: int, n: int, rows: int, threads: int, half: bool, seed: int) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    weights = make_weights(library, dtype, k, (n,), seed=seed, pieces=61)
    x = inputs(rows, k, dtype, seed + 1)
    y = run(library, library.best_isa, weights, x, Epilogue.STORE_FLOAT, threads=threads)
    assert_close(y, expected(weights, x, Epilogue.STORE_FLOAT), k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_an_embedding(isa: Isa, library: KernelLibrary, dtype: torch.dtype) -> None:
    weights = make_weights(library, dtype, 37, (150,))
    matrix = weights.packed
    op = Op(
        kind=OpKind.EMBED, in_features=150, out_features=37, panels=matrix.panels, scalar=1.0,
        weight=matrix.memory.data_ptr(),
    )  # fmt: skip
    ids = torch.tensor([149, 0, 15, 16, 63, 64, 127, 128], dtype=torch.int32)
    program = OneOp(library, isa, dtype, 2, op)
    y, whole = poisoned(len(ids), 37, torch.float32)
    assert program(None, y, ids=ids) == ProgramProblem.NONE
    assert torch.equal(y.to(dtype), weights.parts[0][ids.long()])
    assert_margin_untouched(whole, len(ids), 37)
    for wrong in (150, -1):
        y.fill_(torch.nan)
        assert program(None, y, ids=torch.tensor([1] * 7 + [wrong], dtype=torch.int32)) == ProgramProblem.TOKEN_ID
        assert bool(y.isnan().all()), "refused before anything was touched"
    program.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 50, 64, 576, 1000])
def test_norm(isa: Isa, library: KernelLibrary, dtype: torch.dtype, size: int) -> None:
    x = inputs(5, size, torch.float32)
    weight = torch.randn(size)
    op = Op(kind=OpKind.NORM, in_features=size, scalar=1e-5, weight=weight.data_ptr())
    program = OneOp(library, isa, dtype, 2, op)
    y, whole = poisoned(5, size, dtype)
    assert program(x, y) == ProgramProblem.NONE
    exact = torch.nn.functional.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    tolerance = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=1e-6)
    assert_margin_untouched(whole, 5, size)
    alone, _ = poisoned(1, size, dtype)
    program(x[3:4], alone)
    assert torch.equal(alone[0], y[3])
    program.close()


def test_angles(isa: Isa, library: KernelLibrary) -> None:
    frequencies = 10_000.0 ** -(torch.arange(20) / 20)
    positions = torch.tensor([0, 1, 1_000, 131_071])
    op = Op(kind=OpKind.ANGLES, rotary_half=20, weight=frequencies.data_ptr())
    program = OneOp(library, isa, torch.float32, 2, op)
    y, whole = poisoned(4, 40, torch.float32)
    assert program(None, y, positions=positions) == ProgramProblem.NONE
    angles = positions.to(torch.float32).unsqueeze(1) * frequencies  # rounded as the reference implementation does
    torch.testing.assert_close(
        y, torch.cat([angles.double().cos(), angles.double().sin()], 1).float(), rtol=0, atol=2e-7
    )
    assert_margin_untouched(whole, 4, 40)
    program.close()


@pytest.mark.parametrize("size", [1, 15, 16, 1_023, 1_024, 1_025, 3_000])
def test_the_best_logit(isa: Isa, library: KernelLibrary, size: int) -> None:
    scan = LogitScan(library, threads=2, isa=isa)
    logits = torch.randn(9, size, generator=torch.Generator().manual_seed(size)).round(decimals=1)  # many equal ones
    for found, exact in zip(scan(logits), best_of(logits), strict=True):
        assert found.dtype == exact.dtype
        assert torch.equal(found, exact)
    for row, (place, value) in enumerate([(0, torch.nan), (size - 1, torch.inf), (size // 2, -torch.inf)]):
        logits[2 * row, place] = value
    assert scan(logits)[2].tolist() == [row not in {0, 2, 4} for row in range(9)]


def test_the_best_of_negative_logits_and_of_a_single_candidate(isa: Isa, library: KernelLibrary) -> None:
    logits = torch.full((1, 100), -3e38)
    logits[0, 57] = -2e38
    highest, places, finite = LogitScan(library, threads=1, isa=isa)(logits)
    assert (float(highest), int(places), bool(finite)) == (float(logits[0, 57]), 57, True)
