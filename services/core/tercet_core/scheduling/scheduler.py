"""The scheduler: requests in, plans out, results in, tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tercet_core.kv_cache.block_pool import BlockPool
from tercet_core.scheduling.guides import Guidance
from tercet_core.scheduling.lander import Lander
from tercet_core.scheduling.planner import Planner
from tercet_core.scheduling.queue import make_queue
from tercet_core.scheduling.state import Counters, Limits, SchedulerState
from tercet_core.scheduling.table import RequestTable
from tercet_shared.errors import ContextLengthError, InvalidRequestError
from tercet_shared.pooling import Pooling

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tercet_core.scheduling.guides import GuideWork, Settled
    from tercet_core.scheduling.outputs import Output
    from tercet_core.scheduling.request import Failure, Request
    from tercet_shared.wire.step import I32, StepPlan, StepResult


class Scheduler:
    """Requests, their KV blocks and the steps in flight. Not thread-safe; every method returns at once.

    The caller keeps at most as many steps in flight as it wants (`in_flight`); nothing here assumes a depth.
    """

    def __init__(self, limits: Limits, *, policy: str = "priority") -> None:
        """Starts empty. Raises `ConfigurationError` when there is no such policy."""
        table = RequestTable(
            max_slots=limits.max_slots, max_model_len=limits.max_model_len, block_size=limits.block_size
        )
        pool = BlockPool(limits.num_blocks, caching=limits.prefix_caching)
        self._state = SchedulerState(limits, table, pool, make_queue(policy, limits.max_slots))
        self._planner = Planner(self._state)
        self._lander = Lander(self._state)
        self._guidance = Guidance(self._state)
        self._arrivals = 0

    @property
    def limits(self) -> Limits:
        """The numbers it was made with."""
        return self._state.limits

    @property
    def counters(self) -> Counters:
        """Totals since the start."""
        return self._state.counters

    @property
    def in_flight(self) -> int:
        """Steps planned and not yet applied."""
        return len(self._state.flight)

    @property
    def num_running(self) -> int:
        """Requests that take part in planning."""
        return self._state.table.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step or to resume."""
        return len(self._state.queue) + len(self._state.aside)

    @property
    def num_preempted(self) -> int:
        """Those of the waiting requests that have run already."""
        table = self._state.table
        return table.max_slots - table.num_free - table.num_running

    def pending_tokens(self) -> int:
        """Returns how many known tokens are not computed yet, of all requests; looks at each one that waits."""
        table = self._state.table
        order = table.order
        total = int(np.maximum(table.known[order] - table.computed[order], 0).sum())
        for request in (*self._state.queue, *self._state.aside):
            total += len(request.tokens) if request.slot is None else int(table.known[request.slot])
        return total

    @property
    def pool(self) -> BlockPool:
        """The KV blocks."""
        return self._state.pool

    @property
    def table(self) -> RequestTable:
        """The columns; for reading."""
        return self._state.table

    def submit(self, request: Request) -> None:
        """Queues a request; one with a grammar must have its guide by now. Raises as `check` does."""
        self.check(request)
        request.arrival = self._arrivals
        self._arrivals += 1
        self._state.queue.push(request)

    def check(self, request: Request) -> None:
        """Says whether a request can be queued.

        Raises:
            InvalidRequestError: it has no tokens, or ids or parameters out of range.
            ContextLengthError: prompt and output do not fit the context.
        """
        limits = self._state.limits
        known, prompt = len(request.tokens), request.prompt_len
        if not 1 <= prompt <= known:
            raise InvalidRequestError("The prompt must have at least one token.", param="prompt")
        if int(request.tokens.min()) < 0 or int(request.tokens.max()) >= limits.vocab_size:
            raise InvalidRequestError("The prompt has a token id outside the vocabulary.", param="prompt")
        if request.pooling is not Pooling.NONE:
            self._check_pooling(request)
            return
        request.params.check(vocab_size=limits.vocab_size)
        if prompt + 1 > limits.max_model_len or known >= limits.max_model_len:
            raise ContextLengthError(
                f"The prompt has {prompt} tokens, but the context only {limits.max_model_len}, output included.",
                param="prompt",
            )
        if prompt + request.params.max_tokens > limits.max_model_len:
            raise ContextLengthError(
                f"The prompt has {prompt} tokens and max_tokens is {request.params.max_tokens}; "
                f"together they exceed the context of {limits.max_model_len}.",
                param="max_tokens",
            )
        if known - prompt >= request.params.max_tokens:
            raise InvalidRequestError("The resumed output has reached max_tokens already.", param="max_tokens")

    def _check_pooling(self, request: Request) -> None:
        limit = self._state.limits.max_model_len
        if len(request.tokens) > request.prompt_len or request.grammar is not None:
            raise InvalidRequestError("A request for a vector has no output and no grammar.", param="pooling")
        if request.prompt_len > limit:
            raise ContextLengthError(
                f"The input has {request.prompt_len} tokens, but the context only {limit}.", param="prompt"
            )

    def end(self, requests: list[Request]) -> None:
        """Ends requests at any moment, waiting, running or preempted; blocks and slots are free at once.

        Requests that have ended already are left alone.
        """
        slots = []
        for request in dict.fromkeys(requests):  # one may be named twice
            self._state.aside.pop(request, None)
            if request.slot is not None:
                slots.append(request.slot)
            else:
                self._state.queue.discard(request)
        if slots:
            self._state.end(slots)

    def end_all(self) -> list[Request]:
        """Ends every request and returns them; steps in flight become stale."""
        running = [request for request in self._state.table.requests if request is not None]
        waiting = [request for request in (*self._state.queue, *self._state.aside) if request.slot is None]
        self.end([*running, *waiting])
        return [*running, *waiting]

    def restart(self, num_blocks: int | None = None) -> None:
        """Forgets the steps in flight, all KV and all keys; every request waits and resumes from its known tokens.

        The caller drops the results of the steps that were in flight.

        Args:
            num_blocks: blocks of a new worker, which knows of no request; None: the worker is still the same.
        """
        self._state.restart(num_blocks)

    def suspects(self) -> list[Request]:
        """Returns the requests that the oldest step in flight computes and that have not ended since its plan."""
        if not self._state.flight:
            return []
        record, table = self._state.flight[0], self._state.table
        live = record.slots[table.epoch[record.slots] == record.epochs]
        return [request for slot in live.tolist() if (request := table.requests[slot]) is not None]

    def set_aside(self) -> None:
        """Keeps everything that waits out of planning until `bring_back`; it still counts as waiting."""
        for request in self._state.queue:
            self._state.queue.discard(request)
            self._state.aside[request] = None

    def bring_back(self, requests: Iterable[Request] | None = None) -> None:
        """Lets ``requests`` that were set aside, or all of them, wait for their turn again."""
        aside = self._state.aside
        for request in [*aside] if requests is None else requests:
            if request in aside:
                del aside[request]
                self._state.queue.push(request)

    def propose(self, request: Request, ids: I32) -> None:
        """Gives a decoding request tokens to verify in its next plan.

        Ignored unless nothing of it is in flight, and where a grammar guides it.

        At most as many are kept as its limit leaves room for.
        """
        table, slot = self._state.table, request.slot
        if slot is None or not table.running[slot] or table.in_flight[slot] or table.guided[slot]:
            return  # what a grammar allows after a draft is not known before the draft is
        room = int(table.limit[slot]) - int(table.known[slot]) - 1
        if room <= 0 or int(table.known[slot]) - int(table.computed[slot]) != 1:
            return
        ids = ids[:room]
        table.drafts[slot] = len(ids)
        self._state.draft_ids.pop(slot, None)
        if len(ids):
            self._state.draft_ids[slot] = np.array(ids, np.int32)

    def plan(self) -> StepPlan | None:
        """Returns the next step and counts it as in flight, or None when nothing can be computed now."""
        return self._planner.plan()

    def apply(self, result: StepResult) -> list[Output]:
        """Applies the result of the oldest step in flight; returns what the front ends are to hear.

        Raises:
            ProtocolError: the result does not belong to that step, or breaks the protocol.
        """
        return self._lander.apply(result)

    def guide_work(self) -> GuideWork | None:
        """Returns what grammars have to compute after a plan or a result, or None. See `guides`."""
        return self._guidance.work()

    def settle(self, work: GuideWork) -> Settled:
        """Takes over what grammars have computed; to be called before the next plan or result."""
        return self._guidance.settle(work)

    def take_failures(self) -> list[Failure]:
        """Returns and forgets the requests that ended with an error while planning."""
        failures, self._state.failures = self._state.failures, []
        return failures

    def reset_prefix_cache(self) -> int:
        """Forgets all cached prefixes; running requests go on. Returns how many keys there were."""
        return self._state.pool.clear_keys()

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless the invariants of the counters, the blocks and the slots hold."""
        table, pool = self._state.table, self._state.pool
        owned = np.array([slot for slot, owner in enumerate(table.requests) if owner is not None], np.int32)
        order = table.order
        known, computed, placeholders = table.known[owned], table.computed[owned], table.placeholders[owned]
        held, landed = table.held[owned], table.landed[owned]
        _require((placeholders >= 0).all(), "a negative number of placeholders")
        _require((table.in_flight[owned] >= 0).all(), "a row in flight less than zero times")
        _require(((computed >= 0) & (computed <= known + placeholders)).all(), "computed out of range")
        _require(((landed >= 0) & (landed <= computed) & (landed <= known)).all(), "landed out of range")
        _require((known <= table.limit[owned]).all(), "more tokens than the limit")
        _require((held * table.block_size >= computed).all(), "too few blocks")
        whole = np.maximum(landed // table.block_size, table.matched[owned])
        _require((table.hashed[owned] <= whole).all(), "a key for a block that is not computed")
        _require((table.matched[owned] * table.block_size <= known).all(), "more matched than known")
        _require(len(set(order.tolist())) == len(order), "a slot twice in the running order")
        _require(table.running[order].all(), "a slot in the running order that does not run")
        _require(int(table.running.sum()) == len(order), "a running slot that is not in the order")
        _require(not held[~table.running[owned]].any(), "a preempted request that holds blocks")
        appends = self._state.appends
        _require(
            all(table.running[slot] and not table.in_flight[slot] for slot in appends),
            "forced tokens for a row that is in flight or has none",
        )
        _require(not (table.forced[owned] & ~table.guided[owned]).any(), "forced tokens without a grammar")
        _require(int(table.guided.sum()) == self._state.guided, "a wrong number of guided requests")
        _require(int(table.pools.sum()) == self._state.pooling, "a wrong number of pooling requests")
        _require(not any(request in self._state.aside for request in self._state.queue), "a request in two places")
        counted = np.zeros(pool.num_blocks, np.int32)
        for slot in owned.tolist():
            np.add.at(counted, table.blocks[slot, : table.held[slot]], 1)
        pool.check_integrity()
        pool.check_references(counted)
        _require(len(owned) + table.num_free == table.max_slots, "a slot neither owned nor free")


def _require(condition: object, fault: str) -> None:
    if not condition:
        raise AssertionError(fault)
