"""The frames between core and worker: `tercet_shared.wire.step` as MessagePack, and checked on the way in.

Frames are MessagePack arrays whose NumPy columns travel as little-endian binary, so that encoding a step over a
thousand requests is a handful of memory copies.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from tercet_shared.errors import ProtocolError
from tercet_shared.ipc.layout import MAX_READERS
from tercet_shared.telemetry.tracing import PACKED_BYTES
from tercet_shared.wire.step import (
    I32,
    NO_NEW_SLOTS,
    PROTOCOL_VERSION,
    CoreWelcome,
    GrammarMask,
    LogProbColumns,
    NewSlots,
    PlanTrace,
    StepPlan,
    StepResult,
    WorkerHello,
)

_PLAN, _RESULT, _HELLO, _WELCOME, _MASK = 1, 2, 3, 4, 5
_TRACED_PLAN = 6
"""Parts of the frame of a plan in which something is traced: one more than others have."""

_MAX_GROUP_NAME = 128

_TYPES = {"int": int, "str": str, "bool": bool}
"""By annotation: what a field of a handshake may be."""

_DTYPES: dict[str, np.dtype[Any]] = {
    "i": np.dtype("<i4"),
    "f": np.dtype("<f4"),
    "u": np.dtype("<u8"),
    "w": np.dtype("<u4"),
    "?": np.dtype("?"),
}
_NEW_COLUMNS = (
    ("slots", "i"), ("epochs", "i"), ("prompt_lens", "i"), ("token_offsets", "i"), ("token_ids", "i"), ("cached", "i"),
    ("temperature", "f"), ("top_k", "i"), ("top_p", "f"), ("min_p", "f"), ("seed", "u"), ("min_len", "i"),
    ("stop_offsets", "i"), ("stop_ids", "i"), ("presence", "f"), ("frequency", "f"), ("repetition", "f"),
    ("logprobs", "i"), ("prompt_logprobs", "i"), ("pooling", "i"), ("bias_offsets", "i"), ("bias_ids", "i"),
    ("bias_values", "f"), ("allowed_offsets", "i"), ("allowed_ids", "i"), ("bad_offsets", "i"), ("bad_lens", "i"),
    ("bad_ids", "i"),
)  # fmt: skip
_NEW_RAGGED = (
    ("token_offsets", "token_ids"), ("stop_offsets", "stop_ids"), ("bias_offsets", "bias_ids"),
    ("allowed_offsets", "allowed_ids"), ("bad_offsets", "bad_lens"),
)  # fmt: skip
_NEW_ROW_COLUMNS = tuple(
    name
    for name, _ in _NEW_COLUMNS
    if name not in {"bias_values", "bad_ids"} and not any(name in pair for pair in _NEW_RAGGED)
)
_LOGPROB_COLUMNS = (
    ("rows", "i"), ("first", "i"), ("token_offsets", "i"), ("logprobs", "f"), ("ranks", "i"), ("top_offsets", "i"),
    ("top_ids", "i"), ("top_logprobs", "f"),
)  # fmt: skip
_PLAN_COLUMNS = (
    ("slots", "i"), ("num_tokens", "i"), ("computed", "i"), ("samples", "?"), ("block_offsets", "i"),
    ("block_ids", "i"), ("draft_offsets", "i"), ("draft_ids", "i"), ("appended_offsets", "i"),
    ("appended_ids", "i"), ("gated", "i"),
)  # fmt: skip


def encode_plan(plan: StepPlan) -> bytes:
    """Returns the frame of ``plan``."""
    new = [getattr(plan.new, name).tobytes() for name, _ in _NEW_COLUMNS] if len(plan.new) else None
    columns = [getattr(plan, name).tobytes() for name, _ in _PLAN_COLUMNS]
    frame = [_PLAN, plan.step_id, plan.freed.tobytes(), new, columns]
    if plan.trace is not None:
        frame.append([plan.trace.slots.tobytes(), plan.trace.spans, plan.trace.step])
    return bytes(msgpack.packb(frame))


def encode_result(result: StepResult) -> bytes:
    """Returns the frame of ``result``."""
    return bytes(
        msgpack.packb(
            [
                _RESULT,
                result.step_id,
                result.token_offsets.tobytes(),
                result.token_ids.tobytes(),
                result.not_finite.tobytes(),
                result.wait_us,
                result.run_us,
                result.error,
                _encode_logprobs(result.logprobs),
                _encode_logprobs(result.prompt_logprobs),
                result.pooled_rows.tobytes(),
                result.pooled.tobytes(),
            ]
        )
    )


def encode_mask(mask: GrammarMask) -> bytes:
    """Returns the frame of ``mask``."""
    return bytes(msgpack.packb([_MASK, mask.step_id, mask.words.tobytes()]))


def _encode_logprobs(columns: LogProbColumns | None) -> list[bytes] | None:
    return None if columns is None else [getattr(columns, name).tobytes() for name, _ in _LOGPROB_COLUMNS]


def encode_hello(hello: WorkerHello) -> bytes:
    """Returns the frame of ``hello``."""
    return bytes(msgpack.packb([_HELLO, {name: getattr(hello, name) for name in WorkerHello.__slots__}]))


def encode_welcome(welcome: CoreWelcome) -> bytes:
    """Returns the frame of ``welcome``."""
    return bytes(msgpack.packb([_WELCOME, {name: getattr(welcome, name) for name in CoreWelcome.__slots__}]))


def decode_plan(frame: bytes | memoryview) -> StepPlan:
    """Returns the plan in ``frame``; its arrays are read-only views of it. Raises `ProtocolError`."""
    return _plan(_unpack(frame))


def decode_from_core(frame: bytes | memoryview) -> StepPlan | GrammarMask:
    """Returns the plan or the mask in ``frame``; arrays are read-only views of it. Raises `ProtocolError`."""
    values = _unpack(frame)
    if values[0] == _MASK and len(values) == 3:
        return GrammarMask(step_id=_int(values[1]), words=_column(values[2], "w"))
    return _plan(values)


def _plan(frame: list[Any]) -> StepPlan:
    traced = len(frame) == _TRACED_PLAN
    step_id, freed, new, columns = _expect(frame[: _TRACED_PLAN - 1] if traced else frame, _PLAN, 5)
    if not isinstance(columns, list) or len(columns) != len(_PLAN_COLUMNS):
        raise ProtocolError("A step plan has a wrong number of columns.")
    values = {name: _column(raw, kind) for raw, (name, kind) in zip(columns, _PLAN_COLUMNS, strict=True)}
    if new is None:
        slots = NO_NEW_SLOTS
    elif isinstance(new, list) and len(new) == len(_NEW_COLUMNS):
        slots = NewSlots(**{name: _column(raw, kind) for raw, (name, kind) in zip(new, _NEW_COLUMNS, strict=True)})
    else:
        raise ProtocolError("A step plan's new slots have a wrong number of columns.")
    trace = _plan_trace(frame[-1]) if traced else None
    plan = StepPlan(step_id=_int(step_id), freed=_column(freed, "i"), new=slots, trace=trace, **values)
    _check_plan(plan)
    return plan


def _plan_trace(raw: object) -> PlanTrace:
    if not isinstance(raw, list) or len(raw) != 3 or not all(isinstance(part, bytes) for part in raw):
        raise ProtocolError("The trace of a step plan is malformed.")
    slots, spans, step = raw
    trace = PlanTrace(_column(slots, "i"), spans, step)
    if len(spans) != len(trace.slots) * PACKED_BYTES or len(step) not in {0, PACKED_BYTES}:
        raise ProtocolError("The trace of a step plan is malformed.")
    return trace


def _check_plan(plan: StepPlan) -> None:
    rows = len(plan.slots)
    if any(len(column) != rows for column in (plan.num_tokens, plan.computed, plan.samples)):
        raise ProtocolError("The columns of a step plan differ in length.")
    _check_ragged(plan.block_offsets, plan.block_ids, rows, optional=False)
    _check_ragged(plan.draft_offsets, plan.draft_ids, rows, optional=True)
    _check_ragged(plan.appended_offsets, plan.appended_ids, rows, optional=True)
    if plan.new is not NO_NEW_SLOTS:
        _check_new(plan.new)


def _check_new(new: NewSlots) -> None:
    fresh, lens = len(new), new.bad_lens
    for offsets, flat in _NEW_RAGGED:
        _check_ragged(getattr(new, offsets), getattr(new, flat), fresh, optional=False)
    if (
        any(len(getattr(new, name)) != fresh for name in _NEW_ROW_COLUMNS)
        or len(new.bias_values) != len(new.bias_ids)
        or (lens < 1).any()
        or lens.sum() != len(new.bad_ids)
    ):
        raise ProtocolError("The columns of a step plan's new slots differ in length.")


def _check_ragged(offsets: I32, flat: npt.NDArray[Any], rows: int, *, optional: bool) -> None:
    if not len(flat) and (not offsets.any() if len(offsets) == rows + 1 else optional and not len(offsets)):
        return  # most are empty, and cost one question instead of three
    if len(offsets) != rows + 1 or offsets[0] != 0 or offsets[-1] != len(flat) or (offsets[1:] < offsets[:-1]).any():
        raise ProtocolError("The offsets of a ragged column in a frame on the worker link are malformed.")


def decode_result(frame: bytes | memoryview) -> StepResult:
    """Returns the result in ``frame``; its arrays are read-only views of it. Raises `ProtocolError`."""
    step_id, offsets, ids, not_finite, wait_us, run_us, error, lps, prompt_lps, pooled_rows, pooled = _open(
        frame, _RESULT, 12
    )
    token_offsets, token_ids = _column(offsets, "i"), _column(ids, "i")
    _check_ragged(token_offsets, token_ids, max(len(token_offsets) - 1, 0), optional=False)
    rows, vectors = _column(pooled_rows, "i"), _column(pooled, "f")
    if len(vectors) % len(rows) if len(rows) else len(vectors):
        raise ProtocolError("The pooled vectors of a step result differ in length.")
    return StepResult(
        step_id=_int(step_id),
        token_offsets=token_offsets,
        token_ids=token_ids,
        not_finite=_column(not_finite, "i"),
        wait_us=_int(wait_us),
        run_us=_int(run_us),
        error=str(error),
        logprobs=_decode_logprobs(lps),
        prompt_logprobs=_decode_logprobs(prompt_lps),
        pooled_rows=rows,
        pooled=vectors,
    )


def _decode_logprobs(raw: object) -> LogProbColumns | None:
    if raw is None:
        return None
    if not isinstance(raw, list) or len(raw) != len(_LOGPROB_COLUMNS):
        raise ProtocolError("Log-probabilities on the worker link have a wrong number of columns.")
    out = LogProbColumns(**{n: _column(column, kind) for column, (n, kind) in zip(raw, _LOGPROB_COLUMNS, strict=True)})
    tokens = len(out.logprobs)
    if len(out.first) != len(out.rows) or len(out.ranks) != tokens or len(out.top_ids) != len(out.top_logprobs):
        raise ProtocolError("The columns of log-probabilities on the worker link differ in length.")
    _check_ragged(out.token_offsets, out.logprobs, len(out.rows), optional=False)
    _check_ragged(out.top_offsets, out.top_ids, tokens, optional=False)
    return out


def decode_hello(frame: bytes | memoryview) -> WorkerHello:
    """Returns the hello in ``frame``. Raises `ProtocolError` when it is not one, or of another protocol version."""
    (fields,) = _open(frame, _HELLO, 2)
    hello = WorkerHello(**_fields(fields, WorkerHello.__slots__, WorkerHello.__annotations__))
    _check_group(hello)
    return hello


def _check_group(hello: WorkerHello) -> None:
    ranks, stages = hello.ranks, hello.stages
    if not 1 <= ranks <= MAX_READERS or not 0 <= hello.rank < ranks:
        raise ProtocolError(
            f"A worker calls itself rank {hello.rank} of {ranks}; a group has 1 to {MAX_READERS} ranks, from 0 on."
        )
    if stages < 1 or ranks % stages:
        raise ProtocolError(f"A worker's group has {ranks} ranks, which cannot be split evenly into {stages} stages.")
    if (ranks > 1) != bool(hello.group) or len(hello.group) > _MAX_GROUP_NAME:
        raise ProtocolError(f"A worker with {ranks} ranks names the group {hello.group[:_MAX_GROUP_NAME]!r}.")
    if ranks == 1 and not hello.answers:
        raise ProtocolError("A single worker says that it does not answer.")


def decode_welcome(frame: bytes | memoryview) -> CoreWelcome:
    """Returns the welcome in ``frame``. Raises `ProtocolError` when it is not one, or of another protocol version."""
    (fields,) = _open(frame, _WELCOME, 2)
    return CoreWelcome(**_fields(fields, CoreWelcome.__slots__, CoreWelcome.__annotations__))


def _open(frame: bytes | memoryview, kind: int, length: int) -> list[Any]:
    return _expect(_unpack(frame), kind, length)


def _unpack(frame: bytes | memoryview) -> list[Any]:
    try:
        values = msgpack.unpackb(frame, max_array_len=64, max_map_len=64)
    except ValueError as error:  # msgpack's own errors derive from it
        raise ProtocolError(f"A frame on the worker link is not valid MessagePack: {error}") from error
    if not isinstance(values, list) or not values:
        raise ProtocolError("A frame on the worker link is of an unexpected kind.")
    return values


def _expect(values: list[Any], kind: int, length: int) -> list[Any]:
    if len(values) != length or values[0] != kind:
        raise ProtocolError("A frame on the worker link is of an unexpected kind.")
    return values[1:]


def _column(raw: object, kind: str) -> npt.NDArray[Any]:
    dtype = _DTYPES[kind]
    if not isinstance(raw, bytes) or len(raw) % dtype.itemsize:
        raise ProtocolError("A column in a frame on the worker link has a wrong size.")
    return np.frombuffer(raw, dtype)


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise ProtocolError("A number in a frame on the worker link is not an integer.")
    return value


def _fields(value: object, names: tuple[str, ...], kinds: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("protocol"), int):
        raise ProtocolError("A handshake on the worker link is malformed.")
    if value["protocol"] != PROTOCOL_VERSION:
        raise ProtocolError(
            f"The peer speaks version {value['protocol']} of the worker protocol, "
            f"this process version {PROTOCOL_VERSION}."
        )
    for name in names:
        # Exactly: True is an int otherwise.
        if type(value.get(name)) is not _TYPES[kinds[name]]:
            raise ProtocolError(f"The handshake field {name} is missing or of a wrong type.")
    return {name: value[name] for name in names}
