"""Between the scheduler's types and the messages of ``tercet.v1``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tercet_core.scheduling.request import FrontEnd, Request
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.errors import (
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    LinkError,
    OverloadedError,
    RequestError,
    TercetError,
    UnavailableError,
)
from tercet_shared.hashing import root_key
from tercet_shared.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tercet_core.scheduling.outputs import Output
    from tercet_core.scheduling.scheduler import Scheduler
    from tercet_shared.wire.step import I32

_KINDS: tuple[tuple[type[TercetError], pb.ErrorKind], ...] = (
    # Subclasses before their bases: the first match counts.
    (ContextLengthError, pb.ERROR_KIND_CONTEXT_LENGTH),
    (RequestError, pb.ERROR_KIND_INVALID),
    (OverloadedError, pb.ERROR_KIND_OVERLOADED),
    (UnavailableError, pb.ERROR_KIND_UNAVAILABLE),
    (LinkError, pb.ERROR_KIND_UNAVAILABLE),
    (InternalError, pb.ERROR_KIND_INTERNAL),
)

_ROW_BYTES = 20
"""Bytes of a row in a step frame without its tokens: handle, attempt, offset and some of an end."""


def error_kind(error: TercetError) -> pb.ErrorKind:
    """Returns what ``error`` is called on the stream."""
    return next((kind for cls, kind in _KINDS if isinstance(error, cls)), pb.ERROR_KIND_INTERNAL)


def rejected(handle: int, attempt: int, error: TercetError) -> pb.Rejected:
    """Returns the answer to a submit that was not taken."""
    return pb.Rejected(
        handle=handle, attempt=attempt, kind=error_kind(error), message=error.message, param=error.param or ""
    )


def request_from(submit: pb.Submit, front_end: FrontEnd, model_fingerprint: str) -> Request:
    """Returns the scheduler's request. Raises `InvalidRequestError` when the message is malformed."""
    prompt, resumed = _ids(submit.prompt_ids, "prompt"), _ids(submit.resumed_ids, "resumed_ids")
    sampling = submit.sampling
    return Request(
        front_end=front_end,
        handle=submit.handle,
        attempt=submit.attempt,
        request_id=submit.request_id,
        prompt_len=len(prompt),
        tokens=np.concatenate([prompt, resumed]) if len(resumed) else prompt,
        params=SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=tuple(sampling.stop_token_ids),
            eos_token_ids=tuple(sampling.eos_token_ids),
        ),
        root=root_key(model_fingerprint, salt=submit.cache_salt),
        priority=submit.priority,
        tenant=submit.tenant,
    )


def _ids(raw: bytes, param: str) -> I32:
    if len(raw) % 4:
        raise InvalidRequestError("Token ids must be packed as 32-bit integers.", param=param)
    return np.frombuffer(raw, "<i4")


def step_frames(output: Output, *, max_bytes: int) -> list[pb.EngineFrame]:
    """Returns ``output`` as one frame, or as several where it would exceed ``max_bytes``.

    A row is never split between frames; one row alone is bounded by the model's length.
    """
    rows = len(output.handles)
    sizes = np.diff(output.token_offsets) * 4 + _ROW_BYTES
    if int(sizes.sum()) <= max_bytes:
        return [pb.EngineFrame(step=_step(output, 0, rows))]
    frames = []
    start = 0
    total = np.cumsum(sizes)
    while start < rows:
        base = int(total[start - 1]) if start else 0
        stop = max(int(np.searchsorted(total, base + max_bytes, side="right")), start + 1)
        frames.append(pb.EngineFrame(step=_step(output, start, stop)))
        start = stop
    return frames


def _step(output: Output, start: int, stop: int) -> pb.Step:
    offsets = output.token_offsets[start : stop + 1]
    step = pb.Step(
        handles=output.handles[start:stop].tobytes(),
        attempts=output.attempts[start:stop].tobytes(),
        token_offsets=(offsets - offsets[0]).tobytes(),
        token_ids=output.token_ids[offsets[0] : offsets[-1]].tobytes(),
    )
    ends = [end for end in output.ends if start <= end.row < stop]
    if ends:
        step.finish_rows = np.array([end.row - start for end in ends], np.int32).tobytes()
        step.finish_reasons = bytes(end.ending.value for end in ends)
        step.finish_stop_ids = np.array([end.stop_id for end in ends], np.int32).tobytes()
        step.finish_cached = np.array([end.cached_tokens for end in ends], np.int32).tobytes()
        step.errors.extend(
            pb.RowError(
                row=end.row - start,
                kind=error_kind(end.error),
                message=end.error.message,
                param=end.error.param or "",
            )
            for end in ends
            if end.error is not None
        )
    return step


def stats_of(scheduler: Scheduler, step_seconds: float) -> pb.Stats:
    """Returns the numbers that every front end hears regularly."""
    counters = scheduler.counters
    return pb.Stats(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        free_blocks=scheduler.pool.available,
        num_blocks=scheduler.pool.num_blocks,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        output_tokens=counters.output_tokens,
        preemptions=counters.preemptions,
        recomputed_tokens=counters.recomputed_tokens,
        step_ms=step_seconds * 1e3,
    )
