"""Sampling parameters of all slots as columns, and the rows of them that one step needs.

Legend: R rows that sample in a step, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tercet_worker.sampling.change_table import ChangeTable, DrawRows
from tercet_worker.sampling.noise import RowKeys
from tercet_worker.state.mirror import MirroredTable, to_device

if TYPE_CHECKING:
    from tercet_shared.wire.step import NewSlots
    from tercet_worker.sampling.changes import Changes

_TEMPERATURE, _TOP_P, _LOG_MIN_P, _FLOATS = 0, 1, 2, 3  # float32 bits
_TOP_K, _SEED_LOW, _SEED_HIGH, _MIN_LEN, _ASKS, _COLUMNS = 3, 4, 5, 6, 7, 8  # int32
_DRAWS = 1 << 16
"""In the column of what a slot asks for, beside the bits of `ChangeTable`: it is not greedy."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What the sampler needs to know of the rows of one step.

    Which rows need what is decided on the host, so that nothing waits for the device.
    """

    temperature: torch.Tensor  # float32 [R]; 0 in greedy rows
    top_p: torch.Tensor  # float32 [R]; 1: off
    log_min_p: torch.Tensor  # float32 [R]; natural logarithm, -inf: off
    top_k: torch.Tensor  # int32 [R]; 0: off
    keys: RowKeys  # of (seed, position)
    plain_rows: torch.Tensor  # int64; rows that draw without top-k and top-p
    truncated_rows: torch.Tensor  # int64; rows that draw with top-k or top-p
    changes: Changes | None  # of the logits, before temperature
    largest_top_k: int  # of all rows; 0 where none uses it
    any_min_p: bool

    def __len__(self) -> int:
        return int(self.temperature.shape[0])


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Where kernels find how a slot's tokens are drawn."""

    table: npt.NDArray[np.int32]  # [slots, C]
    temperature: int = _TEMPERATURE  # the numbers of columns; this and the next two are float32
    top_p: int = _TOP_P
    log_min_p: int = _LOG_MIN_P
    top_k: int = _TOP_K
    seed_low: int = _SEED_LOW
    seed_high: int = _SEED_HIGH
    min_len: int = _MIN_LEN  # the length below which stop ids are masked
    asks: int = _ASKS  # 0 where a slot takes the best token
    draws: int = _DRAWS  # in `asks`, by itself: the token is drawn from the logits as they are


class SamplingTable:
    """Sampling parameters by slot: a host copy for decisions and one on the device for the sampler.

    Args:
        tokens: the token buffer of all slots, int32 ``[slots, longest]``, on the device of the sampler.
    """

    def __init__(self, tokens: torch.Tensor) -> None:
        self._device = tokens.device
        self._table = MirroredTable(len(tokens), _COLUMNS, tokens.device)
        self._changes = ChangeTable(tokens)

    def columns(self) -> SamplingColumns:
        """Returns the host's copy, for kernels."""
        return SamplingColumns(self._table.host)

    def put(self, new: NewSlots) -> None:
        """Replaces the rows of ``new.slots``."""
        rows = np.empty((len(new), _COLUMNS), np.int32)
        floats = rows.view(np.float32)
        floats[:, _TEMPERATURE] = new.temperature
        floats[:, _TOP_P] = new.top_p
        floats[:, _LOG_MIN_P] = -np.inf  # the logarithm of 0: nothing is below it
        if new.min_p.any():
            np.log(new.min_p, out=floats[:, _LOG_MIN_P], where=new.min_p > 0)
        rows[:, _TOP_K] = new.top_k
        halves = np.ascontiguousarray(new.seed, "<u8").view(np.int32).reshape(-1, 2)
        rows[:, _SEED_LOW : _SEED_HIGH + 1] = halves
        rows[:, _MIN_LEN] = new.min_len
        rows[:, _ASKS] = self._changes.put(new) | (new.temperature > 0) * np.int32(_DRAWS)
        self._table.put(new.slots, rows)

    def takes_best(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int32]) -> bool:
        """Returns whether all of these rows, as in `batch` and without a grammar, take the token of the best logit."""
        host = self._table.host
        return not (host[slots, _ASKS].any() or (positions < host[slots, _MIN_LEN]).any())

    def batch(
        self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int32], *, gated: bool = False
    ) -> SamplingBatch:
        """Returns the rows of ``slots [R]``, which draw the tokens at ``positions [R]`` of prompt + output.

        With ``gated``, all of them draw under a grammar's mask.
        """
        host = self._table.host[slots]  # [R, C]
        asks, stopless = host[:, _ASKS], positions < host[:, _MIN_LEN]
        if not (asks.any() or stopless.any() or gated):
            return _greedy(len(slots), self._device)
        floats = host.view(np.float32)
        draws = asks & _DRAWS > 0
        truncates = draws & ((host[:, _TOP_K] > 0) | (floats[:, _TOP_P] < 1))
        device = self._device
        table = self._table.device[to_device(slots, device)]
        as_float = table[:, :_FLOATS].contiguous().view(torch.float32)
        place = to_device(positions, device)
        return SamplingBatch(
            temperature=as_float[:, _TEMPERATURE],
            top_p=as_float[:, _TOP_P],
            log_min_p=as_float[:, _LOG_MIN_P],
            top_k=table[:, _TOP_K],
            keys=RowKeys.of(table[:, _SEED_LOW], table[:, _SEED_HIGH], place),
            plain_rows=to_device(np.flatnonzero(draws & ~truncates), device),
            truncated_rows=to_device(np.flatnonzero(truncates), device),
            changes=self._changes.changes(DrawRows(slots, positions, asks & ~_DRAWS, stopless), gated=gated),
            largest_top_k=int(host[truncates, _TOP_K].max(initial=0)),
            any_min_p=bool((floats[draws, _LOG_MIN_P] > -np.inf).any()),
        )


def _greedy(rows: int, device: torch.device) -> SamplingBatch:
    """Returns a batch in which no row draws and none is changed: the usual case, whose step must not wait for more."""
    words = torch.zeros(rows, dtype=torch.int32, device=device)
    zeros = words.view(torch.float32)
    none = torch.empty(0, dtype=torch.int64, device=device)
    return SamplingBatch(zeros, zeros, zeros, words, RowKeys(words, words), none, none, None, 0, any_min_p=False)
