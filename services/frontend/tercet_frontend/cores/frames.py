"""What the core's frames say, checked: columns, errors, limits, load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tercet_frontend.cores.interface import FinishReason
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
    from collections.abc import Mapping

    from tercet_frontend.cores.interface import GenerationRequest

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

    @classmethod
    def of(cls, welcome: engine_pb2.Welcome) -> CoreInfo:
        """Returns what ``welcome`` says."""
        return cls(**{name: getattr(welcome, name) for name in cls.__slots__})


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

    @classmethod
    def of(cls, stats: engine_pb2.Stats) -> CoreStats:
        """Returns what ``stats`` says."""
        return cls(**{name: getattr(stats, name) for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class StepColumns:
    """A Step frame as Python integers: n rows, of which m entries say that the row has ended."""

    handles: list[int]  # [n]
    attempts: list[int]  # [n]
    ends: list[int]  # [n] where the row's ids end; they begin where those of the row before end
    ids: list[int]
    finish_rows: list[int]  # [m]
    finish_reasons: list[int]  # [m]
    finish_stop_ids: list[int]  # [m]
    finish_cached: list[int]  # [m]


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
    except ValueError as error:
        raise ProtocolError("A column of a step frame has a wrong size.") from error
    n, m = len(handles), len(rows)
    if len(attempts) != n or len(offsets) != n + 1 or not len(reasons) == len(stop_ids) == len(cached) == m:
        raise ProtocolError("The columns of a step frame differ in length.")
    if offsets[0] != 0 or offsets[-1] != len(ids) or (n and (offsets[1:] < offsets[:-1]).any()):
        raise ProtocolError("The token offsets of a step frame are malformed.")
    if m and not (rows.min() >= 0 and rows.max() < n):
        raise ProtocolError("A step frame ends a row that it does not have.")
    return StepColumns(
        handles.tolist(),
        attempts.tolist(),
        offsets[1:].tolist(),
        ids.tolist(),
        rows.tolist(),
        reasons.tolist(),
        stop_ids.tolist(),
        cached.tolist(),
    )


def error_of(kind: int, message: str, param: str) -> TercetError:
    """Returns the error that a core reported; kinds that are not known are faults of ours."""
    return _ERRORS.get(kind, InternalError)(message or "The request failed.", param=param or None)


def submit_message(request: GenerationRequest, handle: int) -> engine_pb2.Submit:
    """Returns the Submit of a request's first attempt."""
    params = request.params
    return engine_pb2.Submit(
        handle=handle,
        request_id=request.request_id,
        prompt_ids=request.prompt_ids.astype("<i4", copy=False).tobytes(),
        sampling=engine_pb2.Sampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
            eos_token_ids=params.eos_token_ids,
        ),
        tenant=request.tenant,
        priority=request.priority,
        traceparent=request.traceparent,
        cache_salt=request.cache_salt,
    )
