"""What a step yields for the front ends: columns again, one set per front end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tercet_core.scheduling.logprobs import joined
from tercet_shared.wire.step import empty_i32

if TYPE_CHECKING:
    import numpy.typing as npt

    from tercet_core.scheduling.logprobs import PromptRun, TokenLogProbs
    from tercet_core.scheduling.request import Ending, FrontEnd, Request
    from tercet_shared.errors import TercetError
    from tercet_shared.wire.step import F32, I32


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
class RowLogProbs:
    """Log-probabilities of the tokens of l rows of an `Output`, one row after the other: one for each of its tokens."""

    rows: I32  # [l] ascending
    values: TokenLogProbs


@dataclass(slots=True)
class Output:
    """New tokens and ends of one front end's requests; a row may have no token (only an end)."""

    front_end: FrontEnd
    handles: npt.NDArray[np.uint64]  # [n]
    attempts: npt.NDArray[np.uint32]  # [n]
    token_offsets: I32  # [n + 1]
    token_ids: I32
    ends: list[End] = field(default_factory=list)  # ascending by row
    start_rows: I32 = field(default_factory=empty_i32)  # [s] rows with the first token that their request yields here
    start_cached: I32 = field(default_factory=empty_i32)  # [s] prompt tokens of theirs that the prefix cache had
    logprobs: RowLogProbs | None = None
    pooled: list[tuple[int, F32]] = field(default_factory=list)  # rows and vectors of pooling requests; ascending
    prompt_logprobs: list[PromptRun] = field(default_factory=list)  # to be heard before the tokens; not about rows


def row_of(request: Request, tokens: list[int], end: End | None) -> Output:
    """Returns an output of one row."""
    return Output(
        request.front_end,
        np.array([request.handle], np.uint64),
        np.array([request.attempt], np.uint32),
        np.array([0, len(tokens)], np.int32),
        np.array(tokens, np.int32),
        [end] if end is not None else [],
    )


def prompt_output(front_end: FrontEnd, runs: list[PromptRun]) -> Output:
    """Returns an output without rows: what became known about prompts."""
    none = np.zeros(0, np.int32)
    handles, attempts = np.zeros(0, np.uint64), np.zeros(0, np.uint32)
    return Output(front_end, handles, attempts, np.zeros(1, np.int32), none, prompt_logprobs=runs)


def merged(outputs: list[Output]) -> Output:
    """Returns outputs of one front end, in their order, as one, in which a request has one row.

    Rows keep the order in which their requests first appeared. A request whose end is among them has no later row.
    """
    if len(outputs) == 1:
        return outputs[0]
    return _succession(outputs) or _merged_rows(outputs)


def _succession(outputs: list[Output]) -> Output | None:
    """Returns outputs of the same rows with one token each as one, or None where they are not such.

    Requests that decode yield them, step by step, to a front end that does not keep up. No output has two rows of a
    request.
    """
    first, last, count = outputs[0], outputs[-1], len(outputs)
    rows = len(first.handles)
    offsets = np.arange(rows + 1, dtype=np.int32)
    for output in outputs:
        if (
            len(output.handles) != rows
            or output.logprobs is not None
            or output.pooled
            or output.prompt_logprobs
            or (output.ends and output is not last)
            or (len(output.start_rows) and output is not first)
            or (output.handles != first.handles).any()
            or (output.attempts != first.attempts).any()
            or (output.token_offsets != offsets).any()
        ):
            return None
    return Output(
        first.front_end, first.handles, first.attempts, offsets * np.int32(count),
        np.array([output.token_ids for output in outputs]).T.ravel(), last.ends,
        start_rows=first.start_rows, start_cached=first.start_cached,
    )  # fmt: skip


def _merged_rows(outputs: list[Output]) -> Output:
    """Returns any outputs as one; see `merged`."""
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
    parts = [
        (output, row_of[base : base + len(output.handles)].astype(np.int32))
        for output, base in zip(outputs, bases.tolist(), strict=False)
    ]  # each output with the merged rows of its rows
    ends = [
        End(int(rows[end.row]), end.ending, end.stop_id, end.cached_tokens, end.error)
        for output, rows in parts
        for end in output.ends
    ]
    ends.sort(key=lambda end: end.row)
    starts = np.concatenate([rows[output.start_rows] for output, rows in parts])
    start_cached = np.concatenate([output.start_cached for output in outputs])
    by_row = np.argsort(starts, kind="stable")
    pooled = [(int(rows[row]), vector) for output, rows in parts for row, vector in output.pooled]
    return Output(
        outputs[0].front_end, handles[heads], attempts[heads], offsets, ids[token_order], ends,
        start_rows=starts[by_row],
        start_cached=start_cached[by_row],
        logprobs=_merged_logprobs(parts),
        pooled=sorted(pooled, key=lambda item: item[0]),
        prompt_logprobs=[run for output in outputs for run in output.prompt_logprobs],
    )  # fmt: skip


def _merged_logprobs(parts: list[tuple[Output, I32]]) -> RowLogProbs | None:
    """Returns the log-probabilities of outputs whose rows become these rows, in the order of the merged tokens."""
    found = [(output, rows, output.logprobs) for output, rows in parts if output.logprobs is not None]
    if not found:
        return None
    rows_of_tokens = np.concatenate(
        [np.repeat(rows[own.rows], np.diff(output.token_offsets)[own.rows]) for output, rows, own in found]
    )
    order = np.argsort(rows_of_tokens, kind="stable")
    values = joined([own.values for _, _, own in found])
    return RowLogProbs(np.unique(rows_of_tokens).astype(np.int32), values.pick(order))
