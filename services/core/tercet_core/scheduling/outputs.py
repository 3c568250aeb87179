"""What a step yields for the front ends: columns again, one set per front end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from tercet_core.scheduling.request import Ending, FrontEnd
    from tercet_shared.errors import TercetError
    from tercet_shared.wire.step import I32


@dataclass(frozen=True, slots=True)
class End:
    """The end of the request in one row.

    Attributes:
        row: index into the rows of its `Output`.
        ending: why.
        stop_id: the end-of-sequence or stop token that was drawn, else -1.
        cached_tokens: prompt tokens found in the prefix cache.
        error: with `Ending.ERROR`.
    """

    row: int
    ending: Ending
    stop_id: int = -1
    cached_tokens: int = 0
    error: TercetError | None = None


@dataclass(slots=True)
class Output:
    """New tokens and ends of one front end's requests; a row may have no token (only an end)."""

    front_end: FrontEnd
    handles: npt.NDArray[np.uint64]  # [n]
    attempts: npt.NDArray[np.uint32]  # [n]
    token_offsets: I32  # [n + 1]
    token_ids: I32
    ends: list[End] = field(default_factory=list)  # ascending by row


def merged(outputs: list[Output]) -> Output:
    """Returns outputs of one front end, in their order, as one, in which a request has one row.

    Rows keep the order in which their requests first appeared. A request whose end is among them has no later row.
    """
    if len(outputs) == 1:
        return outputs[0]
    handles = np.concatenate([output.handles for output in outputs])
    attempts = np.concatenate([output.attempts for output in outputs])
    lengths = np.concatenate([np.diff(output.token_offsets) for output in outputs])
    ids = np.concatenate([output.token_ids for output in outputs])
    identity = np.stack([handles, attempts.astype(np.uint64)], axis=1)
    _, first, group = np.unique(identity, axis=0, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    row_of = rank[group.reshape(-1)]  # the merged row of each row
    token_order = np.argsort(np.repeat(row_of, lengths), kind="stable")
    heads = np.sort(first)
    offsets = np.zeros(len(heads) + 1, np.int32)
    np.cumsum(np.bincount(row_of, weights=lengths, minlength=len(heads)).astype(np.int32), out=offsets[1:])
    bases = np.cumsum([0, *(len(output.handles) for output in outputs)])
    ends = [
        End(int(row_of[base + end.row]), end.ending, end.stop_id, end.cached_tokens, end.error)
        for output, base in zip(outputs, bases.tolist(), strict=False)
        for end in output.ends
    ]
    ends.sort(key=lambda end: end.row)
    return Output(outputs[0].front_end, handles[heads], attempts[heads], offsets, ids[token_order], ends)
