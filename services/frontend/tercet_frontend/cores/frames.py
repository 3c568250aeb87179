"""What the core's frames say, checked: columns, errors, limits, load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tercet_frontend.cores.interface import FinishReason, TokenLogProbs
from tercet_proto.v1 import engine_pb2
from tercet_shared.errors import (
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    TercetError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt


FINISH_REASONS: Mapping[int, FinishReason] = {
    engine_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    engine_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    engine_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}
"""Reasons that are not errors."""

_ERRORS: Mapping[int, type[TercetError]] = {
    engine_pb2.ERROR_KIND_INVALID: InvalidRequestError,
    engine_pb2.ERROR_KIND_CONTEXT_LENGTH: ContextLengthError,
    engine_pb2.ERROR_KIND_OVERLOADED: OverloadedError,
    engine_pb2.ERROR_KIND_UNAVAILABLE: UnavailableError,
}


@dataclass(frozen=True, slots=True)
class CoreInfo:
    """What a core said about itself in its Welcome; fields as in the proto."""

    core_id: str
    incarnation: str
    model_name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    block_size: int
    num_blocks: int
    max_slots: int
    max_model_len: int
    max_submit_bytes: int
    served_names: tuple[str, ...]

    @classmethod
    def of(cls, welcome: engine_pb2.Welcome) -> CoreInfo:
        """Returns what ``welcome`` says."""
        plain = {name: getattr(welcome, name) for name in cls.__slots__ if name != "served_names"}
        return cls(**plain, served_names=tuple(welcome.served_names))


@dataclass(frozen=True, slots=True)
class CoreStats:
    """How loaded a core is; fields as in the proto."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    step_ms: float = 0.0
    pending_tokens: int = 0
    token_ms: float = 0.0
    without_worker_s: float = 0.0
    worker_left: bool = False

    @classmethod
    def of(cls, stats: engine_pb2.Stats) -> CoreStats:
        """Returns what ``stats`` says."""
        return cls(**{name: getattr(stats, name) for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class StepColumns:
    """A Step frame as Python values: n rows, of which m entries say that the row has ended.

    What few requests ask for is apart, and empty in most frames.
    """

    handles: list[int]  # [n]
    attempts: list[int]  # [n]
    ends: list[int]  # [n] where the row's ids end; they begin where those of the row before end
    ids: list[int]
    finish_rows: list[int]  # [m]
    finish_reasons: list[int]  # [m]
    finish_stop_ids: list[int]  # [m]
    finish_cached: list[int]  # [m]
    logprobs: Sequence[tuple[int, list[TokenLogProbs]]] = ()  # (row, one for each of its ids)
    starts: Sequence[tuple[int, int]] = ()  # (row, prompt tokens that came from the prefix cache)
    pooled: Sequence[tuple[int, npt.NDArray[np.float32]]] = ()  # (row, float32[hidden size])


def step_columns(step: engine_pb2.Step) -> StepColumns:
    """Returns the columns of ``step``.

    Raises:
        ProtocolError: their lengths or offsets do not fit together.
    """
    try:
        handles = np.frombuffer(step.handles, "<u8")
        attempts = np.frombuffer(step.attempts, "<u4")
        offsets = np.frombuffer(step.token_offsets, "<i4")
        ids = np.frombuffer(step.token_ids, "<i4")
        rows = np.frombuffer(step.finish_rows, "<i4")
        reasons = np.frombuffer(step.finish_reasons, "u1")
        stop_ids = np.frombuffer(step.finish_stop_ids, "<i4")
        cached = np.frombuffer(step.finish_cached, "<i4")
        n, m = len(handles), len(rows)
        if len(attempts) != n or len(offsets) != n + 1 or not len(reasons) == len(stop_ids) == len(cached) == m:
            raise ProtocolError("The columns of a step frame differ in length.")
        if offsets[0] != 0 or offsets[-1] != len(ids) or (n and (offsets[1:] < offsets[:-1]).any()):
            raise ProtocolError("The token offsets of a step frame are malformed.")
        _check_rows(rows, n)
        logprobs = _row_logprobs(step.logprobs, offsets) if step.HasField("logprobs") else ()
        starts = _starts(step, n) if step.start_rows else ()
        pooled = _pooled(step, n) if step.pooled_rows else ()
    except ValueError as error:
        raise ProtocolError("A column of a step frame has a wrong size.") from error
    return StepColumns(
        handles.tolist(),
        attempts.tolist(),
        offsets[1:].tolist(),
        ids.tolist(),
        rows.tolist(),
        reasons.tolist(),
        stop_ids.tolist(),
        cached.tolist(),
        logprobs,
        starts,
        pooled,
    )


def token_logprobs(columns: engine_pb2.LogProbs, count: int | None = None) -> list[TokenLogProbs]:
    """Returns log-probabilities, one for each token.

    Args:
        columns: as they came.
        count: tokens that they must be of; None takes what there is.

    Raises:
        ProtocolError: their lengths or offsets do not fit together.
    """
    try:
        logprobs = np.frombuffer(columns.token_logprobs, "<f4")
        ranks = np.frombuffer(columns.token_ranks, "<i4")
        offsets = np.frombuffer(columns.top_offsets, "<i4")
        top_ids = np.frombuffer(columns.top_ids, "<i4")
        top_logprobs = np.frombuffer(columns.top_logprobs, "<f4")
    except ValueError as error:
        raise ProtocolError("A column of log-probabilities has a wrong size.") from error
    t = len(logprobs)
    fits = len(ranks) == t and len(offsets) == t + 1 and len(top_ids) == len(top_logprobs)
    if not fits or (count is not None and count != t):
        raise ProtocolError("The columns of log-probabilities differ in length.")
    if offsets[0] != 0 or offsets[-1] != len(top_ids) or (offsets[1:] < offsets[:-1]).any():
        raise ProtocolError("The offsets of log-probabilities are malformed.")
    bounds, ids, values = offsets.tolist(), top_ids.tolist(), top_logprobs.tolist()
    return [
        TokenLogProbs(logprob, rank, ids[begin:end], values[begin:end])
        for logprob, rank, begin, end in zip(logprobs.tolist(), ranks.tolist(), bounds[:-1], bounds[1:], strict=True)
    ]


def _row_logprobs(
    columns: engine_pb2.LogProbs, offsets: npt.NDArray[np.int32]
) -> Sequence[tuple[int, list[TokenLogProbs]]]:
    rows = np.frombuffer(columns.rows, "<i4")
    _check_rows(rows, len(offsets) - 1)
    counts = offsets[rows + 1] - offsets[rows]
    tokens = token_logprobs(columns, int(counts.sum()))
    ends = np.cumsum(counts)
    bounds = zip(rows.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
    return [(row, tokens[begin:end]) for row, begin, end in bounds]


def _starts(step: engine_pb2.Step, n: int) -> Sequence[tuple[int, int]]:
    rows = np.frombuffer(step.start_rows, "<i4")
    cached = np.frombuffer(step.start_cached, "<i4")
    _check_rows(rows, n)
    if len(rows) != len(cached):
        raise ProtocolError("The columns of a step frame differ in length.")
    return list(zip(rows.tolist(), cached.tolist(), strict=True))


def _pooled(step: engine_pb2.Step, n: int) -> Sequence[tuple[int, npt.NDArray[np.float32]]]:
    rows = np.frombuffer(step.pooled_rows, "<i4")
    _check_rows(rows, n)
    vectors = np.frombuffer(step.pooled, "<f4").reshape(len(rows), -1)  # raises ValueError where it does not divide
    return list(zip(rows.tolist(), vectors.astype(np.float32), strict=True))


def _check_rows(rows: npt.NDArray[np.int32], n: int) -> None:
    if len(rows) and not (rows.min() >= 0 and rows.max() < n):
        raise ProtocolError("A step frame names a row that it does not have.")


def error_of(kind: int, message: str, param: str) -> TercetError:
    """Returns the error that a core reported; kinds that are not known are faults of ours."""
    return _ERRORS.get(kind, InternalError)(message or "The request failed.", param=param or None)
