"""Applying a step's result: tokens become known, full blocks get their keys, requests end.

Rows whose slot changed owner since the plan are stale: their output is discarded and counted nowhere. Rows that were
preempted since keep their tokens (they were sampled from a correct state) but not their blocks.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from tercet_core.scheduling.outputs import End, Output
from tercet_core.scheduling.request import Ending, FrontEnd
from tercet_core.scheduling.table import STOP_WIDTH
from tercet_shared.errors import InternalError, ProtocolError
from tercet_shared.hashing import KEY_BYTES, BlockKey
from tercet_shared.wire.step import BlockId, Slot

if TYPE_CHECKING:
    import numpy.typing as npt

    from tercet_core.scheduling.state import FlightRecord, SchedulerState
    from tercet_shared.errors import TercetError
    from tercet_shared.wire.step import I32, Bool, StepResult


class Lander:
    """Applies results to a `SchedulerState`."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def apply(self, result: StepResult) -> list[Output]:
        """Applies the result of the oldest step in flight and returns what the front ends are to hear.

        Raises:
            ProtocolError: the result does not belong to that step, or breaks the protocol.
        """
        state, table = self._state, self._state.table
        record = self._match(result)
        accepted = np.diff(result.token_offsets)
        finite = np.ones(len(record.slots), np.bool_)
        if not result.error:
            finite[result.not_finite] = False
            self._check(record, accepted, result.token_ids, finite)
        state.flight.popleft()  # nothing has changed so far
        live = table.epoch[record.slots] == record.epochs
        table.in_flight[record.slots[live]] -= 1
        if result.error:
            return self._fail(record.slots[live], InternalError(f"The step failed: {result.error}"))
        state.counters.discarded_tokens += int(accepted[~live].sum())
        sampled = live & record.samples
        self._settle(record, accepted, live, sampled, finite)
        rows = np.flatnonzero(sampled & finite).astype(np.int32)
        slots = record.slots[rows]
        kept, ids, starts = self._accept(slots, accepted[rows], result, rows)
        self._publish_blocks(record.slots[live & finite])
        outputs = self._finish(slots, kept, ids, starts)
        broken = record.slots[live & ~finite]  # also a chunk: what follows it would be computed from its KV
        if len(broken):
            state.counters.not_finite_rows += len(broken)
            outputs += self._fail(broken, InternalError("The model's output for this request was not finite."))
        return outputs

    def _match(self, result: StepResult) -> FlightRecord:
        flight = self._state.flight
        if not flight or flight[0].step_id != result.step_id:
            expected = flight[0].step_id if flight else "none"
            raise ProtocolError(f"The worker answered step {result.step_id}; the oldest step in flight is {expected}.")
        if not result.error:
            rows = len(flight[0].slots)
            wrong = result.not_finite[(result.not_finite < 0) | (result.not_finite >= rows)]
            if len(result.token_offsets) != rows + 1 or len(wrong):
                raise ProtocolError(f"The worker's answer to step {result.step_id} has wrong rows.")
        return flight[0]

    def _check(self, record: FlightRecord, accepted: I32, ids: I32, finite: Bool) -> None:
        low = (record.samples & finite).astype(np.int32)
        high = low * (1 + record.drafts)
        vocab = self._state.limits.vocab_size
        if ((accepted < low) | (accepted > high)).any():
            raise ProtocolError(f"The worker's answer to step {record.step_id} has a wrong number of tokens.")
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab):
            raise ProtocolError(f"The worker's answer to step {record.step_id} has a token outside the vocabulary.")

    def _settle(self, record: FlightRecord, accepted: I32, live: Bool, sampled: Bool, finite: Bool) -> None:
        """Takes back placeholders, rolls back rejected drafts, and notes whose KV has landed."""
        table = self._state.table
        table.placeholders[record.slots[sampled]] -= 1 + record.drafts[sampled]
        resident = live & finite & (table.residence[record.slots] == record.residences)
        rejected = np.where(record.drafts > 0, 1 + record.drafts - accepted, 0)
        slots = record.slots[resident]
        table.landed[slots] += record.num_tokens[resident] - rejected[resident]
        if record.drafts.any():
            table.computed[slots] -= rejected[resident]

    def _accept(self, slots: I32, counts: I32, result: StepResult, rows: I32) -> tuple[I32, I32, I32]:
        """Appends tokens to their requests, cut at the first stop id and at the limit.

        Returns:
            kept [n] tokens per row, the ids of all rows one after the other, and where each row starts among them.
        """
        table = self._state.table
        first = result.token_offsets[rows]
        if (counts != 1).any():
            return self._accept_many(slots, counts, result.token_ids, first)
        ids = result.token_ids[first]
        positions = table.known[slots]
        table.tokens[slots, positions] = ids
        table.known[slots] = positions + 1
        self._state.counters.output_tokens += len(ids)
        return counts, ids, np.arange(len(ids), dtype=np.int32)

    def _accept_many(self, slots: I32, counts: I32, ids: I32, first: I32) -> tuple[I32, I32, I32]:
        table = self._state.table
        kept = np.zeros_like(counts)
        parts: list[I32] = []
        for i, (slot, count, start) in enumerate(zip(slots.tolist(), counts.tolist(), first.tolist(), strict=True)):
            row = ids[start : start + count]
            known = int(table.known[slot])
            row = row[: int(table.limit[slot]) - known]
            stops = np.flatnonzero(self._is_stop(np.full(len(row), slot, np.int32), row))
            if len(stops):
                row = row[: int(stops[0]) + 1]
            table.tokens[slot, known : known + len(row)] = row
            table.known[slot] = known + len(row)
            kept[i] = len(row)
            parts.append(row)
        flat = np.concatenate(parts)
        self._state.counters.output_tokens += len(flat)
        return kept, flat, np.cumsum(kept, dtype=np.int32) - kept

    def _is_stop(self, slots: I32, ids: I32) -> Bool:
        """Returns, for pairs of slot and token, whether the token ends the slot's request."""
        table = self._state.table
        hit: Bool = (table.stops[slots] == ids[:, None]).any(axis=1)
        many = np.flatnonzero(table.many_stops[slots] & ~hit)
        for i in many.tolist():
            request = table.requests[slots[i]]
            if request is not None:
                rest = (request.params.eos_token_ids + request.params.stop_token_ids)[STOP_WIDTH:]
                hit[i] = int(ids[i]) in rest
        return hit

    # ---------------------------------------------------------------------------------------- prefix keys

    def _publish_blocks(self, slots: I32) -> None:
        """Gives keys to the blocks that are whole now: computed by applied steps, all tokens known."""
        table, pool = self._state.table, self._state.pool
        if not pool.caching:
            return
        size = table.block_size
        full = np.minimum(table.landed[slots], table.known[slots]) // size
        count = full - table.hashed[slots]
        due = count > 0
        if not due.any():
            return
        slots, full, count = slots[due], full[due], count[due]
        rows = np.repeat(slots, count)
        index = np.repeat(full - np.cumsum(count), count) + np.arange(len(rows))
        starts = index * size
        raw = table.tokens[rows[:, None], starts[:, None] + np.arange(size)].tobytes()
        blocks = table.blocks[rows, index].tolist()
        width = size * 4
        at = 0
        for slot, first, last in zip(slots.tolist(), table.hashed[slots].tolist(), full.tolist(), strict=True):
            request = table.requests[slot]
            if request is None:
                raise AssertionError(f"slot {slot} has no owner")
            keys = request.keys
            for i in range(first, last):
                if i == len(keys):
                    parent = keys[-1] if keys else request.root
                    tokens = raw[at * width : (at + 1) * width]
                    keys.append(BlockKey(blake2b(parent + tokens, digest_size=KEY_BYTES).digest()))
                pool.publish(BlockId(blocks[at]), keys[i])
                at += 1
        table.hashed[slots] = full

    # ---------------------------------------------------------------------------------------- ends

    def _finish(self, slots: I32, kept: I32, ids: I32, starts: I32) -> list[Output]:
        """Ends what has ended and returns the rows per front end."""
        if not len(slots):
            return []
        state, table = self._state, self._state.table
        last = ids[starts + kept - 1]
        stopped = self._is_stop(slots, last)
        ended = np.flatnonzero(stopped | (table.known[slots] >= table.limit[slots]))
        ends: dict[int, End] = {}
        for row in ended.tolist():
            request = table.requests[slots[row]]
            cached = request.cached_tokens if request is not None else 0
            if stopped[row]:
                ends[row] = End(row, Ending.STOP, int(last[row]), cached)
            else:
                ends[row] = End(row, Ending.LENGTH, -1, cached)
        front_ends = table.front_end[slots]
        outputs = [
            self._output(FrontEnd(int(front_end)), rows, slots, kept, ids, starts, ends)
            for front_end, rows in _grouped(front_ends)
        ]
        if len(ended):
            state.end([Slot(slot) for slot in slots[ended].tolist()])
        return outputs

    def _output(
        self, front_end: FrontEnd, rows: I32 | None, slots: I32, kept: I32, ids: I32, starts: I32, ends: dict[int, End]
    ) -> Output:
        table = self._state.table
        if rows is None:  # all rows
            offsets = np.zeros(len(slots) + 1, np.int32)
            np.cumsum(kept, out=offsets[1:])
            return Output(front_end, table.handle[slots], table.attempt[slots], offsets, ids, list(ends.values()))
        mine = slots[rows]
        lengths = kept[rows]
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        picks = np.repeat(starts[rows] - offsets[:-1], lengths) + np.arange(int(offsets[-1]), dtype=np.int32)
        own = [
            End(i, end.ending, end.stop_id, end.cached_tokens)
            for i, row in enumerate(rows.tolist() if ends else [])
            if (end := ends.get(row)) is not None
        ]
        return Output(front_end, table.handle[mine], table.attempt[mine], offsets, ids[picks], own)

    def _fail(self, slots: I32, error: TercetError) -> list[Output]:
        """Ends requests whose step failed; what they computed themselves does not stay cached."""
        state, table = self._state, self._state.table
        outputs = []
        for front_end, rows in _grouped(table.front_end[slots]):
            mine = slots if rows is None else slots[rows]
            ends = [End(i, Ending.ERROR, error=error) for i in range(len(mine))]
            empty = np.zeros(len(mine) + 1, np.int32)
            outputs.append(
                Output(FrontEnd(int(front_end)), table.handle[mine], table.attempt[mine], empty, empty[:0], ends)
            )
        for slot in slots.tolist():
            own = table.blocks[slot, table.matched[slot] : table.held[slot]]
            state.pool.forget(own)
        state.end([Slot(slot) for slot in slots.tolist()])
        return outputs


def _grouped(values: npt.NDArray[np.int32]) -> list[tuple[int, I32 | None]]:
    """Returns each distinct value with the rows that hold it; None stands for all rows when there is only one value."""
    if not len(values):
        return []
    first = int(values[0])
    if (values == first).all():
        return [(first, None)]
    order = np.argsort(values, kind="stable").astype(np.int32)
    ranked = values[order]
    cuts = np.flatnonzero(np.diff(ranked)) + 1
    return [(int(values[rows[0]]), rows) for rows in np.split(order, cuts)]
