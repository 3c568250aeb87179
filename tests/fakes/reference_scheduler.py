"""The scheduler once more, as plainly as it can be written: objects, lists and loops, no columns and no cleverness.

It keeps the same contract as `tercet_core.scheduling` and decides the same on the same events, so that tests can
compare the two after every event. Block ids mean nothing here; what must agree is who computes how much when, with how
many blocks and how long a cached prefix, who is preempted, and what every front end hears.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tests.fakes.reference_pool import ReferencePool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_core.scheduling.state import Limits
    from tests.fakes.reference_pool import Block


@dataclass(eq=False)
class RefRequest:
    """A request with all its counters (see `contracts.md` §1 for their meaning)."""

    handle: int
    front_end: int
    root: str
    tokens: list[int]
    prompt_len: int
    limit: int
    stops: frozenset[int]
    priority: int
    tenant: str = ""
    arrival: int = -1
    computed: int = 0
    placeholders: int = 0
    drafts: list[int] = field(default_factory=list)
    landed: int = 0
    in_flight: int = 0
    blocks: list[Block] = field(default_factory=list)
    hashed: int = 0
    matched: int = 0
    residence: int = 0
    drew: int = 0  # the last step that was planned to draw a token for it
    has_slot: bool = False
    ended: bool = False
    admitted: bool = False
    lost: int = 0
    cached_tokens: int = 0

    @property
    def known(self) -> int:
        """Prompt and accepted output tokens."""
        return len(self.tokens)


@dataclass
class RefRow:
    """One row of a plan; it is also what a flight record remembers."""

    request: RefRequest
    tokens: int
    computed: int
    samples: bool
    drafts: list[int]
    new_blocks: int
    starts: bool
    residence: int


@dataclass
class RefPlan:
    """One step."""

    rows: list[RefRow]
    freed: list[int]  # handles of requests that had a slot and ended since the last plan


@dataclass(frozen=True)
class RefOutputRow:
    """What a front end hears of one request."""

    handle: int
    tokens: tuple[int, ...]
    ending: str = ""  # "stop", "length", "error"
    stop_id: int = -1
    cached_tokens: int = 0


@dataclass(frozen=True)
class RefOutput:
    """What one front end hears at once."""

    front_end: int
    rows: tuple[RefOutputRow, ...]


@dataclass(frozen=True)
class RefAnswer:
    """What the worker says of one row."""

    tokens: tuple[int, ...]
    finite: bool = True


class ReferenceScheduler:
    """The scheduler. Its events are those of `tercet_core.scheduling.scheduler`, under the same names."""

    def __init__(self, limits: Limits, *, policy: str = "priority") -> None:
        self.limits = limits
        self.policy = policy
        self.pool = ReferencePool(limits.num_blocks, caching=limits.prefix_caching)
        self.running: list[RefRequest] = []
        self.waiting: list[RefRequest] = []
        self.aside: list[RefRequest] = []
        self.served: dict[str, int] = {}  # by tenant, what its requests have cost; of those that have any
        self.flight: list[list[RefRow]] = []
        self.freed: list[int] = []
        self.failed: list[int] = []
        self.free_slots = limits.max_slots
        self.arrivals = 0
        self.steps = 0
        self.preemptions = 0
        self.recomputed_tokens = 0

    # ------------------------------------------------------------------------------------------------- events

    def submit(self, request: RefRequest) -> None:
        """Queues a request."""
        request.arrival = self.arrivals
        self.arrivals += 1
        self._wait(request)

    def end(self, requests: Sequence[RefRequest]) -> None:
        """Ends requests; the caller has given each once."""
        for request in requests:
            if request.ended:
                continue
            request.ended = True
            for place in (self.waiting, self.aside, self.running):
                if request in place:
                    place.remove(request)
            self._lose_blocks(request)
            if request.has_slot:
                request.has_slot = False
                self.free_slots += 1
                self.freed.append(request.handle)
                self.served[request.tenant] += 2 * (request.known - request.prompt_len)
            self._forget_tenants()

    def restart(self, num_blocks: int | None = None) -> None:
        """Forgets the steps in flight and all KV; with ``num_blocks`` the worker is another one."""
        for request in list(self.running):
            self._to_waiting(request)
        for request in (*self.waiting, *self.aside):
            request.placeholders = request.in_flight = 0
        self.flight = []
        self.pool.clear()
        if num_blocks is not None:
            self.freed = []
        if num_blocks not in (None, self.limits.num_blocks):
            self.limits = replace(self.limits, num_blocks=num_blocks)
            self.pool = ReferencePool(num_blocks, caching=self.limits.prefix_caching)

    def set_aside(self) -> None:
        """Keeps everything that waits out of planning."""
        self.aside += self.waiting
        self.waiting = []
        self._forget_tenants()

    def bring_back(self, requests: Sequence[RefRequest] | None = None) -> None:
        """Lets ``requests``, or all, wait again; those that were not set aside are left alone."""
        for request in list(self.aside if requests is None else requests):
            if request in self.aside:
                self.aside.remove(request)
                self._wait(request)

    def _wait(self, request: RefRequest) -> None:
        self.waiting.append(request)
        if request.tenant not in self.served:  # it has had nothing for a while, which earns no credit
            self.served[request.tenant] = min(self.served.values(), default=0)

    def _forget_tenants(self) -> None:
        """Keeps the account of those who wait or have a slot."""
        held = [request for request in self.aside if request.has_slot]
        active = {request.tenant for request in (*self.waiting, *self.running, *held)}
        self.served = {tenant: cost for tenant, cost in self.served.items() if tenant in active}

    def propose(self, request: RefRequest, ids: Sequence[int]) -> None:
        """Gives a decoding request with nothing in flight tokens to verify."""
        room = request.limit - request.known - 1
        if request in self.running and not request.in_flight and request.known - request.computed == 1 and room > 0:
            request.drafts = list(ids[:room])

    def _lose_blocks(self, request: RefRequest) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.hashed = request.matched = request.computed = request.landed = 0
        request.drafts = []

    # ----------------------------------------------------------------------------------------------- planning

    def plan(self) -> RefPlan | None:
        """Makes the next step, or nothing."""
        grants, may_follow = self._share_budget()
        rows = [
            RefRow(request, tokens, request.computed, False, list(request.drafts), 0, False, request.residence)
            for request, tokens in zip(self.running, grants, strict=True)
            if tokens
        ]
        if may_follow:
            rows += self._admit(grants)
        if not rows:
            return None
        self.steps += 1
        for row in rows:
            request = row.request
            if not row.starts:
                row.new_blocks = self._blocks(row.computed + row.tokens) - len(request.blocks)
                row.new_blocks = max(row.new_blocks, 0)
                request.blocks += self.pool.take(row.new_blocks)
            request.computed += row.tokens
            row.samples = request.computed == request.known + request.placeholders + len(row.drafts)
            if row.samples:
                request.placeholders += 1 + len(row.drafts)
                request.drew = self.steps
            request.in_flight += 1
            request.drafts = []
        self.flight.append(rows)
        freed, self.freed = self.freed, []
        return RefPlan(rows, freed)

    def _blocks(self, tokens: int) -> int:
        size = self.limits.block_size
        return (tokens + size - 1) // size

    def _share_budget(self) -> tuple[list[int], bool]:
        may_follow = True
        while True:
            grants, kept = self._grants()
            wanted = 0
            for request, tokens in zip(self.running, grants, strict=True):
                wanted += max(self._blocks(request.computed + tokens) - len(request.blocks), 0)
            if wanted <= self.pool.available:
                for request, keeps in zip(self.running, kept, strict=True):
                    if not keeps:
                        request.drafts = []
                return grants, may_follow
            if any(request.drafts for request, keeps in zip(self.running, kept, strict=True) if keeps):
                for request in self.running:
                    request.drafts = []
            elif len(self.running) > 1:
                self._preempt(max(self.running, key=lambda request: (request.priority, request.arrival)))
                may_follow = False
            elif self.running[0].in_flight:
                return [0], False
            else:
                self.failed.append(self.running[0].handle)
                self.end([self.running[0]])
                may_follow = True

    def _grants(self) -> tuple[list[int], list[bool]]:
        """Each running request's tokens, and whether it keeps its drafts."""
        left = self.limits.max_batched_tokens
        grants, kept = [], []
        resting = self._resting()
        for request in self.running:
            ahead = request.known + request.placeholders
            need = ahead + len(request.drafts) - request.computed
            if ahead >= request.limit or request in resting:
                need = 0
            tokens = min(need, left, self.limits.long_prefill_limit or left)
            keeps = tokens == need
            if request.drafts and not keeps:
                tokens = min(tokens, need - len(request.drafts))
            grants.append(tokens)
            kept.append(keeps)
            left -= tokens
        return grants, kept

    def _resting(self) -> list[RefRequest]:
        """Those that decode, but not in this step, because the worker's stages compute others meanwhile."""
        stages = self.limits.stages
        if stages == 1:
            return []
        decoding = [
            request
            for request in self.running
            if request.known + request.placeholders < request.limit
            and request.known + request.placeholders - request.computed == 1
        ]
        due = [request for request in decoding if not request.placeholders or self.steps + 1 - request.drew >= stages]
        due.sort(key=lambda request: request.drew)  # it is stable
        share = due[: (len(decoding) + stages - 1) // stages]
        return [request for request in decoding if request not in share]

    def _preempt(self, request: RefRequest) -> None:
        self.preemptions += 1
        self._to_waiting(request)

    def _to_waiting(self, request: RefRequest) -> None:
        request.lost = request.computed
        self._lose_blocks(request)
        request.residence += 1
        self.running.remove(request)
        self._wait(request)

    def _next_waiting(self) -> RefRequest | None:
        if self.policy == "fcfs":
            head = min(self.waiting, key=lambda request: request.arrival, default=None)
        elif self.policy == "fair":
            head = self._least_served()
        else:
            head = min(self.waiting, key=_rank, default=None)
        if head is None or head.has_slot or self.free_slots:
            return head
        holders = [request for request in self.waiting if request.has_slot]
        return min(holders, key=_rank, default=None)

    def _least_served(self) -> RefRequest | None:
        """The head of the tenant that has been served least; ties go by arrival.

        Whoever holds all slots but an eighth gets no further one, but what has a slot may resume.
        """
        most = max(self.limits.max_slots - self.limits.max_slots // 8, 1)
        heads = []
        for tenant in self.served:
            everybody = (*self.running, *self.waiting, *self.aside)
            held = sum(1 for request in everybody if request.tenant == tenant and request.has_slot)
            mine = [request for request in self.waiting if request.tenant == tenant]
            if held >= most:
                mine = [request for request in mine if request.has_slot]
            if mine:
                heads.append(min(mine, key=_rank))
        return min(heads, key=lambda request: (self.served[request.tenant], request.arrival), default=None)

    def _admit(self, grants: list[int]) -> list[RefRow]:
        left = self.limits.max_batched_tokens - sum(grants)
        headroom = self.pool.available
        for runner, tokens in zip(self.running, grants, strict=True):
            to_come = max(self._blocks(runner.known) - len(runner.blocks), 0)
            now = self._blocks(runner.computed + tokens) - len(runner.blocks)
            headroom -= max(to_come + 1, now)
        most = self.limits.max_partial_prefills
        partial = 0
        for runner, tokens in zip(self.running, grants, strict=True):
            partial += runner.computed + tokens < runner.known
        rows: list[RefRow] = []
        while left > 0 and (request := self._next_waiting()) is not None:
            if request.in_flight:
                break
            if self._blocks(request.known) > self.limits.num_blocks:
                self.failed.append(request.handle)
                if not request.has_slot:
                    self.served[request.tenant] += request.prompt_len
                self.end([request])
                continue
            if most and partial >= most:
                break
            matched = self._match(request)
            idle = sum(1 for block in matched if block.references == 0)
            claimed = self._blocks(request.known) - len(matched) + idle
            if claimed > headroom:
                break
            headroom -= claimed + 1
            rows.append(self._start(request, matched, left))
            left -= rows[-1].tokens
            partial += rows[-1].computed + rows[-1].tokens < request.known
        return rows

    def _match(self, request: RefRequest) -> list[Block]:
        size = self.limits.block_size
        matched: list[Block] = []
        for i in range(request.known // size):
            block = self.pool.holders.get((request.root, tuple(request.tokens[: (i + 1) * size])))
            if block is None:
                break
            matched.append(block)
        return matched

    def _start(self, request: RefRequest, matched: list[Block], left: int) -> RefRow:
        self.waiting.remove(request)
        self.running.append(request)
        if not request.has_slot:
            request.has_slot = True
            self.free_slots -= 1
            self.served[request.tenant] += request.prompt_len
        for block in matched:
            self.pool.share(block)
        computed = min(len(matched) * self.limits.block_size, request.known - 1)
        tokens = min(request.known - computed, left, self.limits.long_prefill_limit or left)
        request.blocks = matched + self.pool.take(self._blocks(computed + tokens) - len(matched))
        request.matched = request.hashed = len(matched)
        request.computed = request.landed = computed
        if request.admitted:
            self.recomputed_tokens += max(min(request.lost, request.known) - computed, 0)
        else:
            request.admitted = True
            request.cached_tokens = min(computed, request.prompt_len)
        return RefRow(request, tokens, computed, False, [], len(request.blocks), True, request.residence)

    # ----------------------------------------------------------------------------------------------- applying

    def apply(self, answers: Sequence[RefAnswer] | None) -> list[RefOutput]:
        """Applies the answers to the oldest step; None means that the step failed."""
        rows = self.flight.pop(0)
        heard: list[tuple[RefRequest, RefOutputRow]] = []
        broken: list[RefRequest] = []
        ended: list[RefRequest] = []
        landed: list[RefRequest] = []
        for i, row in enumerate(rows):
            request = row.request
            if request.ended:
                continue
            request.in_flight -= 1
            if answers is None or not answers[i].finite:
                broken.append(request)
                continue
            landed.append(request)
            self._land(row, answers[i])
            if row.samples:
                said = self._accept(request, answers[i].tokens)
                heard.append((request, said))
                if said.ending:
                    ended.append(request)
        for request in landed:
            self._publish(request)
        outputs = self._grouped(heard)
        self.end(ended)
        outputs += self._grouped([(loser, RefOutputRow(loser.handle, (), "error")) for loser in broken])
        for loser in broken:
            for block in loser.blocks[loser.matched :]:
                self.pool.forget(block)
        self.end(broken)
        return outputs

    def _land(self, row: RefRow, answer: RefAnswer) -> None:
        request = row.request
        if row.samples:
            request.placeholders -= 1 + len(row.drafts)
        rejected = 1 + len(row.drafts) - len(answer.tokens) if row.drafts else 0
        if request.residence == row.residence:
            request.landed += row.tokens - rejected
            request.computed -= rejected

    def _accept(self, request: RefRequest, tokens: Sequence[int]) -> RefOutputRow:
        taken = []
        for token in tokens:
            taken.append(token)
            request.tokens.append(token)
            if token in request.stops:
                return RefOutputRow(request.handle, tuple(taken), "stop", token, request.cached_tokens)
            if request.known == request.limit:
                return RefOutputRow(request.handle, tuple(taken), "length", -1, request.cached_tokens)
        return RefOutputRow(request.handle, tuple(taken))

    def _publish(self, request: RefRequest) -> None:
        size = self.limits.block_size
        while (request.hashed + 1) * size <= min(request.landed, request.known):
            end = (request.hashed + 1) * size
            self.pool.publish(request.blocks[request.hashed], (request.root, tuple(request.tokens[:end])))
            request.hashed += 1

    def _grouped(self, heard: list[tuple[RefRequest, RefOutputRow]]) -> list[RefOutput]:
        front_ends = sorted({request.front_end for request, _ in heard})
        return [
            RefOutput(front_end, tuple(row for request, row in heard if request.front_end == front_end))
            for front_end in front_ends
        ]


def _rank(request: RefRequest) -> tuple[int, int]:
    return request.priority, request.arrival
