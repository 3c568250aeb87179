"""Between the scheduler's types and the messages of ``tercet.v1``."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, TypeVar

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
from tercet_shared.pooling import Pooling
from tercet_shared.sampling_params import OFF, SamplingParams
from tercet_shared.structured import Grammar, GrammarKind
from tercet_shared.wire.step import offsets_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from tercet_core.scheduling.logprobs import PromptRun, TokenLogProbs
    from tercet_core.scheduling.outputs import Output, RowLogProbs
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
_TOKEN_BYTES, _TOP_BYTES = 12, 8
"""Bytes of a token's log-probability, rank and offset, and of each of its alternatives."""


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
    pooling = _member(Pooling, submit.pooling, "pooling")
    return Request(
        front_end=front_end,
        handle=submit.handle,
        attempt=submit.attempt,
        request_id=submit.request_id,
        prompt_len=len(prompt),
        tokens=np.concatenate([prompt, resumed]) if len(resumed) else prompt,
        # How tokens are drawn says nothing about a vector.
        params=_params(submit.sampling) if pooling is Pooling.NONE else SamplingParams(),
        root=root_key(model_fingerprint, salt=submit.cache_salt),
        priority=submit.priority,
        tenant=submit.tenant,
        pooling=pooling,
        grammar=_grammar(submit.grammar) if submit.HasField("grammar") else None,
        traceparent=submit.traceparent,
    )


def _params(sampling: pb.Sampling) -> SamplingParams:
    if len(sampling.bias_ids) != len(sampling.bias_values):
        raise InvalidRequestError("logit_bias must have one value for each token.", param="logit_bias")
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        eos_token_ids=tuple(sampling.eos_token_ids),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(zip(sampling.bias_ids, sampling.bias_values, strict=True)),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in sampling.bad_words),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else OFF,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else OFF,
    )


def _grammar(message: pb.Grammar) -> Grammar:
    param = message.param or "response_format"
    grammar = Grammar(_member(GrammarKind, message.kind, param), message.text, param)
    grammar.check()
    return grammar


E = TypeVar("E", bound=Enum)


def _member(kind: type[E], value: int, param: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise InvalidRequestError(f"{param}: this core knows no kind {value}.", param=param) from None


def _ids(raw: bytes, param: str) -> I32:
    if len(raw) % 4:
        raise InvalidRequestError("Token ids must be packed as 32-bit integers.", param=param)
    return np.frombuffer(raw, "<i4")


# ---------------------------------------------------------------------------------------------- core → front end


def step_frames(output: Output, *, max_bytes: int) -> list[pb.EngineFrame]:
    """Returns ``output`` as one frame, or as several where it would exceed ``max_bytes``.

    What is about prompts comes first. A row is never split between frames; one row alone is bounded by the model's
    length.
    """
    frames = [frame for run in output.prompt_logprobs for frame in _prompt_frames(run, max_bytes)]
    rows = len(output.handles)
    if not rows:
        return frames
    plain = output.logprobs is None and not output.pooled
    if plain and rows * _ROW_BYTES + len(output.token_ids) * 4 <= max_bytes:
        return [*frames, pb.EngineFrame(step=_step(output, 0, rows))]
    sizes = _row_sizes(output)
    if int(sizes.sum()) <= max_bytes:
        return [*frames, pb.EngineFrame(step=_step(output, 0, rows))]
    start = 0
    total = np.cumsum(sizes)
    while start < rows:
        base = int(total[start - 1]) if start else 0
        stop = max(int(np.searchsorted(total, base + max_bytes, side="right")), start + 1)
        frames.append(pb.EngineFrame(step=_step(output, start, stop)))
        start = stop
    return frames


def _row_sizes(output: Output) -> npt.NDArray[np.int64]:
    """Returns about how many bytes each row takes in a frame."""
    lengths = np.diff(output.token_offsets)
    sizes: npt.NDArray[np.int64] = lengths.astype(np.int64) * 4 + _ROW_BYTES
    if (own := output.logprobs) is not None:
        bounds = own.values.top_offsets[offsets_of(lengths[own.rows].tolist())]
        sizes[own.rows] += lengths[own.rows] * _TOKEN_BYTES + np.diff(bounds) * _TOP_BYTES
    for row, vector in output.pooled:
        sizes[row] += vector.nbytes
    return sizes


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
    if len(output.start_rows):
        first, last = np.searchsorted(output.start_rows, [start, stop])
        step.start_rows = (output.start_rows[first:last] - np.int32(start)).tobytes()
        step.start_cached = output.start_cached[first:last].tobytes()
    if output.logprobs is not None:
        _add_logprobs(step, output, output.logprobs, start, stop)
    pooled = [(row, vector) for row, vector in output.pooled if start <= row < stop]
    if pooled:
        step.pooled_rows = np.array([row - start for row, _ in pooled], np.int32).tobytes()
        step.pooled = b"".join(vector.tobytes() for _, vector in pooled)
    return step


def _add_logprobs(step: pb.Step, output: Output, own: RowLogProbs, start: int, stop: int) -> None:
    first, last = np.searchsorted(own.rows, [start, stop]).tolist()
    if first == last:
        return
    tokens = offsets_of(np.diff(output.token_offsets)[own.rows].tolist())
    step.logprobs.CopyFrom(_logprobs(own.values.slice(int(tokens[first]), int(tokens[last]))))
    step.logprobs.rows = (own.rows[first:last] - np.int32(start)).tobytes()


def _prompt_frames(run: PromptRun, max_bytes: int) -> Iterator[pb.EngineFrame]:
    """Yields the frames of a run, cut where one would exceed ``max_bytes``."""
    total = np.arange(1, len(run.values) + 1) * _TOKEN_BYTES + run.values.top_offsets[1:].astype(np.int64) * _TOP_BYTES
    start = 0
    while start < len(run.values):
        base = int(total[start - 1]) if start else 0
        stop = max(int(np.searchsorted(total, base + max_bytes, side="right")), start + 1)
        part = pb.PromptLogProbs(
            handle=run.handle,
            attempt=run.attempt,
            first=run.first + start,
            logprobs=_logprobs(run.values.slice(start, stop)),
        )
        yield pb.EngineFrame(prompt_logprobs=[part])
        start = stop


def _logprobs(values: TokenLogProbs) -> pb.LogProbs:
    return pb.LogProbs(
        token_logprobs=values.logprobs.tobytes(),
        token_ranks=values.ranks.tobytes(),
        top_offsets=values.top_offsets.tobytes(),
        top_ids=values.top_ids.tobytes(),
        top_logprobs=values.top_logprobs.tobytes(),
    )


def stats_of(
    scheduler: Scheduler,
    step_seconds: float,
    *,
    token_seconds: float,
    pending_tokens: int,
    without_worker_s: float,
    worker_left: bool,
) -> pb.Stats:
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
        token_ms=token_seconds * 1e3,
        pending_tokens=pending_tokens,
        without_worker_s=without_worker_s,
        worker_left=worker_left and without_worker_s > 0,
    )
