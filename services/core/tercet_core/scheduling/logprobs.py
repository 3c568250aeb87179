"""Log-probabilities on their way from a worker's result to the front ends: checked, picked, put in order.

They are columns all the way: of each token its own log-probability and rank, and a run of alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tercet_shared.errors import ProtocolError

if TYPE_CHECKING:
    import numpy.typing as npt

    from tercet_shared.wire.step import F32, I32, LogProbColumns


@dataclass(slots=True)
class TokenLogProbs:
    """Log-probabilities of t tokens; see `tercet_shared.wire.step.LogProbColumns`."""

    logprobs: F32  # [t]
    ranks: I32  # [t]
    top_offsets: I32  # [t + 1]
    top_ids: I32
    top_logprobs: F32

    @classmethod
    def of(cls, columns: LogProbColumns) -> TokenLogProbs:
        """Returns those of all tokens of ``columns``, in their order."""
        return cls(columns.logprobs, columns.ranks, columns.top_offsets, columns.top_ids, columns.top_logprobs)

    def __len__(self) -> int:
        return len(self.logprobs)

    def pick(self, tokens: npt.NDArray[np.integer]) -> TokenLogProbs:
        """Returns those of the tokens with these indices, in this order."""
        lengths = np.diff(self.top_offsets)[tokens]
        offsets = np.zeros(len(tokens) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        flat = np.repeat(self.top_offsets[tokens] - offsets[:-1], lengths) + np.arange(int(offsets[-1]), dtype=np.int32)
        return TokenLogProbs(
            self.logprobs[tokens], self.ranks[tokens], offsets, self.top_ids[flat], self.top_logprobs[flat]
        )

    def slice(self, start: int, stop: int) -> TokenLogProbs:
        """Returns those of a run of tokens."""
        first, last = int(self.top_offsets[start]), int(self.top_offsets[stop])
        return TokenLogProbs(
            self.logprobs[start:stop],
            self.ranks[start:stop],
            self.top_offsets[start : stop + 1] - first,
            self.top_ids[first:last],
            self.top_logprobs[first:last],
        )


@dataclass(slots=True)
class PromptRun:
    """Log-probabilities of a run of prompt tokens of one request.

    Attributes:
        handle: the request, as its front end calls it.
        attempt: which submission of it.
        first: where in the prompt the run begins; at least 1.
        values: of its tokens.
    """

    handle: int
    attempt: int
    first: int
    values: TokenLogProbs


def joined(parts: list[TokenLogProbs]) -> TokenLogProbs:
    """Returns those of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    lengths = np.concatenate([np.diff(part.top_offsets) for part in parts])
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return TokenLogProbs(
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
        offsets,
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
    )


def ranges(starts: I32, lengths: I32) -> I32:
    """Returns the indices of runs that begin at ``starts``, one run after the other."""
    ends = np.cumsum(lengths, dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    indices: I32 = np.repeat(starts - (ends - lengths), lengths).astype(np.int32)
    indices += np.arange(total, dtype=np.int32)
    return indices


def check_rows(columns: LogProbColumns, rows: int, counts: I32 | None, step_id: int) -> None:
    """Raises `ProtocolError` unless the rows are of the step, each once, with as many tokens as ``counts`` says."""
    own = columns.rows
    sound = not len(own) or (int(own[0]) >= 0 and int(own[-1]) < rows and bool((np.diff(own) > 0).all()))
    if not sound or (counts is not None and (np.diff(columns.token_offsets) != counts[own]).any()):
        raise ProtocolError(f"The worker's answer to step {step_id} has log-probabilities of wrong rows.")
