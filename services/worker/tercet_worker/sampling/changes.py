"""What happens to logits before temperature: bias, penalties, and tokens that may not be drawn.

Each acts on the rows that ask for it and on no other. Rows and tokens come as flat lists, so that a step over many
requests is a handful of operations.

Legend: R rows of logits, V vocabulary, Q rows that ask, M (row, token) pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

GrammarSource = Callable[[], npt.NDArray[np.uint32]]
"""Waits for the packed rows of a step's `GrammarMask`, as they came. Raises where none will come."""

_STOP, _BAD, _OUTSIDE, _UNGRAMMATICAL = 1, 2, 4, 8
"""Why a token should not be drawn, the weightier the higher."""


@dataclass(frozen=True, slots=True)
class Bias:
    """What is added to logits."""

    rows: torch.Tensor  # int64 [M]
    ids: torch.Tensor  # int64 [M]
    values: torch.Tensor  # float32 [M]

    def apply_(self, logits: torch.Tensor) -> None:
        """Changes ``logits [R, V]``."""
        logits.index_put_((self.rows, self.ids), self.values, accumulate=True)


@dataclass(frozen=True, slots=True)
class Penalties:
    """Repetition over prompt and output (as in Transformers), then frequency and presence over output (as at OpenAI).

    A row's tokens lie end to end in ``tokens``: all, or only those of its output where it has no repetition penalty.
    """

    rows: torch.Tensor  # int64 [Q]
    repetition: torch.Tensor  # float32 [Q]; 1: off
    frequency: torch.Tensor  # float32 [Q]; 0: off
    presence: torch.Tensor  # float32 [Q]; 0: off
    offsets: npt.NDArray[np.int64]  # [Q + 1] into the columns below
    owner: torch.Tensor  # int64 [M] place in rows
    tokens: torch.Tensor  # int64 [M]
    output: torch.Tensor  # float32 [M]; 1 for a token of the output, 0 for one of the prompt

    def apply_(self, logits: torch.Tensor, counts: torch.Tensor) -> None:
        """Changes ``logits [R, V]``, contiguous. ``counts``, float32 ``[P, V]``, holds zeros and does so afterwards."""
        # Flat views and whole-column operations: they are ten times as fast as indices of two dimensions.
        flat, flat_counts, size = logits.view(-1), counts.view(-1), logits.shape[1]
        for first in range(0, len(self.offsets) - 1, len(counts)):
            last = min(first + len(counts), len(self.offsets) - 1)
            part = slice(int(self.offsets[first]), int(self.offsets[last]))
            owner, tokens = self.owner[part], self.tokens[part]
            here = (owner - first) * size + tokens
            flat_counts.index_add_(0, here, self.output[part])
            seen = flat_counts.index_select(0, here)
            flat_counts.index_fill_(0, here, 0.0)
            there = self.rows.index_select(0, owner) * size + tokens
            values, repetition = flat.index_select(0, there), self.repetition.index_select(0, owner)
            values = torch.where(values > 0, values / repetition, values * repetition)
            values -= seen * self.frequency.index_select(0, owner)
            values -= (seen > 0) * self.presence.index_select(0, owner)
            flat.index_copy_(0, there, values)  # a token that is there several times has the same value each time


@dataclass(frozen=True, slots=True)
class Restrictions:
    """Tokens that may not be drawn. Owners are places in ``rows``, but those of allowed ids: in ``allowed_rows``.

    There are four kinds, from the weightiest: what the grammar forbids, what is not in the allowed ids, what would
    complete a bad word, and the ids that stop before ``min_tokens``. Together they may leave a row nothing. So each
    holds only where it leaves some of the tokens that the weightier ones left: a grammar that allows only the end wins
    over ``min_tokens``, and over allowed ids and bad words, too.
    """

    rows: torch.Tensor  # int64 [Q]
    stop_owner: torch.Tensor  # int64
    stop_ids: torch.Tensor  # int64
    bad_owner: torch.Tensor  # int64
    bad_ids: torch.Tensor  # int64; last tokens of bad words
    bad_found: torch.Tensor  # bool; whether the word's others are the last tokens of the row
    allowed_rows: torch.Tensor  # int64; places in rows that have allowed ids
    allowed_owner: torch.Tensor  # int64
    allowed_ids: torch.Tensor  # int64

    def apply_(self, logits: torch.Tensor, forbidden: torch.Tensor | None) -> None:
        """Sets logits of tokens that may not be drawn to -inf in ``logits [R, V]``.

        Args:
            logits: float32.
            forbidden: bool ``[Q, V]``, by the grammar; None where no row has one.
        """
        vocab_size = logits.shape[1]
        # A sum of reasons per token. Of two sums, the one with the weightier reason is larger, so the tokens that may
        # be drawn are those with the smallest sum.
        reasons = torch.zeros((len(self.rows), vocab_size), dtype=torch.int8, device=logits.device)
        if len(self.bad_ids):
            flat = self.bad_owner * vocab_size + self.bad_ids
            reasons.view(-1).scatter_reduce_(0, flat, self.bad_found.to(torch.int8) * _BAD, "amax")
        if len(self.stop_ids):
            flat = self.stop_owner * vocab_size + self.stop_ids
            reasons.view(-1).index_copy_(0, flat, reasons.view(-1).index_select(0, flat) | _STOP)
        if len(self.allowed_rows):
            outside = torch.full((len(self.allowed_rows), vocab_size), _OUTSIDE, dtype=torch.int8, device=logits.device)
            outside.view(-1).index_fill_(0, self.allowed_owner * vocab_size + self.allowed_ids, 0)
            reasons[self.allowed_rows] |= outside
        if forbidden is not None:
            reasons |= forbidden.to(torch.int8) * _UNGRAMMATICAL
        excluded = reasons > reasons.amin(dim=1, keepdim=True)
        changed = logits.index_select(0, self.rows).masked_fill_(excluded, -torch.inf)
        logits.index_copy_(0, self.rows, changed)


@dataclass(frozen=True, slots=True)
class Changes:
    """All that happens to the logits of one step before temperature."""

    rows: torch.Tensor  # int64 [Q] whose logits change
    bias: Bias | None
    penalties: Penalties | None
    restrictions: Restrictions | None


def unpack(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns which tokens a grammar forbids, bool ``[G, V]``.

    Args:
        words: the packed rows of a `GrammarMask` as uint8 ``[G, 4 · ceil(V / 32)]``.
        vocab_size: V.
    """
    device = words.device
    ones, places = torch.ones(8, dtype=torch.uint8, device=device), torch.arange(8, dtype=torch.uint8, device=device)
    forbidden = (words.unsqueeze(-1) & torch.bitwise_left_shift(ones, places)) == 0
    return forbidden.view(len(words), -1)[:, :vocab_size]
