"""Compact weights: three quarters of the bytes, and the results of dense ones to the bit."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tercet_worker.kernels.library import Isa, KernelLibrary
from tercet_worker.kernels.step_abi import Epilogue, Op, OpKind, ProgramProblem
from tercet_worker.program.weights import PackedMatrix, PackedWeights
from tercet_worker.quantization import WeightFormat
from tests.unit.worker.matmul_cases import OneOp, assert_margin_untouched, poisoned, product_op

READING = {Isa.AVX2, Isa.AVX512, Isa.AVX512BF16}
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 18, 19, 31, 32, 33, 97, 200)


@pytest.fixture(params=sorted(isa.name for isa in READING))
def isa(request: pytest.FixtureRequest, library: KernelLibrary) -> Isa:
    chosen = Isa[request.param]
    if chosen not in library.isas():
        pytest.skip(f"this machine has no {request.param}")
    return chosen


def random_weights(rows: int, columns: int, *, exceptions: int = 0, seed: int = 0) -> Tensor:
    """Normal weights but for some tiny, huge, subnormal and infinite ones and zeros of either sign, anywhere."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, columns, generator=generator)
    places = torch.randint(rows * columns, (exceptions,), generator=generator)
    odd = torch.tensor([1e-30, -1e-38, 0.0, -0.0, 3e30, -2e-20, 1e-40])
    weights.view(-1)[places] = odd[torch.arange(exceptions) % len(odd)]
    return weights.to(torch.bfloat16)


def packed(library: KernelLibrary, parts: list[Tensor], *, bias: bool = False, gated: bool = False) -> PackedWeights:
    """Returns weights whose second matrix holds ``parts``, behind one that is compact and before one that is not."""
    weights = PackedWeights(library, torch.bfloat16)
    before = weights(64, (256,), bias=False, gated=False)
    matrix = weights(parts[0].shape[1], [len(part) for part in parts], bias=bias, gated=gated)
    after = weights(33, (48,), bias=False, gated=False)
    before.weight_destination(0).store(0, random_weights(256, 64, seed=5))
    for number, part in enumerate(parts):
        matrix.weight_destination(number).store(0, part)
        destination = matrix.bias_destination(number)
        if destination is not None:
            destination.store(0, torch.linspace(-1, 1, len(part)))
    after.weight_destination(0).store(0, random_weights(48, 33, seed=6))
    return weights


def run(library: KernelLibrary, isa: Isa, matrix: PackedMatrix, x: Tensor, epilogue: Epilogue) -> Tensor:
    dtype = x.dtype if epilogue in {Epilogue.STORE, Epilogue.GATED_SILU} else torch.float32
    y, whole = poisoned(len(x), matrix.columns, dtype)
    if epilogue is Epilogue.ADD:
        y.fill_(0.5)
    program = OneOp(library, isa, x.dtype, 2, product_op(matrix, epilogue))
    assert program(x, y) == ProgramProblem.NONE
    program.close()
    assert_margin_untouched(whole, len(x), matrix.columns)
    return y


def inputs(rows: int, columns: int) -> Tensor:
    view, _ = poisoned(rows, columns, torch.bfloat16, margin=5)
    view.copy_(torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)))
    return view


def same(a: Tensor, b: Tensor) -> bool:
    integer = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


@pytest.mark.parametrize(
    ("columns", "outputs", "exceptions"),
    [(64, 64, 0), (576, 960, 300), (1536, 576, 500), (70, 150, 7), (4300, 122, 200), (130, 17 * 16, 30), (66, 128, 0)],
)
def test_products_are_those_of_dense_weights(
    isa: Isa, library: KernelLibrary, columns: int, outputs: int, exceptions: int
) -> None:
    weights = packed(library, [random_weights(outputs, columns, exceptions=exceptions)], bias=True)
    matrix = weights.matrices[1]
    expected = {
        (rows, epilogue): run(library, isa, matrix, inputs(rows, columns), epilogue)
        for rows in ROWS
        for epilogue in (Epilogue.STORE, Epilogue.STORE_FLOAT, Epilogue.ADD)
    }
    dense = matrix.nbytes
    weights.compact(isa)
    assert matrix.format is WeightFormat.COMPACT
    assert matrix.nbytes < dense
    for (rows, epilogue), y in expected.items():
        assert same(run(library, isa, matrix, inputs(rows, columns), epilogue), y), (rows, epilogue)


@pytest.mark.parametrize("inner", [96, 160, 1536])
def test_gated(isa: Isa, library: KernelLibrary, inner: int) -> None:
    parts = [random_weights(inner, 66, exceptions=inner // 32, seed=seed) for seed in range(2)]
    weights = packed(library, parts, bias=True, gated=True)
    matrix = weights.matrices[1]
    expected = [run(library, isa, matrix, inputs(rows, 66), Epilogue.GATED_SILU) for rows in ROWS]
    weights.compact(isa)
    assert matrix.format is WeightFormat.COMPACT
    for rows, y in zip(ROWS, expected, strict=True):
        assert same(run(library, isa, matrix, inputs(rows, 66), Epilogue.GATED_SILU), y), rows


def test_embedding(isa: Isa, library: KernelLibrary) -> None:
    table = random_weights(300, 576, exceptions=100)
    weights = packed(library, [table])
    weights.compact(isa)
    matrix = weights.matrices[1]
    assert matrix.format is WeightFormat.COMPACT
    op = Op(
        kind=OpKind.EMBED,
        in_features=300,
        out_features=576,
        panels=matrix.panels,
        scalar=1.0,
        format=matrix.format,
        weight=matrix.memory.data_ptr(),
    )
    program = OneOp(library, isa, torch.bfloat16, 2, op)
    ids = torch.arange(300, dtype=torch.int32)
    y, _ = poisoned(300, 576, torch.float32)
    assert program(None, y, ids=ids) == ProgramProblem.NONE
    program.close()
    assert same(y, table.to(torch.float32))


@pytest.mark.parametrize(
    ("columns", "outputs", "exceptions"),
    [(33, 64, 0), (64, 16, 0), (64, 64, 400)],
    ids=["odd", "few panels", "many exceptions"],
)
def test_what_stays_dense(isa: Isa, library: KernelLibrary, columns: int, outputs: int, exceptions: int) -> None:
    weights = packed(library, [random_weights(outputs, columns, exceptions=exceptions)])
    matrix = weights.matrices[1]
    expected = run(library, isa, matrix, inputs(3, columns), Epilogue.STORE)
    weights.compact(isa)
    assert weights.matrices[0].format is WeightFormat.COMPACT
    assert matrix.format is WeightFormat.DENSE
    assert same(run(library, isa, matrix, inputs(3, columns), Epilogue.STORE), expected), "it was moved"


def test_other_instruction_sets_keep_dense_weights(library: KernelLibrary) -> None:
    for isa in set(library.isas()) - READING:
        weights = packed(library, [random_weights(64, 64)])
        weights.compact(isa)
        assert all(matrix.format is WeightFormat.DENSE for matrix in weights.matrices)


def test_again_it_changes_nothing(isa: Isa, library: KernelLibrary) -> None:
    weights = packed(library, [random_weights(80, 64, exceptions=3)])
    weights.compact(isa)
    before = [(matrix.format, matrix.memory.data_ptr(), matrix.memory.clone()) for matrix in weights.matrices]
    weights.compact(isa)
    for matrix, (form, place, memory) in zip(weights.matrices, before, strict=True):
        assert (matrix.format, matrix.memory.data_ptr()) == (form, place)
        assert torch.equal(matrix.memory, memory)


def test_a_later_matrix_begins_with_zeros(isa: Isa, library: KernelLibrary) -> None:
    weights = packed(library, [random_weights(640, 640, exceptions=100)])
    late = weights(64, (1_024,), bias=False, gated=False)
    weights.compact(isa)
    assert late.format is WeightFormat.DENSE
    assert not late.memory.any()


def test_every_chunk_is_made_compact(isa: Isa, library: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet_worker.program.weights._CHUNK", 100_000)
    tables = [random_weights(rows, 128, exceptions=10, seed=rows) for rows in (112, 160, 176, 320, 512, 128)]
    weights = PackedWeights(library, torch.bfloat16)
    for table in tables:
        weights(128, (len(table),), bias=False, gated=False).weight_destination(0).store(0, table)
    expected = [run(library, isa, matrix, inputs(3, 128), Epilogue.STORE_FLOAT) for matrix in weights.matrices]
    assert len({matrix.memory.untyped_storage().data_ptr() for matrix in weights.matrices}) > 2
    weights.compact(isa)
    for matrix, y in zip(weights.matrices, expected, strict=True):
        assert matrix.format is WeightFormat.COMPACT
        assert same(run(library, isa, matrix, inputs(3, 128), Epilogue.STORE_FLOAT), y)


@pytest.mark.parametrize("kind", [OpKind.LINEAR, OpKind.EMBED])
def test_instruction_sets_that_do_not_read_it_refuse_it(isa: Isa, library: KernelLibrary, kind: OpKind) -> None:
    weights = packed(library, [random_weights(64, 64)])
    weights.compact(isa)
    op = product_op(weights.matrices[1], Epilogue.STORE)
    op.kind = kind
    for other in set(library.isas()) - READING:
        problem = ctypes.c_int32()
        program = library.cdll.tercet_program_create(1, int(other), 1, ctypes.byref(problem))
        assert library.cdll.tercet_program_add(program, ctypes.byref(op)) == ProgramProblem.ISA
        library.cdll.tercet_program_destroy(program)


@settings(deadline=None, max_examples=60)
@given(
    panels=st.integers(4, 40),
    half_columns=st.integers(1, 400),
    rows=st.integers(1, 60),
    exceptions=st.integers(0, 20),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    library: KernelLibrary, panels: int, half_columns: int, rows: int, exceptions: int, seed: int
) -> None:
    columns = 2 * half_columns
    for isa in set(library.isas()) & READING:
        weights = packed(library, [random_weights(16 * panels - seed % 16, columns, exceptions=exceptions, seed=seed)])
        matrix = weights.matrices[1]
        expected = run(library, isa, matrix, inputs(rows, columns), Epilogue.STORE_FLOAT)
        weights.compact(isa)
        assert same(run(library, isa, matrix, inputs(rows, columns), Epilogue.STORE_FLOAT), expected)
