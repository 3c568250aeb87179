"""The state of all admitted requests: one column per counter, one row per slot.

Columns make a step over a thousand decoding requests a handful of vector operations. A slot belongs to one request
from admission to its end, through preemptions; its ``epoch`` changes when it changes owner, its ``residence`` when its
request loses its blocks.

Large tables are allocated untouched: a page costs memory only when a request has used it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tercet_shared.pooling import Pooling
from tercet_shared.wire.step import Slot

if TYPE_CHECKING:
    import numpy.typing as npt

    from tercet_core.scheduling.request import Request
    from tercet_shared.wire.step import I32

STOP_WIDTH = 8
"""Stop ids per request that are compared as a column; requests with more are checked one by one."""

NO_TOKEN = -1


class RequestTable:
    """Columns by slot, and the slots of running requests in their order.

    Counters (see the class attributes for meaning):
        known: prompt and accepted output tokens.
        computed: tokens whose KV is written or planned.
        placeholders: output tokens of steps in flight.
        drafts: proposed tokens to verify in the next plan.
        landed: tokens whose KV was written by an applied step; at most ``known``.
        in_flight: steps in flight that contain the row.
        held: blocks in the row's block table.
        hashed: leading blocks whose key was computed.
        matched: leading blocks that came from the prefix cache; what follows, the request computed itself.
        limit: tokens (prompt + output) at which the request ends.
        first: tokens (prompt + resumed output) that came with the request; the next is the first that it yields here.
        drew: the last step that was planned to draw a token; kept only where the worker has pipeline stages.

    Flags:
        guided: whether a grammar guides the output (see `guides`).
        forced: whether the grammar has forced tokens to take once nothing of the row is in flight.
        pools: whether the row yields a vector instead of tokens.
    """

    def __init__(self, *, max_slots: int, max_model_len: int, block_size: int) -> None:
        self.max_slots = max_slots
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)

        def column(dtype: type[Any] = np.int32) -> npt.NDArray[Any]:
            return np.zeros(max_slots, dtype)

        self.known: I32 = column()
        self.computed: I32 = column()
        self.placeholders: I32 = column()
        self.drafts: I32 = column()
        self.landed: I32 = column()
        self.in_flight: I32 = column()
        self.held: I32 = column()
        self.hashed: I32 = column()
        self.matched: I32 = column()
        self.limit: I32 = column()
        self.first: I32 = column()
        self.drew = column(np.int64)
        self.priority: I32 = column()
        self.arrival = column(np.int64)
        self.epoch: I32 = column()
        self.residence: I32 = column()
        self.front_end: I32 = column()
        self.handle = column(np.uint64)
        self.attempt = column(np.uint32)
        self.stops = np.full((max_slots, STOP_WIDTH), NO_TOKEN, np.int32)
        self.many_stops = column(np.bool_)
        self.running = column(np.bool_)
        self.guided = column(np.bool_)
        self.forced = column(np.bool_)
        self.pools = column(np.bool_)
        self.tokens = np.zeros((max_slots, max_model_len), np.int32)  # prompt + output
        self.blocks = np.zeros((max_slots, self.max_blocks), np.int32)  # the block table, `held` entries of each row
        self.requests: list[Request | None] = [None] * max_slots
        self._order = np.zeros(max_slots, np.int32)
        self._count = 0
        self._free = list(range(max_slots - 1, -1, -1))

    @property
    def order(self) -> I32:
        """Slots of running requests in their order; a view that the next change invalidates."""
        return self._order[: self._count]

    @property
    def num_running(self) -> int:
        """Requests that take part in planning."""
        return self._count

    @property
    def num_free(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    def admit(self, request: Request, limit: int) -> Slot:
        """Gives ``request`` a free slot and fills its row; the caller appends it to the order."""
        slot = Slot(self._free.pop())
        request.slot = slot
        known = len(request.tokens)
        self.requests[slot] = request
        self.tokens[slot, :known] = request.tokens
        self.known[slot] = known
        self.first[slot] = known
        self.limit[slot] = limit
        self.priority[slot] = request.priority
        self.arrival[slot] = request.arrival
        self.front_end[slot] = request.front_end
        self.handle[slot] = request.handle
        self.attempt[slot] = request.attempt
        for counter in (
            self.computed, self.placeholders, self.drafts, self.landed, self.in_flight, self.held, self.hashed,
        ):  # fmt: skip
            counter[slot] = 0
        self.drew[slot] = 0
        self.guided[slot] = request.guide is not None
        self.pools[slot] = request.pooling is not Pooling.NONE
        stop_ids = request.stop_ids
        self.stops[slot] = NO_TOKEN
        self.stops[slot, : min(len(stop_ids), STOP_WIDTH)] = stop_ids[:STOP_WIDTH]
        self.many_stops[slot] = len(stop_ids) > STOP_WIDTH
        return slot

    def append(self, slot: Slot) -> None:
        """Puts a slot at the end of the running order."""
        self._order[self._count] = slot
        self._count += 1
        self.running[slot] = True

    def drop_stopped(self) -> None:
        """Removes from the order every slot whose ``running`` flag was cleared."""
        order = self.order
        kept = order[self.running[order]]
        self._order[: len(kept)] = kept
        self._count = len(kept)

    def vacate(self, slot: Slot) -> Request:
        """Takes the slot from its owner, which makes results in flight for it stale, and returns the owner."""
        request = self.requests[slot]
        if request is None:
            raise AssertionError(f"slot {slot} has no owner")
        self.requests[slot] = None
        self.running[slot] = self.guided[slot] = self.forced[slot] = self.pools[slot] = False
        self.epoch[slot] += 1
        self._free.append(slot)
        request.slot = None
        return request
