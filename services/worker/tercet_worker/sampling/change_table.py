"""What slots ask to be done to their logits, and the changes that this makes to one step.

What depends on a slot's parameters is laid out on the host; what depends on its tokens is gathered on the device, where
the step before has just written the token that it drew.

Legend: N new slots of a plan, R rows that draw in a step, Q of them that ask for something, W bad words of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from tercet_shared.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
)
from tercet_worker.sampling.changes import Bias, Changes, Penalties, Restrictions
from tercet_worker.state.mirror import RaggedTable, ragged_index, to_device

if TYPE_CHECKING:
    from tercet_shared.wire.step import NewSlots
    from tercet_worker.state.mirror import I64

BIASED, PENALIZED, RESTRICTED = 1, 2, 4
"""What a slot asks for, as bits. Stop ids below ``min_tokens`` restrict, too, but only for a while."""


@dataclass(frozen=True, slots=True)
class DrawRows:
    """Rows that draw in one step."""

    slots: npt.NDArray[np.int64]  # [R]
    positions: npt.NDArray[np.int32]  # [R] where in prompt + output the token will stand
    asks: npt.NDArray[np.int32]  # [R] bits
    stopless: npt.NDArray[np.bool_]  # [R] whether stop ids may not be drawn yet


class ChangeTable:
    """Parameters that change logits, by slot.

    Args:
        tokens: the token buffer of all slots, int32 ``[slots, longest]``, on the device of the sampler.
    """

    def __init__(self, tokens: torch.Tensor) -> None:
        slots, self._longest = tokens.shape
        self._tokens = tokens.view(-1)
        self._device = tokens.device
        self._prompt_lens = np.zeros(slots, np.int32)
        self._penalties = np.zeros((slots, 3), np.float32)  # repetition, frequency, presence
        self._stops = RaggedTable(slots, MAX_STOP_TOKEN_IDS)
        self._bias_ids = RaggedTable(slots, MAX_LOGIT_BIAS)
        self._bias_values = RaggedTable(slots, MAX_LOGIT_BIAS, np.float32)
        self._allowed = RaggedTable(slots, MAX_ALLOWED_TOKEN_IDS)
        self._bad_lens = RaggedTable(slots, MAX_BAD_WORDS)
        self._bad_starts = RaggedTable(slots, MAX_BAD_WORDS)  # of each word in the slot's bad ids
        self._bad_ids = RaggedTable(slots, MAX_BAD_WORDS * MAX_BAD_WORD_LENGTH)

    def put(self, new: NewSlots) -> npt.NDArray[np.int32]:
        """Replaces the rows of ``new.slots``, and returns what they ask for, as bits ``[N]``."""
        slots = new.slots
        self._prompt_lens[slots] = new.prompt_lens
        self._penalties[slots] = np.array((new.repetition, new.frequency, new.presence)).T
        self._stops.put(slots, new.stop_offsets, new.stop_ids)
        self._bias_ids.put(slots, new.bias_offsets, new.bias_ids)
        self._bias_values.put(slots, new.bias_offsets, new.bias_values)
        self._allowed.put(slots, new.allowed_offsets, new.allowed_ids)
        self._bad_lens.put(slots, new.bad_offsets, new.bad_lens)
        self._put_bad_words(new)
        penalized = (new.repetition != 1) | (new.frequency != 0) | (new.presence != 0)
        asks: npt.NDArray[np.int32] = np.multiply(penalized, PENALIZED, dtype=np.int32)
        if len(new.bias_ids):
            asks[np.diff(new.bias_offsets) > 0] |= BIASED
        if len(new.allowed_ids) or len(new.bad_lens):
            asks[(np.diff(new.allowed_offsets) > 0) | (np.diff(new.bad_offsets) > 0)] |= RESTRICTED
        return asks

    def _put_bad_words(self, new: NewSlots) -> None:
        if not len(new.bad_lens):
            self._bad_starts.lengths[new.slots] = self._bad_ids.lengths[new.slots] = 0
            return
        ends = np.concatenate(([0], np.cumsum(new.bad_lens, dtype=np.int64)))  # [W + 1]
        begins = ends[new.bad_offsets]  # [N + 1]
        starts = ends[:-1] - np.repeat(begins[:-1], np.diff(new.bad_offsets))
        self._bad_starts.put(new.slots, new.bad_offsets, starts)
        self._bad_ids.put(new.slots, begins, new.bad_ids)

    def changes(self, rows: DrawRows, *, gated: bool) -> Changes | None:
        """Returns what is done to the logits of ``rows``; None where it is nothing.

        With ``gated``, all rows are restricted, in their order.
        """
        restricted = (rows.asks & RESTRICTED > 0) | (rows.stopless & (self._stops.lengths[rows.slots] > 0)) | gated
        changed = np.flatnonzero(restricted | (rows.asks > 0))
        if not len(changed):
            return None
        return Changes(
            rows=self._there(changed),
            bias=self._bias(rows, np.flatnonzero(rows.asks & BIASED)),
            penalties=self._penalize(rows, np.flatnonzero(rows.asks & PENALIZED)),
            restrictions=self._restrict(rows, np.flatnonzero(restricted)),
        )

    def _bias(self, rows: DrawRows, index: I64) -> Bias | None:
        if not len(index):
            return None
        owner, ids = self._bias_ids.gather(rows.slots[index])
        _, values = self._bias_values.gather(rows.slots[index])
        return Bias(self._there(index[owner]), self._ids(ids), self._there(values))

    def _penalize(self, rows: DrawRows, index: I64) -> Penalties | None:
        if not len(index):
            return None
        slots = rows.slots[index]
        penalties, prompt_lens = self._penalties[slots], self._prompt_lens[slots]
        begins = np.where(penalties[:, 0] != 1, 0, prompt_lens)  # a prompt matters to repetition only
        counts = rows.positions[index] - begins
        owner, place = ragged_index(counts)
        place += begins[owner]
        return Penalties(
            rows=self._there(index),
            repetition=self._there(penalties[:, 0]),
            frequency=self._there(penalties[:, 1]),
            presence=self._there(penalties[:, 2]),
            offsets=np.concatenate(([0], np.cumsum(counts, dtype=np.int64))),
            owner=self._there(owner),
            tokens=self._read(slots[owner], place).to(torch.int64),
            output=self._there((place >= prompt_lens[owner]).astype(np.float32)),
        )

    def _restrict(self, rows: DrawRows, index: I64) -> Restrictions | None:
        if not len(index):
            return None
        slots = rows.slots[index]
        stopless = np.flatnonzero(rows.stopless[index])
        stop_owner, stop_ids = self._stops.gather(slots[stopless])
        allowed = np.flatnonzero(self._allowed.lengths[slots])
        allowed_owner, allowed_ids = self._allowed.gather(slots[allowed])
        bad_owner, bad_ids, bad_found = self._bad_words(slots, rows.positions[index])
        return Restrictions(
            rows=self._there(index),
            stop_owner=self._there(stopless[stop_owner]),
            stop_ids=self._ids(stop_ids),
            bad_owner=self._there(bad_owner),
            bad_ids=self._ids(bad_ids),
            bad_found=bad_found,
            allowed_rows=self._there(allowed),
            allowed_owner=self._there(allowed_owner),
            allowed_ids=self._ids(allowed_ids),
        )

    def _bad_words(
        self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int32]
    ) -> tuple[I64, npt.NDArray[np.int32], torch.Tensor]:
        """Returns for each bad word that a row is long enough for: row, last id, and whether the others stand there.

        They may stand in the prompt, in part or all of them: prompt and output are one text here, as in Transformers.
        """
        owner, lens = self._bad_lens.gather(slots)
        _, starts = self._bad_starts.gather(slots)
        long_enough = np.flatnonzero(lens - 1 <= positions[owner])
        owner, lens, starts = owner[long_enough], lens[long_enough], starts[long_enough]
        last = self._bad_ids.at(slots[owner], starts + lens - 1)
        word, place = ragged_index(lens - 1)
        row = owner[word]
        wanted = self._bad_ids.at(slots[row], starts[word] + place)
        found = self._read(slots[row], positions[row] - (lens[word] - 1) + place)
        differs = (found != self._there(wanted)).to(torch.int32)
        wrong = torch.zeros(len(owner), dtype=torch.int32, device=self._device)
        return owner, last, wrong.index_add_(0, self._there(word), differs) == 0

    def _read(self, slots: npt.NDArray[np.int64], places: npt.NDArray[Any]) -> torch.Tensor:
        """Returns the tokens at these places of these slots, int32."""
        return self._tokens.index_select(0, self._there(slots * self._longest + places))

    def _ids(self, ids: npt.NDArray[np.int32]) -> torch.Tensor:
        return self._there(ids.astype(np.int64))

    def _there(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return to_device(array, self._device)
