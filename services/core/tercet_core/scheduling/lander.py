"""Applying a step's result: tokens become known, full blocks get their keys, requests end.

Rows whose slot changed owner since the plan are stale: their output is discarded and counted nowhere. Rows that were
preempted since keep their tokens (they were sampled from a correct state) but not their blocks.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from tercet_core.scheduling.drawn import Drawn, DrawnLogProbs, grouped
from tercet_core.scheduling.guides import Landed
from tercet_core.scheduling.logprobs import PromptRun, TokenLogProbs, check_rows
from tercet_core.scheduling.outputs import End, Output, prompt_output, row_of
from tercet_core.scheduling.request import Ending, FrontEnd
from tercet_core.scheduling.table import STOP_WIDTH
from tercet_shared.errors import InternalError, ProtocolError
from tercet_shared.hashing import KEY_BYTES, BlockKey
from tercet_shared.wire.step import BlockId, Slot, empty_i32, lengths_of

if TYPE_CHECKING:
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
        accepted = lengths_of(result.token_offsets)
        finite = np.ones(len(record.slots), np.bool_)
        if not result.error:
            if len(result.not_finite):
                finite[result.not_finite] = False
            self._check(record, accepted, result, finite)
        state.flight.popleft()  # nothing has changed so far
        live = table.epoch[record.slots] == record.epochs
        table.in_flight[record.slots[live]] -= 1
        if result.error:
            return self._fail(record.slots[live], InternalError(f"The step failed: {result.error}"))
        if not live.all():
            state.counters.discarded_tokens += int(accepted[~live].sum())
        sampled = live & record.samples
        self._settle(record, accepted, live, sampled, finite)
        outputs = self._prompt_logprobs(record, result, live & finite)
        drew = sampled & finite
        if record.pools is not None:
            drew &= ~record.pools
        rows = drew.nonzero()[0].astype(np.int32)
        drawn = self._accept(record.slots[rows], accepted[rows], result, rows)
        self._publish_blocks(record.slots[live & finite])
        outputs += self._finish(drawn)
        if state.guided:
            self._inform_guides(drawn)
        if record.pools is not None:
            outputs += self._pool(record, result, sampled)
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
            broken = result.not_finite
            wrong = len(broken) and ((broken < 0) | (broken >= rows)).any()
            if len(result.token_offsets) != rows + 1 or wrong:
                raise ProtocolError(f"The worker's answer to step {result.step_id} has wrong rows.")
        return flight[0]

    def _check(self, record: FlightRecord, accepted: I32, result: StepResult, finite: Bool) -> None:
        step, rows, ids = record.step_id, len(record.slots), result.token_ids
        low = (record.samples & finite).astype(np.int32)
        pooled = empty_i32()
        if record.pools is not None:
            pooled = np.flatnonzero(low * record.pools).astype(np.int32)
            low[pooled] = 0
        vocab = self._state.limits.vocab_size
        drafting = record.drafting
        beyond = (accepted < low) | (accepted > low * (1 + record.drafts)) if drafting else accepted != low
        if beyond.any():
            raise ProtocolError(f"The worker's answer to step {step} has a wrong number of tokens.")
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab):
            raise ProtocolError(f"The worker's answer to step {step} has a token outside the vocabulary.")
        if (len(pooled) or len(result.pooled_rows)) and not np.array_equal(result.pooled_rows, pooled):
            raise ProtocolError(f"The worker's answer to step {step} has vectors of wrong rows.")
        if len(pooled):
            width, rest = divmod(len(result.pooled), len(pooled))
            if not width or rest or self._state.vector_width not in {0, width}:
                raise ProtocolError(f"The worker's answer to step {step} has vectors of a wrong size.")
            self._state.vector_width = width
        elif len(result.pooled):
            raise ProtocolError(f"The worker's answer to step {step} has vectors of no row.")
        if result.logprobs is not None:
            check_rows(result.logprobs, rows, accepted, step)
        if result.prompt_logprobs is not None:
            check_rows(result.prompt_logprobs, rows, None, step)

    def _settle(self, record: FlightRecord, accepted: I32, live: Bool, sampled: Bool, finite: Bool) -> None:
        """Takes back placeholders, rolls back rejected drafts, and notes whose KV has landed."""
        table = self._state.table
        resident = live & finite & (table.residence[record.slots] == record.residences)
        slots = record.slots[resident]
        if not record.drafting:
            table.placeholders[record.slots[sampled]] -= 1
            table.landed[slots] += record.num_tokens[resident]
            return
        table.placeholders[record.slots[sampled]] -= 1 + record.drafts[sampled]
        rejected = np.where(record.drafts > 0, 1 + record.drafts - accepted, 0)
        table.landed[slots] += record.num_tokens[resident] - rejected[resident]
        table.computed[slots] -= rejected[resident]

    def _accept(self, slots: I32, counts: I32, result: StepResult, rows: I32) -> Drawn:
        """Appends tokens to their requests, cut at the first stop id and at the limit; ``rows``: those of the step."""
        table = self._state.table
        first = result.token_offsets[rows]
        if (counts != 1).any():
            drawn = self._accept_many(slots, counts, result.token_ids, first)
        else:
            ids = result.token_ids[first]
            positions = table.known[slots]
            table.tokens[slots, positions] = ids
            table.known[slots] = positions + 1
            drawn = Drawn(slots, counts, ids, np.arange(len(ids), dtype=np.int32))
        self._state.counters.output_tokens += len(drawn.ids)
        begun = table.known[slots] - drawn.kept == table.first[slots]
        if begun.any():
            fresh = begun.nonzero()[0].astype(np.int32)
            owners = [table.requests[slot] for slot in slots[fresh].tolist()]
            drawn.fresh = fresh
            drawn.fresh_cached = np.array([owner.cached_tokens for owner in owners if owner is not None], np.int32)
        if (columns := result.logprobs) is not None:
            asked = np.isin(columns.rows, rows)
            if asked.any():
                own = np.searchsorted(rows, columns.rows[asked]).astype(np.int32)
                drawn.logprobs = DrawnLogProbs(own, columns.token_offsets[:-1][asked], TokenLogProbs.of(columns))
        return drawn

    def _accept_many(self, slots: I32, counts: I32, ids: I32, first: I32) -> Drawn:
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
        return Drawn(slots, kept, np.concatenate(parts), np.cumsum(kept, dtype=np.int32) - kept)

    def _is_stop(self, slots: I32, ids: I32) -> Bool:
        """Returns, for pairs of slot and token, whether the token ends the slot's request."""
        table = self._state.table
        hit: Bool = (table.stops[slots] == ids[:, None]).any(axis=1)
        many = table.many_stops[slots]
        if not many.any():
            return hit
        for i in np.flatnonzero(many & ~hit).tolist():
            request = table.requests[slots[i]]
            if request is not None:
                hit[i] = int(ids[i]) in request.stop_ids[STOP_WIDTH:]
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

    def _finish(self, drawn: Drawn) -> list[Output]:
        """Ends what has ended and returns the rows per front end."""
        slots = drawn.slots
        if not len(slots):
            return []
        state, table = self._state, self._state.table
        last = drawn.ids[drawn.starts + drawn.kept - 1]
        stopped = self._is_stop(slots, last)
        ended = (stopped | (table.known[slots] >= table.limit[slots])).nonzero()[0]
        for row in ended.tolist():
            request = table.requests[slots[row]]
            cached = request.cached_tokens if request is not None else 0
            if stopped[row]:
                drawn.ends[row] = End(row, Ending.STOP, int(last[row]), cached)
            else:
                drawn.ends[row] = End(row, Ending.LENGTH, -1, cached)
        outputs = drawn.outputs(table)
        if len(ended):
            state.end([Slot(slot) for slot in slots[ended].tolist()])
        return outputs

    def _inform_guides(self, drawn: Drawn) -> None:
        """Keeps what requests drew under a grammar for their guides, unless it has ended them."""
        table = self._state.table
        for i in np.flatnonzero(table.guided[drawn.slots]).tolist():  # a slot without an owner is not guided
            slot, start = Slot(int(drawn.slots[i])), int(drawn.starts[i])
            request = table.requests[slot]
            if request is None or request.guide is None:
                raise AssertionError(f"slot {slot} has no guide")
            tokens = drawn.ids[start : start + int(drawn.kept[i])].tolist()
            item = self._state.landed.setdefault(slot, Landed(slot, int(table.epoch[slot]), request, request.guide, []))
            item.tokens += tokens

    def _pool(self, record: FlightRecord, result: StepResult, sampled: Bool) -> list[Output]:
        """Ends the requests whose vector has come and returns them."""
        outputs: list[Output] = []
        if not len(result.pooled_rows):
            return outputs
        vectors = result.pooled.reshape(len(result.pooled_rows), -1)
        for row, vector in zip(result.pooled_rows.tolist(), vectors, strict=True):
            if not sampled[row]:
                continue
            (request,) = self._state.end([Slot(int(record.slots[row]))])
            output = row_of(request, [], End(0, Ending.STOP, -1, request.cached_tokens))
            output.pooled = [(0, vector)]
            outputs.append(output)
        return outputs

    def _prompt_logprobs(self, record: FlightRecord, result: StepResult, landed: Bool) -> list[Output]:
        """Returns what has become known about prompts, for those who asked and have not ended."""
        columns = result.prompt_logprobs
        if columns is None:
            return []
        table, found = self._state.table, dict[FrontEnd, list[PromptRun]]()
        values = TokenLogProbs.of(columns)
        bounds = columns.token_offsets.tolist()
        for i, (row, first) in enumerate(zip(columns.rows.tolist(), columns.first.tolist(), strict=True)):
            slot = record.slots[row]
            if landed[row] and bounds[i + 1] > bounds[i]:
                run = PromptRun(
                    int(table.handle[slot]), int(table.attempt[slot]), first, values.slice(bounds[i], bounds[i + 1])
                )
                found.setdefault(FrontEnd(int(table.front_end[slot])), []).append(run)
        return [prompt_output(front_end, runs) for front_end, runs in found.items()]

    def _fail(self, slots: I32, error: TercetError) -> list[Output]:
        """Ends requests whose step failed; what they computed themselves does not stay cached."""
        state, table = self._state, self._state.table
        outputs = []
        for front_end, rows in grouped(table.front_end[slots]):
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
