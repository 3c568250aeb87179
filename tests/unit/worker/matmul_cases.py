"""Products by way of a program of one operation, for any instruction set, and what they should be."""

from __future__ import annotations

import ctypes
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from tercet_worker.kernels.library import Isa, KernelLibrary
from tercet_worker.kernels.step_abi import Call, Epilogue, Op, OpKind
from tercet_worker.program.weights import PackedMatrix, PackedWeights


class OneOp:
    """A program of one operation, whose input and output are passed with every call."""

    def __init__(self, library: KernelLibrary, isa: Isa, dtype: torch.dtype, threads: int, op: Op) -> None:
        problem = ctypes.c_int32()
        self._cdll = library.cdll
        self._handle = self._cdll.tercet_program_create(int(dtype == torch.bfloat16), int(isa), threads, byref(problem))
        assert self._handle is not None, problem.value
        assert self._cdll.tercet_program_add(self._handle, byref(op)) == 0
        assert self._cdll.tercet_program_end_section(self._handle) == 0

    def __call__(
        self, x: Tensor | None, y: Tensor, *, ids: Tensor | None = None, positions: Tensor | None = None
    ) -> int:
        call = Call(section=0, rows=len(y), output=y.data_ptr(), out_stride=y.stride(0) * y.element_size())
        if x is not None:
            call.input, call.in_stride = x.data_ptr(), x.stride(0) * x.element_size()
        if ids is not None:
            call.token_ids = ids.data_ptr()
        if positions is not None:
            call.positions = positions.data_ptr()
        return int(self._cdll.tercet_program_run(self._handle, byref(call)))

    def close(self) -> None:
        self._cdll.tercet_program_destroy(self._handle)


@dataclass
class Weights:
    """Dense parts, and the same packed."""

    parts: list[Tensor]  # [N, K] each, in the dtype of the model
    biases: list[Tensor] | None
    packed: PackedMatrix

    @property
    def dense(self) -> Tensor:
        return torch.cat(self.parts).double()

    @property
    def bias(self) -> Tensor | float:
        return 0.0 if self.biases is None else torch.cat(self.biases).double()


def make_weights(
    library: KernelLibrary,
    dtype: torch.dtype,
    inputs: int,
    outputs: tuple[int, ...],
    *,
    bias: bool = False,
    gated: bool = False,
    seed: int = 0,
    pieces: int = 7,
) -> Weights:
    """Fills a packed matrix as the loader does: some rows at a time, wherever the cuts fall."""
    generator = torch.Generator().manual_seed(seed)
    matrix = PackedWeights(library, dtype)(inputs, outputs, bias=bias, gated=gated)
    parts = [torch.randn(rows, inputs, generator=generator).to(dtype) for rows in outputs]
    biases = [torch.randn(rows, generator=generator) for rows in outputs] if bias else None
    for part, rows in enumerate(parts):
        destination = matrix.weight_destination(part)
        assert destination.shape == tuple(rows.shape)
        for start in range(0, len(rows), pieces):
            destination.store(start, rows[start : start + pieces])
        bias_destination = matrix.bias_destination(part)
        assert (bias_destination is None) == (biases is None)
        if bias_destination is not None and biases is not None:
            bias_destination.store(0, biases[part])
    return Weights(parts, biases, matrix)


def product_op(matrix: PackedMatrix, epilogue: Epilogue) -> Op:
    return Op(
        kind=OpKind.LINEAR,
        epilogue=epilogue,
        in_features=matrix.in_features,
        out_features=matrix.columns,
        panels=matrix.panels,
        format=matrix.format,
        weight=matrix.memory.data_ptr(),
        aux=None if matrix.bias is None else matrix.bias.data_ptr(),
    )


def poisoned(rows: int, columns: int, dtype: torch.dtype, *, margin: int = 3) -> tuple[Tensor, Tensor]:
    """Returns a view ``[rows, columns]`` of a larger tensor full of NaN, and the tensor."""
    whole = torch.full((rows + 1, columns + margin), torch.nan, dtype=dtype)
    return whole[:rows, :columns], whole


def assert_margin_untouched(whole: Tensor, rows: int, columns: int) -> None:
    assert bool(whole[:, columns:].isnan().all())
    assert bool(whole[rows:].isnan().all())
