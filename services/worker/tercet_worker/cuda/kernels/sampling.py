"""Drawing: the best token, or one by the Gumbel-max trick with our counter-based noise, in one pass over the logits.

The noise has the bits of ``sampling/noise.py``; ties go to the lower id as in ``sampling/sampler.py``.

Legend: R rows, V vocabulary, P parts of a row, C columns of a part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from tercet_worker.sampling.noise import RowKeys

_COLUMNS = 4096


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(ids, a, b):
    word = _mix(_mix(ids.to(tl.uint32) ^ a) ^ b)
    uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2 to the power of -23
    return -tl.log(-tl.log(uniform))


@triton.jit
def _draw_parts(
    logits, highest, temperature, log_min_p, key_a, key_b, rows, best_scores, best_ids,
    vocab, stride, parts, size: tl.constexpr,
):  # fmt: skip
    place, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + place)
    ids = part * size + tl.arange(0, size)
    inside = ids < vocab
    value = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    scaled = (value - tl.load(highest + row)) / tl.load(temperature + row)
    a = tl.load(key_a + row).to(tl.uint32, bitcast=True)
    b = tl.load(key_b + row).to(tl.uint32, bitcast=True)
    score = tl.where(scaled < tl.load(log_min_p + row), float("-inf"), scaled + _gumbel(ids, a, b))
    score = tl.where(inside, score, float("-inf"))
    best = tl.max(score, axis=0)
    found = tl.min(tl.where((score == best) & inside, ids, 2147483647), axis=0)
    tl.store(best_scores + place * parts + part, best)
    tl.store(best_ids + place * parts + part, found)


@triton.jit
def _join_parts(best_scores, best_ids, rows, tokens, parts, size: tl.constexpr):
    place = tl.program_id(0)
    part = tl.arange(0, size)
    inside = part < parts
    score = tl.load(best_scores + place * parts + part, mask=inside, other=float("-inf"))
    ids = tl.load(best_ids + place * parts + part, mask=inside, other=2147483647)
    best = tl.max(score, axis=0)
    found = tl.min(tl.where((score == best) & inside, ids, 2147483647), axis=0)
    # A row of which nothing compares (NaN) has no best: it is reported as broken, and draws 0.
    tl.store(tokens + tl.load(rows + place), tl.where(found == 2147483647, 0, found).to(tl.int64))


def draw_(
    logits: torch.Tensor,
    highest: torch.Tensor,
    temperature: torch.Tensor,
    log_min_p: torch.Tensor,
    keys: RowKeys,
    rows: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Draws for some rows from all tokens, by ``argmax((logit - highest) / temperature + gumbel)``.

    Args:
        logits: float32 ``[R, V]``.
        highest: float32 ``[R]``, the best logit of each row.
        temperature: float32 ``[R]``, above 0 in the rows that draw.
        log_min_p: float32 ``[R]``; tokens further below the best are left out.
        keys: of the rows' seeds and positions.
        rows: int64, those that draw.
        tokens: int64 ``[R]``; written for these rows.
    """
    count, vocab = rows.shape[0], logits.shape[1]
    if not count:
        return
    parts = triton.cdiv(vocab, _COLUMNS)
    scores = torch.empty((count, parts), dtype=torch.float32, device=logits.device)
    ids = torch.empty((count, parts), dtype=torch.int32, device=logits.device)
    _draw_parts[(count, parts)](
        logits, highest, temperature.contiguous(), log_min_p.contiguous(), keys.a, keys.b, rows, scores, ids,
        vocab, logits.stride(0), parts, size=_COLUMNS,
    )  # fmt: skip
    _join_parts[(count,)](scores, ids, rows, tokens, parts, size=triton.next_power_of_2(parts))


@triton.jit
def _scan_parts(logits, highest, ids, finite, vocab, stride, parts, size: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * size + tl.arange(0, size)
    inside = column < vocab
    value = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
    number = value == value
    best = tl.max(tl.where(number, value, float("-inf")), axis=0)
    found = tl.min(tl.where((value == best) & inside, column, 2147483647), axis=0)
    sound = number & (tl.abs(value) < float("inf"))
    tl.store(highest + row * parts + part, best)
    tl.store(ids + row * parts + part, found)
    tl.store(finite + row * parts + part, tl.min(tl.where(inside, sound, True).to(tl.int32), axis=0))


@triton.jit
def _join_scans(part_highest, part_ids, part_finite, highest, tokens, finite, parts, size: tl.constexpr):
    row = tl.program_id(0)
    part = tl.arange(0, size)
    inside = part < parts
    value = tl.load(part_highest + row * parts + part, mask=inside, other=float("-inf"))
    ids = tl.load(part_ids + row * parts + part, mask=inside, other=2147483647)
    sound = tl.load(part_finite + row * parts + part, mask=inside, other=1)
    best = tl.max(value, axis=0)
    found = tl.min(tl.where((value == best) & inside, ids, 2147483647), axis=0)
    tl.store(highest + row, best)
    tl.store(tokens + row, tl.where(found == 2147483647, 0, found).to(tl.int64))
    tl.store(finite + row, tl.min(sound, axis=0) != 0)


def scan(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Is a ``Scan``: the highest logit of each row, the lowest id that has it, and whether all are finite.

    Where they are not, the other two are not to be used.
    """
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _COLUMNS)
    device = logits.device
    scratch = torch.empty((rows, parts), dtype=torch.float32, device=device)
    ids, sound = (torch.empty((rows, parts), dtype=torch.int32, device=device) for _ in range(2))
    highest = torch.empty(rows, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    if rows:
        _scan_parts[(rows, parts)](logits, scratch, ids, sound, vocab, logits.stride(0), parts, size=_COLUMNS)
        _join_scans[(rows,)](scratch, ids, sound, highest, tokens, finite, parts, size=triton.next_power_of_2(parts))
    return highest, tokens, finite


@triton.jit(do_not_specialize=["total"])
def _count(counts, owner, tokens, output, total, vocab, size: tl.constexpr):
    place = tl.program_id(0) * size + tl.arange(0, size)
    here = place < total
    flat = tl.load(owner + place, mask=here, other=0) * vocab + tl.load(tokens + place, mask=here, other=0)
    tl.atomic_add(counts + flat, tl.load(output + place, mask=here, other=0.0), mask=here)


@triton.jit(do_not_specialize=["total"])
def _penalize(
    logits, counts, rows, owner, tokens, repetition, frequency, presence, new_values, total, vocab, stride,
    size: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * size + tl.arange(0, size)
    here = place < total
    who = tl.load(owner + place, mask=here, other=0)
    token = tl.load(tokens + place, mask=here, other=0)
    seen = tl.load(counts + who * vocab + token, mask=here, other=0.0)
    value = tl.load(logits + tl.load(rows + who, mask=here, other=0) * stride + token, mask=here, other=0.0)
    factor = tl.load(repetition + who, mask=here, other=1.0)
    value = tl.where(value > 0, value / factor, value * factor)
    value -= seen * tl.load(frequency + who, mask=here, other=0.0)
    value -= tl.where(seen > 0, tl.load(presence + who, mask=here, other=0.0), 0.0)
    tl.store(new_values + place, value, mask=here)


@triton.jit(do_not_specialize=["total"])
def _put_back(logits, counts, rows, owner, tokens, new_values, total, vocab, stride, size: tl.constexpr):
    place = tl.program_id(0) * size + tl.arange(0, size)
    here = place < total
    who = tl.load(owner + place, mask=here, other=0)
    token = tl.load(tokens + place, mask=here, other=0)
    row = tl.load(rows + who, mask=here, other=0)
    # A token that is there several times has the same value each time.
    tl.store(logits + row * stride + token, tl.load(new_values + place, mask=here, other=0.0), mask=here)
    tl.store(counts + who * vocab + token, 0.0, mask=here)


def penalize_(
    logits: torch.Tensor,
    counts: torch.Tensor,
    *,
    rows: torch.Tensor,
    owner: torch.Tensor,
    tokens: torch.Tensor,
    output: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Does what ``Penalties.apply_`` does to some rows of ``logits [R, V]``, Q rows and M (row, token) pairs.

    Args:
        logits: float32; changed.
        counts: float32 ``[at least Q, V]`` of zeros; zeros again afterwards.
        rows: int64 ``[Q]``, rows of the logits.
        owner: int64 ``[M]``, which of them a token belongs to.
        tokens: int64 ``[M]``.
        output: float32 ``[M]``, 1 for tokens of the output.
        repetition: float32 ``[Q]``.
        frequency: float32 ``[Q]``.
        presence: float32 ``[Q]``.
    """
    total, vocab, stride = tokens.shape[0], logits.shape[1], logits.stride(0)
    if not total:
        return
    grid = (triton.cdiv(total, 256),)
    new_values = torch.empty(total, dtype=torch.float32, device=logits.device)
    # Three launches, since each needs all of the one before.
    _count[grid](counts, owner, tokens, output, total, vocab, size=256)
    _penalize[grid](
        logits, counts, rows, owner, tokens, repetition, frequency, presence, new_values, total, vocab, stride, size=256
    )
    _put_back[grid](logits, counts, rows, owner, tokens, new_values, total, vocab, stride, size=256)
