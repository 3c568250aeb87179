"""What planning and applying share: limits, the table, the pool, the queue, the steps in flight, counters."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from tercet_core.kv_cache.block_pool import BlockPool
from tercet_shared.pooling import Pooling

if TYPE_CHECKING:
    from tercet_core.scheduling.guides import Gate, Landed
    from tercet_core.scheduling.queue import WaitingQueue
    from tercet_core.scheduling.request import Failure, Request
    from tercet_core.scheduling.table import RequestTable
    from tercet_shared.wire.step import I32, Bool, NewSlot, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers that a scheduler needs; nothing else is needed to test one.

    Attributes:
        max_slots: requests with state at once.
        num_blocks: blocks of the KV pool.
        block_size: tokens per block.
        max_model_len: tokens of prompt and output per request.
        max_batched_tokens: tokens per step.
        long_prefill_limit: most tokens of one request in one step; 0: only the budget limits.
        max_partial_prefills: requests whose prompt is computed in part at a time; 0: no limit.
        prefix_caching: whether blocks get keys.
        vocab_size: token ids are below it.
        stages: pipeline stages of the worker; a request draws its next token when the one before has left the last.
    """

    max_slots: int
    num_blocks: int
    block_size: int = 16
    max_model_len: int
    max_batched_tokens: int
    long_prefill_limit: int = 0
    max_partial_prefills: int = 0
    prefix_caching: bool = True
    vocab_size: int = 2**31 - 1
    stages: int = 1


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """A planned step until its result is applied: the row counts that its result is matched against."""

    step_id: int
    slots: I32  # [S]
    epochs: I32  # [S] owner at the time of planning
    residences: I32  # [S] to see whether the row was preempted since
    num_tokens: I32  # [S]
    samples: Bool  # [S]
    drafts: I32  # [S]
    drafting: bool = False  # whether any of them may not be 0
    gate: Gate | None = None  # of the rows that sample under a grammar
    pools: Bool | None = None  # [S] rows that yield a vector with this step; None: there are none


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    prompt_tokens: int = 0  # of requests when they are first admitted
    cached_tokens: int = 0  # of those, found in the prefix cache
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0  # computed before, lost by preemption, and not found in the cache when it resumed
    discarded_tokens: int = 0  # sampled after the request had ended
    not_finite_rows: int = 0


@dataclass(slots=True)
class SchedulerState:
    """Everything that a scheduler remembers between calls."""

    limits: Limits
    table: RequestTable
    pool: BlockPool
    queue: WaitingQueue
    flight: deque[FlightRecord] = field(default_factory=deque)
    counters: Counters = field(default_factory=Counters)
    freed: list[Slot] = field(default_factory=list)  # slots that ended since the last plan
    draft_ids: dict[int, I32] = field(default_factory=dict)  # by slot, for rows whose `drafts` is not 0
    failures: list[Failure] = field(default_factory=list)  # requests that ended while planning
    aside: dict[Request, None] = field(default_factory=dict)  # kept out of planning for a while; an ordered set
    guided: int = 0  # requests with a slot whose output a grammar guides
    pooling: int = 0  # requests with a slot that yield a vector
    landed: dict[Slot, Landed] = field(default_factory=dict)  # output that guides have not taken yet
    appends: dict[Slot, int] = field(default_factory=dict)  # where forced tokens begin that the worker does not know of
    loose: list[tuple[int, int]] = field(
        default_factory=list
    )  # steps (id, gated rows) whose masks do not matter any more
    vector_width: int = 0  # of pooled vectors; 0: none has come yet
    next_step: int = 1

    def release_blocks(self, slot: Slot) -> None:
        """Gives all blocks of a slot back and forgets what was computed."""
        table = self.table
        held = int(table.held[slot])
        if held:
            self.pool.release(table.blocks[slot, :held])
        table.held[slot] = 0
        table.hashed[slot] = 0
        table.matched[slot] = 0
        table.computed[slot] = 0
        table.landed[slot] = 0
        table.drafts[slot] = 0
        self.draft_ids.pop(slot, None)
        self.appends.pop(slot, None)

    def preempt(self, slot: Slot) -> None:
        """Takes a running request's blocks; it waits, with its slot and its known tokens, where its arrival puts it."""
        table = self.table
        request = table.requests[slot]
        if request is None:
            raise AssertionError(f"slot {slot} has no owner")
        self.counters.preemptions += 1
        request.lost_tokens = int(table.computed[slot])  # also what is in flight is computed twice
        self.release_blocks(slot)
        table.residence[slot] += 1
        table.running[slot] = False
        table.drop_stopped()
        self.queue.push(request)

    def restart(self, num_blocks: int | None) -> None:
        """Forgets the steps in flight and all KV; every request keeps its slot and its known tokens, and waits.

        Args:
            num_blocks: blocks of a new, empty worker; None: the worker is the same, but what it computed is not used,
                and the oldest step is the only one in flight that it has answered.
        """
        table = self.table
        # The worker waits for the masks of the steps behind the one that failed, though nobody wants their tokens.
        unanswered = [*self.flight][1:]
        self.loose += [
            (record.step_id, len(record.gate.slots))
            for record in unanswered
            if record.gate is not None and record.gate.due
        ]
        self.flight.clear()
        for slot in table.order.tolist():
            request = table.requests[slot]
            if request is None:
                raise AssertionError(f"slot {slot} has no owner")
            request.lost_tokens = int(table.computed[slot])
            self.release_blocks(slot)
            table.residence[slot] += 1
            table.running[slot] = False
            self.queue.push(request)
        table.drop_stopped()
        table.placeholders[:] = 0
        table.in_flight[:] = 0
        self.pool.clear_keys()
        if num_blocks is None:
            return
        self.freed = []
        self.loose = []
        if num_blocks != self.pool.num_blocks:
            self.limits = replace(self.limits, num_blocks=num_blocks)
            self.pool = BlockPool(num_blocks, caching=self.limits.prefix_caching, events=self.pool.events)

    def end(self, slots: list[Slot]) -> list[Request]:
        """Ends the owners of ``slots``, running or preempted; their blocks and slots are free at once."""
        owners = []
        for slot in slots:
            request = self.table.requests[slot]
            if request is None:
                raise AssertionError(f"slot {slot} has no owner")
            if not self.table.running[slot]:
                self.queue.discard(request)
                self.aside.pop(request, None)
            self.release_blocks(slot)
            self.queue.ended(request, int(self.table.known[slot]) - request.prompt_len)
            owners.append(self.table.vacate(slot))
            self.guided -= request.guide is not None
            self.pooling -= request.pooling is not Pooling.NONE
            self.landed.pop(slot, None)
            self.freed.append(slot)
        self.table.drop_stopped()
        return owners


def blocks_for(tokens: I32, block_size: int) -> I32:
    """Returns how many blocks hold that many tokens, element by element."""
    return np.asarray((tokens + (block_size - 1)) // block_size, np.int32)


def blocks_of(tokens: int, block_size: int) -> int:
    """Returns how many blocks hold that many tokens."""
    return -(-tokens // block_size)


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row that starts in this step: a new request or one that resumes."""

    row: NewSlot
    blocks: I32  # its whole block table
    tokens: int  # to compute in this step
    computed: int  # found in the prefix cache, where that is all of them without the last
