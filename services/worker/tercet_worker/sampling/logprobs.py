"""Log-probabilities of tokens: their own, their rank, and the most likely alternatives.

All are of the raw logits, natural logarithms in float32. Rank and alternatives follow one order: by log-probability,
then by lower id.

Legend: t tokens, V vocabulary, K alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from tercet_shared.wire.step import LogProbColumns
from tercet_worker.sampling.order import few_in_order
from tercet_worker.state.mirror import ragged_index

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of t tokens, each among its own V candidates; on the device."""

    logprobs: torch.Tensor  # float32 [t]; NaN where the logits are not finite
    ranks: torch.Tensor  # int64 [t]; 1: the most likely token
    top_ids: torch.Tensor  # int64 [t, K]
    top_logprobs: torch.Tensor  # float32 [t, K]

    def columns(self) -> tuple[torch.Tensor, ...]:
        """Returns them, in this order."""
        return self.logprobs, self.ranks, self.top_ids, self.top_logprobs


class Scorer:
    """Finds log-probabilities.

    Args:
        vocab_size: V.
        device: of the logits.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._ids = torch.arange(vocab_size, dtype=torch.int32, device=device)  # [V]

    def __call__(self, logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Scores:
        """Returns the scores of ``tokens``, int64 ``[t]``, for ``logits``, float32 ``[t, V]``.

        Args:
            logits: raw.
            tokens: one for each row of them.
            count: alternatives to find, at least 0; the vocabulary's at most.
        """
        values = torch.log_softmax(logits, dim=1)
        own = values.gather(1, tokens.unsqueeze(1))  # [t, 1]
        before = (values == own) & (self._ids < tokens.unsqueeze(1))
        before |= values > own
        ids, best = few_in_order(values, count, self._ids) if count else (tokens[:, None][:, :0], own[:, :0])
        return Scores(own.squeeze(1), before.sum(dim=1) + 1, ids, best)


@dataclass(frozen=True, slots=True)
class Scored:
    """Runs of scored tokens: l rows of a step, t tokens in all. Host columns, and scores for all runs end to end."""

    rows: npt.NDArray[np.int64]  # [l] rows of the plan, in any order
    first: npt.NDArray[np.int32]  # [l] where in prompt + output the run begins
    lengths: npt.NDArray[np.int32]  # [l]
    asked: npt.NDArray[np.int32]  # [l] alternatives per token
    scores: list[Scores]

    def taken(self, columns: Iterator[torch.Tensor]) -> list[Scores]:
        """Returns scores of the same kind that are made of the next ``columns``."""
        return [Scores(next(columns), next(columns), next(columns), next(columns)) for _ in self.scores]

    def broken(self) -> npt.NDArray[np.int64]:
        """Waits for the device, and returns the rows of which a score is not finite."""
        wrong = ~np.isfinite(_host(score.logprobs for score in self.scores))
        return np.unique(np.repeat(self.rows, self.lengths)[wrong])


def columns(runs: list[Scored], leave_out: npt.NDArray[np.int64]) -> LogProbColumns | None:
    """Waits for the device, and returns the columns for ``runs``, without some rows; None where no row is left."""
    rows, first, lengths, asked = (
        np.concatenate([getattr(run, name) for run in runs] or [np.zeros(0, np.int32)])
        for name in ("rows", "first", "lengths", "asked")
    )
    order = np.argsort(rows, kind="stable")
    order = order[~np.isin(rows[order], leave_out)]
    if not len(order):
        return None
    scores = [score for run in runs for score in run.scores]
    begins = np.cumsum(lengths) - lengths
    owner, place = ragged_index(lengths[order])
    token = begins[order][owner] + place  # [t] of the tokens as they lie in the scores
    wide = max(score.top_ids.shape[1] for score in scores)
    each = np.minimum(asked[order][owner], wide)  # [t] alternatives
    of, column = ragged_index(each)
    return LogProbColumns(
        rows=rows[order].astype(np.int32),
        first=first[order],
        token_offsets=_offsets(lengths[order]),
        logprobs=_host(score.logprobs for score in scores)[token],
        ranks=_host(score.ranks for score in scores)[token].astype(np.int32),
        top_offsets=_offsets(each),
        top_ids=_host(_wide(score.top_ids, wide) for score in scores)[token[of], column].astype(np.int32),
        top_logprobs=_host(_wide(score.top_logprobs, wide) for score in scores)[token[of], column],
    )


def _host(tensors: Iterable[torch.Tensor]) -> npt.NDArray[Any]:
    return np.concatenate([tensor.cpu().numpy() for tensor in tensors])


def _wide(tops: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(tops, (0, width - tops.shape[1]))


def _offsets(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
