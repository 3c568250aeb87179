"""A worker that computes nothing but proves that the core gave it the right blocks.

It keeps slots, token buffers and block tables of its own, made from the plans only. The "KV" of a position is a number
that depends on the token there and on the KV before it, read back through the block table, as a real model's does. The
token that follows is a function of the last position's KV. So whatever is wrong with a plan (a block shared that should
not be, one written while somebody still reads it, a stale cached prefix, a gap, a token computed twice into the wrong
place) shows as wrong content when it is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tercet_shared.wire.step import StepResult, offsets_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from tercet_core.scheduling.state import Limits
    from tercet_shared.wire.step import StepPlan

POISON = -1
"""KV that a failed step or a not-finite row left behind; never read by anybody."""


def kv_after(before: int, token: int) -> int:
    """Returns the KV of a token that follows a position with KV ``before``."""
    return hash((before, token)) & 0x7FFFFFFFFFFFFFFF


def kv_root(root: bytes) -> int:
    """Returns what stands before position 0; prefixes under different roots must not be shared."""
    return int.from_bytes(root, "little") & 0x7FFFFFFFFFFFFFFF


def next_token(kv: int, vocab_size: int) -> int:
    """Returns the token that the model draws at a position."""
    return kv // 7 % vocab_size


def continuation(root: bytes, tokens: Iterable[int], count: int, vocab_size: int) -> list[int]:
    """Returns the ``count`` tokens that follow ``tokens`` in an undisturbed run."""
    kv = kv_root(root)
    for token in tokens:
        kv = kv_after(kv, token)
    out = []
    for _ in range(count):
        out.append(next_token(kv, vocab_size))
        kv = kv_after(kv, out[-1])
    return out


@dataclass
class WorkerSlot:
    """What a worker keeps of a slot."""

    epoch: int
    root: int
    tokens: list[int]
    computed: int
    cached: int  # positions below it are in shared blocks; nothing is written there
    table: list[int] = field(default_factory=list)
    broken: bool = False  # its step failed; the core has yet to learn it


@dataclass
class _Row:
    slot: WorkerSlot
    start: int
    count: int
    samples: bool
    inputs: list[int]
    drafts: list[int]


class KvWorker:
    """Executes plans in order.

    Args:
        limits: what plans keep to.
        strangers: slots with an owner that another worker has been told of; they may be freed without a start here.
    """

    def __init__(self, limits: Limits, strangers: Iterable[int] = ()) -> None:
        self.limits = limits
        self.strangers = set(strangers)
        self.slots: dict[int, WorkerSlot] = {}
        self.kv: dict[tuple[int, int], int] = {}
        self.last_epoch: dict[int, int] = {}
        self.last_step = 0

    def execute(
        self,
        plan: StepPlan,
        roots: dict[int, bytes],
        *,
        bounds: Collection[int] = (),
        not_finite: Collection[int] = (),
        error: str = "",
    ) -> StepResult:
        """Executes a plan and checks it on the way.

        Args:
            plan: the step.
            roots: root keys of the slots in ``plan.new``, which do not travel in the plan.
            bounds: rows whose ``computed`` may be an upper bound, because drafts were in flight.
            not_finite: rows that turn out not finite.
            error: makes the step fail after it has written.
        """
        assert plan.step_id > self.last_step
        self.last_step = plan.step_id
        self._take_slots(plan, roots)
        rows = [self._row(plan, i, exact=i not in bounds) for i in range(len(plan.slots))]
        assert sum(row.count for row in rows) <= self.limits.max_batched_tokens
        written: set[tuple[int, int]] = set()
        for i, row in enumerate(rows):
            if error or i in not_finite:
                row.slot.broken = True
            self._write(row, written)
        for row in rows:
            self._check_attended(row)
        if error:
            return StepResult(plan.step_id, offsets_of([]), np.zeros(0, np.int32), error=error)
        sampled = [self._sample(row) if i not in not_finite else [] for i, row in enumerate(rows)]
        return StepResult(
            plan.step_id,
            offsets_of([len(ids) for ids in sampled]),
            np.array([token for ids in sampled for token in ids], np.int32),
            np.array(sorted(not_finite), np.int32),
        )

    def _take_slots(self, plan: StepPlan, roots: dict[int, bytes]) -> None:
        for slot in plan.freed.tolist():
            if slot in self.strangers:
                self.strangers.remove(slot)
            else:
                del self.slots[slot]
        new = plan.new
        rows = {slot: row for row, slot in enumerate(plan.slots.tolist())}
        assert len(rows) == len(plan.slots), "a slot twice in a plan"
        for i, slot in enumerate(new.slots.tolist()):
            epoch = int(new.epochs[i])
            if slot in self.slots:
                assert self.slots[slot].epoch == epoch, "a slot changed owner without being freed"
            else:
                assert self.last_epoch.get(slot) != epoch, "a slot has a new owner under the old epoch"
            self.last_epoch[slot] = epoch
            self.strangers.discard(slot)
            tokens = new.token_ids[new.token_offsets[i] : new.token_offsets[i + 1]].tolist()
            assert 1 <= int(new.prompt_lens[i]) <= len(tokens)
            computed, cached = int(plan.computed[rows[slot]]), int(new.cached[i])
            assert cached % self.limits.block_size == 0
            assert computed == min(cached, len(tokens) - 1), "not all that is cached, or nothing left to compute"
            self.slots[slot] = WorkerSlot(epoch, kv_root(roots[slot]), tokens, computed, cached)

    def _row(self, plan: StepPlan, i: int, *, exact: bool) -> _Row:
        slot = self.slots[int(plan.slots[i])]
        slot.table += plan.block_ids[plan.block_offsets[i] : plan.block_offsets[i + 1]].tolist()
        assert len(set(slot.table)) == len(slot.table), "a block twice in a table"
        drafts: list[int] = []
        if len(plan.draft_offsets):
            drafts = plan.draft_ids[plan.draft_offsets[i] : plan.draft_offsets[i + 1]].tolist()
        start, count, samples = slot.computed, int(plan.num_tokens[i]), bool(plan.samples[i])
        if slot.broken:
            return _Row(slot, start, count, samples, [0] * count, drafts)
        told = int(plan.computed[i])
        assert told == start or (not exact and told > start), f"{told} tokens computed, the worker knows of {start}"
        assert len(slot.table) * self.limits.block_size >= told + count, "too few blocks"
        end = start + count - len(drafts)
        assert end == len(slot.tokens) if samples else end < len(slot.tokens), "samples or not, but wrongly"
        assert samples or not drafts
        return _Row(slot, start, count, samples, slot.tokens[start:end] + drafts, drafts)

    def _write(self, row: _Row, written: set[tuple[int, int]]) -> None:
        kv = self._read(row.slot, row.start - 1) if not row.slot.broken else POISON
        for position, token in enumerate(row.inputs, row.start):
            kv = POISON if row.slot.broken else kv_after(kv, token)
            if position < row.slot.cached:
                continue
            place = divmod(position, self.limits.block_size)
            if place[0] >= len(row.slot.table):
                assert row.slot.broken
                break
            where = (row.slot.table[place[0]], place[1])
            assert where not in written, "two rows of a step write the same place"
            written.add(where)
            self.kv[where] = kv

    def _read(self, slot: WorkerSlot, position: int) -> int:
        if position < 0:
            return slot.root
        block, offset = divmod(position, self.limits.block_size)
        return self.kv[slot.table[block], offset]

    def _check_attended(self, row: _Row) -> None:
        if row.slot.broken:
            return
        kv = row.slot.root
        tokens: Sequence[int] = row.slot.tokens[: row.start] + row.inputs
        for position, token in enumerate(tokens):
            kv = kv_after(kv, token)
            assert self._read(row.slot, position) == kv, f"wrong KV at position {position} of {row.slot}"

    def _sample(self, row: _Row) -> list[int]:
        slot = row.slot
        slot.computed = row.start + row.count
        if not row.samples:
            return []
        if slot.broken:
            return [0]
        accepted: list[int] = []
        first = row.start + row.count - len(row.drafts) - 1
        for j in range(len(row.drafts) + 1):
            accepted.append(next_token(self._read(slot, first + j), self.limits.vocab_size))
            if j < len(row.drafts) and row.drafts[j] != accepted[-1]:
                break
        slot.tokens += accepted
        slot.computed -= 1 + len(row.drafts) - len(accepted)
        return accepted
