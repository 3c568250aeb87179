"""Planning a step: one token budget, no phases (see the counters in `RequestTable`).

1. Running requests in their order get what they need, as far as the budget reaches. A row that cannot have all of its
   drafts has none of them, and what it leaves goes to the rows behind it.
2. If the pool cannot serve them, all drafts give way first. Then requests are preempted, the lowest priority and latest
   arrival first, and the budget is shared anew among the rest, as if the preempted had not been running. A request
   that is alone waits for what it has in flight, which may end it; without that, it ends with an error.
3. If nobody was preempted, waiting requests follow while budget, slots and blocks last.

A worker with pipeline stages computes as many steps at a time; those that decode take turns in them (`_take_turns`).

What depends on the number of running requests is vector code; Python touches only requests that start or are preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tercet_core.scheduling.guides import Gate
from tercet_core.scheduling.request import Failure
from tercet_core.scheduling.state import FlightRecord, NewRow, SchedulerState, blocks_for, blocks_of
from tercet_shared.errors import InternalError
from tercet_shared.hashing import block_key
from tercet_shared.pooling import Pooling
from tercet_shared.wire.step import NO_NEW_SLOTS, NewSlot, NewSlots, Slot, StepPlan, empty_i32, offsets_of

if TYPE_CHECKING:
    from tercet_core.scheduling.request import Request
    from tercet_shared.hashing import BlockKey
    from tercet_shared.wire.step import I32, BlockId

_NO_TOKENS = empty_i32()


class Planner:
    """Makes plans over a `SchedulerState`."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def plan(self) -> StepPlan | None:
        """Returns the next step and counts it as in flight, or None when nothing can be computed now."""
        grants, settled = self._share_budget()
        return self._emit(grants, self._admit(grants) if settled else [])

    # ---------------------------------------------------------------------------------------- running requests

    def _share_budget(self) -> tuple[I32, bool]:
        """Returns the tokens of each running request in order, and whether waiting requests may follow."""
        state, table = self._state, self._state.table
        settled = True
        while True:
            grants, drafts = self._grants()
            order = table.order
            wanted = blocks_for(table.computed[order] + grants, table.block_size) - table.held[order]
            if int(np.maximum(wanted, 0).sum()) <= state.pool.available:
                self._keep_drafts(drafts)
                return grants, settled
            if self._state.draft_ids and drafts.any():
                self._keep_drafts(np.zeros_like(drafts))
            elif len(order) > 1:
                self._preempt_one()
                settled = False
            elif table.in_flight[order[0]]:
                return np.zeros(1, np.int32), False
            else:
                self._end_alone()
                settled = True  # the pool is empty now; with nothing in flight nobody would ask for a plan again

    def _grants(self) -> tuple[I32, I32]:
        """Returns the tokens of each running request in order, and how many of its drafts are among them."""
        limits, table = self._state.limits, self._state.table
        order = table.order
        ahead = table.known[order] + table.placeholders[order]
        drafts = table.drafts[order]
        need = ahead + drafts - table.computed[order]
        need[ahead >= table.limit[order]] = 0  # only EOS and stop tokens waste a row
        if self._state.guided:  # what the grammar forces is taken when the tokens in flight have landed
            need[table.forced[order] & (table.placeholders[order] > 0)] = 0
        if limits.stages > 1:
            self._take_turns(need, drafts)
        cap = limits.long_prefill_limit
        granted = np.minimum(need, cap) if cap else need
        if int(granted.sum()) > limits.max_batched_tokens:
            before = np.cumsum(granted) - granted
            granted = np.clip(limits.max_batched_tokens - before, 0, granted).astype(np.int32)
        if self._state.draft_ids and ((drafts > 0) & (granted < need)).any():
            return self._grants_in_turn(need, drafts)
        return granted, drafts

    def _take_turns(self, need: I32, drafts: I32) -> None:
        """Divides decoding requests among the steps that the worker's stages compute at the same time.

        The token that a request draws leaves the last stage when the first one has begun the next ``stages - 1`` steps.
        In these the request has no place, because the first stage would wait for its token, and with it everybody.
        And each step takes only a share of those that decode, the longest waiting first, so that there is as much left
        for the others. Chunks of prompts wait for no token; they follow one another without that.

        Args:
            need: tokens that each running request could compute; becomes 0 for those whose turn it is not.
            drafts: how many of them are drafts.
        """
        state, table, stages = self._state, self._state.table, self._state.limits.stages
        decoding = np.flatnonzero(need == 1 + drafts)
        slots = table.order[decoding]
        drew = table.drew[slots]
        due = decoding[(drew <= state.next_step - stages) | (table.placeholders[slots] == 0)]
        share = -(-len(decoding) // stages)
        if len(due) > share:
            due = due[np.argsort(table.drew[table.order[due]], kind="stable")[:share]]
        wanted = need[due]
        need[decoding] = 0
        need[due] = wanted

    def _grants_in_turn(self, need: I32, drafts: I32) -> tuple[I32, I32]:
        """Shares the budget row by row, because a row without its drafts leaves something to the next.

        A row has all of its drafts or none: a part of them would count as known tokens.
        """
        limits = self._state.limits
        left, cap = limits.max_batched_tokens, limits.long_prefill_limit or limits.max_batched_tokens
        granted, kept = np.zeros_like(need), drafts.copy()
        for i, (wanted, proposed) in enumerate(zip(need.tolist(), drafts.tolist(), strict=True)):
            share = min(wanted, cap, left)
            if proposed and share < wanted:
                kept[i] = 0
                share = min(share, wanted - proposed)
            granted[i] = share
            left -= share
        return granted, kept

    def _keep_drafts(self, drafts: I32) -> None:
        """Drops what running requests, in order, were proposed beyond ``drafts``."""
        if not self._state.draft_ids:
            return
        table = self._state.table
        order = table.order
        for slot in order[table.drafts[order] > drafts].tolist():
            table.drafts[slot] = 0
            del self._state.draft_ids[slot]

    def _end_alone(self) -> None:
        (request,) = self._state.end([Slot(int(self._state.table.order[0]))])
        self._report_unfit(request)

    def _preempt_one(self) -> None:
        state, table = self._state, self._state.table
        order = table.order
        priority = table.priority[order]
        lowest = order[priority == priority.max()]
        state.preempt(Slot(int(lowest[np.argmax(table.arrival[lowest])])))

    # ---------------------------------------------------------------------------------------- waiting requests

    def _admit(self, grants: I32) -> list[NewRow]:
        state, table = self._state, self._state.table
        budget = state.limits.max_batched_tokens - int(grants.sum())
        admitted: list[NewRow] = []
        headroom: int | None = None
        partial = self._partial_prefills(grants)
        while budget > 0 and (request := self._next_waiting()) is not None:
            if request.slot is not None and table.in_flight[request.slot]:
                break  # its tokens in flight count; it resumes when they have landed
            known = int(table.known[request.slot]) if request.slot is not None else len(request.tokens)
            if blocks_of(known, table.block_size) > state.pool.num_blocks:
                self._fail_unfit(request)  # at once: waiting for an empty pool would hold up everybody behind it
                continue
            if 0 < state.limits.max_partial_prefills <= partial:
                break
            if headroom is None:
                headroom = self._headroom(grants)
            matched = state.pool.match(self._keys(request, known))
            claimed = blocks_of(known, table.block_size) - len(matched) + state.pool.idle_among(matched)
            if claimed > headroom:
                break  # never when nothing runs: then the headroom is the whole pool
            row = self._start(request, known, matched, budget)
            budget -= row.tokens
            headroom -= claimed + 1
            partial += row.computed + row.tokens < known
            admitted.append(row)
        return admitted

    def _next_waiting(self) -> Request | None:
        """Returns who may start next: the head of the queue, or while it lacks a slot, the next of those that hold one.

        They must not wait behind it. After a restart nobody runs and they may hold all slots: none would ever be free.
        """
        state, table = self._state, self._state.table
        head = state.queue.peek()
        if head is None or head.slot is not None or table.num_free:
            return head
        holders = np.flatnonzero(~table.running)  # every slot has an owner
        ranked = holders[np.lexsort((table.arrival[holders], table.priority[holders]))]
        owners = (table.requests[slot] for slot in ranked.tolist())
        return next((owner for owner in owners if owner is not None and owner not in state.aside), None)

    def _partial_prefills(self, grants: I32) -> int:
        """Returns how many running requests will still have known tokens to compute after this step."""
        if not self._state.limits.max_partial_prefills:
            return 0
        table = self._state.table
        order = table.order
        return int(np.count_nonzero(table.computed[order] + grants < table.known[order]))

    def _headroom(self, grants: I32) -> int:
        """Returns the blocks that running requests claim neither for what they know nor for their next token.

        With drafts, what a row was granted in this step may be more than that, and is claimed then.
        """
        table, pool = self._state.table, self._state.pool
        order = table.order
        held = table.held[order]
        to_come = blocks_for(table.known[order], table.block_size) - held
        now = blocks_for(table.computed[order] + grants, table.block_size) - held
        return pool.available - int(np.maximum(np.maximum(to_come, 0) + 1, now).sum())

    def _start(self, request: Request, known: int, matched: list[BlockId], budget: int) -> NewRow:
        """Admits or resumes ``request`` with the blocks that it matched, and gives it as many tokens as it may have."""
        state, table, pool = self._state, self._state.table, self._state.pool
        size = table.block_size
        if request.slot is None:
            state.queue.pop()
        else:  # it may have passed the head
            state.queue.discard(request)
        pool.share(matched)
        slot = request.slot if request.slot is not None else self._new_slot(request)
        cached = len(matched) * size
        computed = min(cached, known - 1)  # the last token is computed in any case: the next one is drawn from it
        tokens = min(known - computed, budget, state.limits.long_prefill_limit or budget)
        taken = pool.take(blocks_of(computed + tokens, size) - len(matched))
        blocks = np.concatenate([np.array(matched, np.int32), taken])
        table.blocks[slot, : len(blocks)] = blocks
        table.held[slot] = len(blocks)
        table.matched[slot] = table.hashed[slot] = len(matched)
        table.computed[slot] = table.landed[slot] = computed
        table.append(slot)
        self._count_start(request, known, computed)
        tokens_known = table.tokens[slot, :known].copy()
        row = NewSlot(
            slot, int(table.epoch[slot]), request.prompt_len, tokens_known, request.params, request.pooling, cached
        )
        return NewRow(row, blocks, tokens, computed)

    def _fail_unfit(self, request: Request) -> None:
        if request.slot is not None:
            self._state.end([request.slot])
        else:
            self._state.queue.pop()
            self._state.queue.ended(request, 0)
        self._report_unfit(request)

    def _report_unfit(self, request: Request) -> None:
        self._state.failures.append(
            Failure(request, InternalError("The request needs more KV blocks than the whole pool has."))
        )

    def _new_slot(self, request: Request) -> Slot:
        state = self._state
        limit = min(request.prompt_len + request.params.max_tokens, state.limits.max_model_len)
        if request.pooling is not Pooling.NONE:
            limit = request.prompt_len + 1  # the vector counts as a token that never comes
        state.guided += request.guide is not None
        state.pooling += request.pooling is not Pooling.NONE
        return state.table.admit(request, limit)

    def _keys(self, request: Request, known: int) -> list[BlockKey]:
        """Returns the keys of the blocks that may be matched: all whole ones.

        Stops at the first key that the pool does not know: what comes after it cannot match.
        """
        table, pool = self._state.table, self._state.pool
        if not (pool.caching and request.reads_cache):
            return []
        size = table.block_size
        keys = request.keys
        tokens = request.tokens if request.slot is None else table.tokens[request.slot, :known]
        usable = known // size
        for i in range(usable):
            if i == len(keys):
                keys.append(block_key(keys[-1] if keys else request.root, tokens[i * size : (i + 1) * size].tobytes()))
            if pool.lookup(keys[i]) is None:
                return keys[:i]
        return keys[:usable]

    def _count_start(self, request: Request, known: int, computed: int) -> None:
        counters = self._state.counters
        if request.admitted:
            counters.recomputed_tokens += max(min(request.lost_tokens, known) - computed, 0)
            request.lost_tokens = 0
            return
        request.admitted = True
        request.cached_tokens = min(computed, request.prompt_len)
        counters.prompt_tokens += request.prompt_len
        counters.cached_tokens += request.cached_tokens

    # ---------------------------------------------------------------------------------------- the plan

    def _emit(self, grants: I32, new: list[NewRow]) -> StepPlan | None:
        state, table = self._state, self._state.table
        running = table.order[: len(grants)]
        chosen = grants > 0
        slots, num_tokens = running[chosen], grants[chosen]
        computed = table.computed[slots]
        offsets, block_ids = self._grow(slots, computed + num_tokens)
        if new:
            slots = np.concatenate([slots, np.array([row.row.slot for row in new], np.int32)])
            num_tokens = np.concatenate([num_tokens, np.array([row.tokens for row in new], np.int32)])
            computed = np.concatenate([computed, np.array([row.computed for row in new], np.int32)])
            lengths = np.array([len(row.blocks) for row in new], np.int32)
            offsets = np.concatenate([offsets, offsets[-1] + np.cumsum(lengths, dtype=np.int32)])
            block_ids = np.concatenate([block_ids, *(row.blocks for row in new)])
        elif not len(slots):
            return None
        drafts, drafting = table.drafts[slots], bool(state.draft_ids)
        table.computed[slots] = after = computed + num_tokens
        ahead = table.known[slots] + table.placeholders[slots]
        samples = after == (ahead + drafts if drafting else ahead)
        sampling = slots[samples]
        table.placeholders[sampling] += 1 + drafts[samples] if drafting else 1
        table.in_flight[slots] += 1
        if state.limits.stages > 1:
            table.drew[sampling] = state.next_step
        plan = StepPlan(
            step_id=state.next_step,
            freed=np.array(state.freed, np.int32) if state.freed else _NO_TOKENS,
            new=NewSlots.build([row.row for row in new]) if new else NO_NEW_SLOTS,
            slots=slots,
            num_tokens=num_tokens,
            computed=computed,
            samples=samples,
            block_offsets=offsets,
            block_ids=block_ids,
        )
        if state.draft_ids:
            self._attach_drafts(plan, drafts)
        if state.appends:
            self._attach_appended(plan)
        record = FlightRecord(
            plan.step_id, slots, table.epoch[slots], table.residence[slots], num_tokens, samples, drafts, drafting,
            gate=self._gate(plan, after) if state.guided else None,
            pools=samples & table.pools[slots] if state.pooling else None,
        )  # fmt: skip
        state.flight.append(record)
        state.freed = []
        state.next_step += 1
        state.counters.steps += 1
        return plan

    def _grow(self, slots: I32, target: I32) -> tuple[I32, I32]:
        """Gives running rows the blocks that ``target`` tokens need; returns their offsets [S + 1] and ids."""
        table = self._state.table
        held = table.held[slots]
        more = blocks_for(target, table.block_size) - held
        offsets = np.zeros(len(slots) + 1, np.int32)
        if not (more > 0).any():  # one step in as many as a block has tokens
            return offsets, _NO_TOKENS
        more = np.maximum(more, 0)
        np.cumsum(more, out=offsets[1:])
        total = int(offsets[-1])
        ids = self._state.pool.take(total)
        rows = np.repeat(slots, more)
        columns = np.repeat(held - offsets[:-1], more) + np.arange(total, dtype=np.int32)
        table.blocks[rows, columns] = ids
        table.held[slots] = held + more
        return offsets, ids

    def _attach_drafts(self, plan: StepPlan, drafts: I32) -> None:
        state = self._state
        plan.draft_offsets = np.zeros(len(drafts) + 1, np.int32)
        np.cumsum(drafts, out=plan.draft_offsets[1:])
        rows = plan.slots[drafts > 0].tolist()
        plan.draft_ids = np.concatenate([state.draft_ids.pop(slot) for slot in rows]) if rows else empty_i32()
        state.table.drafts[rows] = 0

    def _attach_appended(self, plan: StepPlan) -> None:
        """Tells the worker the forced tokens of the rows that it hears of in this step."""
        state, table = self._state, self._state.table
        parts = [
            table.tokens[slot, start : table.known[slot]]
            if (start := state.appends.pop(Slot(slot), None)) is not None
            else _NO_TOKENS
            for slot in plan.slots.tolist()
        ]
        plan.appended_offsets = offsets_of([len(part) for part in parts])
        plan.appended_ids = np.concatenate(parts)

    def _gate(self, plan: StepPlan, after: I32) -> Gate | None:
        """Marks the rows that sample under a grammar; ``after``: [S] tokens computed after the step."""
        table = self._state.table
        rows = np.flatnonzero(plan.samples & table.guided[plan.slots]).astype(np.int32)
        if not len(rows):
            return None
        plan.gated = rows
        slots = plan.slots[rows]
        return Gate(slots, table.epoch[slots], after[rows])
