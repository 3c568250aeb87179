"""Linear layers whose weights have eight bits (E4M3) and a float32 scale for each row, and the product with them.

Inputs become eight bits as they come, with a scale for each token. A scale is the largest magnitude by 448, which is
the largest number of E4M3.

Legend: T tokens; N rows and K columns of a weight; N' and K' the same in whole `STEP`s, with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # the customary name

from tercet_shared.errors import InternalError
from tercet_worker.layers.destination import Destination, Fp8Destination, into
from tercet_worker.layers.matrix import DenseMatrix

if TYPE_CHECKING:
    from collections.abc import Sequence

E4M3 = torch.float8_e4m3fn
STEP = 16
"""Rows and columns of a weight come in multiples of this: the product on a GPU takes no others."""
_LARGEST = 448.0
_LEAST = 1e-30
"""Largest magnitude of a row from which its scale is still a normal float32."""


@dataclass(frozen=True, slots=True)
class Fp8Choice:
    """Which linear layers have such weights, and how the device multiplies with them.

    Attributes:
        every: all have; otherwise those whose weights are so in the checkpoint.
        row_scaled: the device's product takes scales of rows; otherwise they are applied to what it returns.
    """

    every: bool
    row_scaled: bool


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows ``[T, K]`` as E4M3, and their scales, float32 ``[T, 1]``. What is not finite makes its row NaN."""
    wide = rows.to(torch.float32)
    scales = wide.abs().amax(dim=1, keepdim=True).clamp_min(_LEAST) / _LARGEST
    # A quotient may be rounded up to more than the largest number, of which a conversion may make NaN.
    return (wide / scales).clamp(-_LARGEST, _LARGEST).to(E4M3), scales


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    one: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    outputs: int,
    row_scaled: bool,
) -> torch.Tensor:
    """Returns ``x Wᵀ + b``, ``[T, N]`` in the dtype of ``x [T, K]``; at least one token.

    Args:
        x: in the model's dtype.
        weight: E4M3 ``[N', K']``.
        scales: of its rows, float32 ``[1, N']``.
        one: float32 ``[1]``, on the device.
        bias: ``[N]``.
        outputs: N.
        row_scaled: as in `Fp8Choice`.
    """
    padding = weight.shape[1] - x.shape[1]
    q, tokens = quantize(F.pad(x, (0, padding)) if padding else x)
    # Without fast accumulation, which on Hopper keeps some fourteen bits of sums.
    if row_scaled:
        product = torch._scaled_mm(q, weight.t(), scale_a=tokens, scale_b=scales, out_dtype=x.dtype)  # noqa: SLF001  # torch's only name for it in all versions
        product = product[:, :outputs]
        return product if bias is None else product + bias
    wide = torch._scaled_mm(q, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)  # noqa: SLF001  # as above
    wide = (wide * tokens * scales)[:, :outputs]
    return (wide if bias is None else wide + bias).to(x.dtype)


class Fp8Weights:
    """The tensors of such a layer.

    Args:
        in_features: K.
        out_features: rows of each part, which make N together.
        bias: whether there is a bias.
        dtype: of the bias.
        device: where they are.
        row_scaled: as in `Fp8Choice`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        row_scaled: bool,
    ) -> None:
        self.outputs = sum(out_features)
        self.row_scaled = row_scaled
        rows = _whole(self.outputs)
        bits = torch.zeros((rows, _whole(in_features)), dtype=torch.uint8, device=device)
        self.weight = bits.view(E4M3)  # [N', K']
        self.scales = torch.ones((1, rows), dtype=torch.float32, device=device)
        self.one = torch.ones(1, dtype=torch.float32, device=device)
        self.bias = torch.empty(self.outputs, dtype=dtype, device=device) if bias else None  # [N]
        self._columns = in_features

    def store(self, first: int, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        """Stores E4M3 rows from ``first`` on, with their scales."""
        rows = slice(first, first + len(numbers))
        self.weight.view(torch.uint8)[rows, : self._columns].copy_(numbers.view(torch.uint8))
        self.scales[0, rows].copy_(scales.view(-1))


class Fp8Matrix:
    """Implements ``Matrix``: of eight bits, or dense where the choice leaves it so.

    It takes its memory when it is first needed, and by then it has been told what the checkpoint holds.

    Args:
        in_features: columns.
        out_features: rows of each part.
        bias: whether there is a bias.
        dtype: of a dense weight, and of the bias.
        device: where they are.
        choice: says which.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        choice: Fp8Choice,
    ) -> None:
        self.in_features = in_features
        self.out_features = tuple(out_features)
        self._bias = bias
        self._dtype = dtype
        self._device = device
        self._choice = choice
        self._told: dict[int, bool] = {}

    @property
    def keeps(self) -> bool:
        """Whether the weights have eight bits. All parts are alike."""
        return self._choice.every or all(self._told.get(part, False) for part in range(len(self.out_features)))

    @cached_property
    def held(self) -> DenseMatrix | Fp8Weights:
        """The tensors."""
        if not self.keeps:
            return DenseMatrix(
                self.in_features, self.out_features, bias=self._bias, dtype=self._dtype, device=self._device
            )
        return Fp8Weights(
            self.in_features,
            self.out_features,
            bias=self._bias,
            dtype=self._dtype,
            device=self._device,
            row_scaled=self._choice.row_scaled,
        )

    def weight_destination(self, part: int) -> Destination:
        """See ``Matrix``."""
        rows = self.out_features[part]
        fp8 = Fp8Destination(
            announce=lambda kept: self._announce(part, kept=kept),
            nbytes=lambda: rows * self._row_nbytes,
            takes=lambda: self.keeps,
            store=lambda start, numbers, scales: self._store(part, start, numbers, scales),
        )
        return Destination(
            (rows, self.in_features), self._dtype, lambda start, dense: self._store_dense(part, start, dense), fp8=fp8
        )

    def bias_destination(self, part: int) -> Destination | None:
        """See ``Matrix``."""
        if not self._bias:
            return None
        rows = self.out_features[part]

        def store(start: int, values: torch.Tensor) -> None:
            if self.held.bias is None:
                raise InternalError("a bias was stored where there is none")
            into(self.held.bias[self._first(part) :][:rows]).store(start, values)

        return Destination((rows,), self._dtype, store)

    @property
    def _row_nbytes(self) -> int:
        if not self.keeps:
            return self.in_features * self._dtype.itemsize
        return _whole(self.in_features) + torch.float32.itemsize

    def _announce(self, part: int, *, kept: bool) -> None:
        if "held" in self.__dict__:
            raise InternalError("a matrix was told what it will hold after it took its memory")
        self._told[part] = kept

    def _store_dense(self, part: int, start: int, rows: torch.Tensor) -> None:
        if isinstance(self.held, DenseMatrix):
            self.held.weight_destination(part).store(start, rows)
        else:
            self._store(part, start, *quantize(rows.to(self._device)))  # the device is quicker

    def _store(self, part: int, start: int, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        if isinstance(self.held, DenseMatrix):
            raise InternalError("a dense matrix was given weights of eight bits")
        self.held.store(self._first(part) + start, numbers, scales)

    def _first(self, part: int) -> int:
        return sum(self.out_features[:part])


def _whole(extent: int) -> int:
    return -(-extent // STEP) * STEP
