"""A fleet in model time, around the real router, policies and index.

A core here prefills one prompt after the other, at so many milliseconds per token that it has not cached, keeps a
request in a slot until its last token, and evicts the least recently used blocks; it tells of its load every second and
of its blocks a tenth of a second after a change, as `BlockBatch`es with numbers. There are several front ends, each
with a router of its own, which hear of each other's requests from the cores only.

During the run cores join, drain and leave, restart under the same name with an empty cache, lie about their load, and
vanish without a word; requests on one that is gone are placed again elsewhere, as migration does.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tercet_frontend.cores.interface import GenerationRequest
from tercet_frontend.routing import CoreFacts, LoadReport, Router
from tercet_shared.hashing import chain, root_key
from tercet_shared.registry.interface import BlockBatch
from tercet_shared.sampling_params import SamplingParams
from tests.bench.routing_trace import BLOCK_SIZE, FINGERPRINT, Asked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tercet_frontend.routing import Member, Placement, RoutingPolicy
    from tercet_shared.hashing import BlockKey

STATS_S, BLOCKS_S, DEAD_S, RETRY_S = 1.0, 0.1, 3.0, 0.05
CALIBRATE_EVERY, CALIBRATION = 20, np.arange(2_000, dtype=np.int32)
LIES = (
    LoadReport(running=-50, waiting=-1, pending_tokens=-(10**9), token_ms=-1.0),
    LoadReport(running=0, waiting=0, pending_tokens=0, token_ms=1e-12),
    LoadReport(running=math.nan, waiting=math.nan, pending_tokens=math.nan, token_ms=math.nan),
    LoadReport(running=10**18, waiting=10**18, pending_tokens=10**18, token_ms=math.inf),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a fleet. ``changes`` is how many cores do each of the things that cores do (see the module)."""

    cores: int = 1_000
    front_ends: int = 2
    token_ms: float = 0.5
    output_ms: float = 10.0
    slots: int = 16
    blocks: int = 1_024
    changes: int = 10


@dataclass(slots=True)
class Figures:
    """What a run showed; times are in milliseconds, decisions and calibrations in microseconds of processor time."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    finished: int = 0
    migrated: int = 0
    on_liars: int = 0
    ttft: list[float] = field(default_factory=list)
    answer: list[float] = field(default_factory=list)  # time to the last token
    decisions: list[float] = field(default_factory=list)
    calibrations: list[float] = field(default_factory=list)
    max_load: list[float] = field(default_factory=list)  # of all cores by their mean, once per second
    p99_load: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Job:
    """A request until its end."""

    asked: Asked
    request: GenerationRequest
    front_end: FrontEnd
    placement: Placement[SimCore] | None = None
    avoid: tuple[str, ...] = ()
    begun: bool = False


class SimCore:
    """A core; see the module."""

    def __init__(self, fleet: SimFleet, name: str) -> None:
        self.fleet = fleet
        self.name = name
        self.incarnation = 0
        self.alive = True
        self.lie: LoadReport | None = None
        self.jobs: dict[int, Job] = {}  # by id: those in slots
        self.waiting: deque[Job] = deque()
        self.prefills: deque[Job] = deque()
        self.latest = 0  # event
        self.cache: OrderedDict[BlockKey, None] = OrderedDict()  # the least recently used first
        self.changes: list[tuple[bool, BlockKey]] = []

    @property
    def facts(self) -> CoreFacts:
        return CoreFacts(
            core_id=self.name,
            incarnation=str(self.incarnation),
            model_fingerprint=FINGERPRINT,
            block_size=BLOCK_SIZE,
            slots=self.fleet.shape.slots,
        )

    @property
    def load(self) -> int:
        return len(self.jobs) + len(self.waiting)

    def report(self) -> LoadReport:
        if self.lie is not None:
            return self.lie
        pending = [*self.prefills, *self.waiting]
        tokens = sum(max(job.asked.prompt - self._matched(job) * BLOCK_SIZE, 1) for job in pending)
        return LoadReport(
            running=len(self.jobs),
            waiting=len(self.waiting),
            pending_tokens=tokens,
            token_ms=self.fleet.shape.token_ms if self.fleet.now > 1.0 else 0.0,
        )

    def submit(self, job: Job) -> None:
        self.waiting.append(job)
        self._admit()

    def lose(self) -> list[Job]:
        """Returns what ran here; all is gone with the cache."""
        lost = [*self.jobs.values(), *self.waiting]
        self.jobs.clear()
        self.waiting.clear()
        self.prefills.clear()
        self.cache.clear()
        self.changes.clear()
        return lost

    def _admit(self) -> None:
        while self.waiting and len(self.jobs) < self.fleet.shape.slots:
            job = self.waiting.popleft()
            self.jobs[id(job)] = job
            self.prefills.append(job)
            if len(self.prefills) == 1:
                self._prefill()

    def _prefill(self) -> None:
        job = self.prefills[0]
        cached = min(self._matched(job) * BLOCK_SIZE, job.asked.prompt - 1)
        slower = 4.0 if self.lie is not None else 1.0 + 0.2 * len(self.jobs) / self.fleet.shape.slots
        took = (job.asked.prompt - cached) * self.fleet.shape.token_ms * slower / 1e3
        self.fleet.after(took, self._prefilled, job, cached, self.incarnation)

    def _prefilled(self, job: Job, cached: int, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.alive:
            return
        self.prefills.popleft()
        if id(job) in self.jobs:
            self._store(job.asked.text.keys[: job.asked.prompt // BLOCK_SIZE])
            self.fleet.first_token(job, cached)
            slower = 1.0 + len(self.jobs) / self.fleet.shape.slots
            took = job.asked.output * self.fleet.shape.output_ms * slower / 1e3
            self.fleet.after(took, self._finished, job, incarnation)
        if self.prefills:
            self._prefill()

    def _finished(self, job: Job, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.alive:
            return
        del self.jobs[id(job)]
        self._store(job.asked.text.keys[: (job.asked.prompt + job.asked.output) // BLOCK_SIZE])
        self.fleet.finished(job)
        self._admit()

    def _matched(self, job: Job) -> int:
        keys = job.asked.text.keys
        most = job.asked.prompt // BLOCK_SIZE
        return next((i for i in range(most) if keys[i] not in self.cache), most)

    def _store(self, keys: Sequence[BlockKey]) -> None:
        cache, changes = self.cache, self.changes
        silent = not changes
        for key in reversed(keys):  # the head is used last, so tails are evicted first
            if key in cache:
                cache.move_to_end(key)
        new = [key for key in keys if key not in cache]
        for key in new:
            changes.append((True, key))
        for key in reversed(new):
            cache[key] = None
        for key in keys[: len(keys) - len(new)]:
            cache.move_to_end(key)
        while len(cache) > self.fleet.shape.blocks:
            key, _ = cache.popitem(last=False)
            changes.append((False, key))
        if silent and changes:
            self.fleet.after(BLOCKS_S, self._publish, self.incarnation)

    def _publish(self, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.alive or not self.changes:
            return
        batch = BlockBatch(self.latest + 1, [kind for kind, _ in self.changes], [key for _, key in self.changes])
        self.latest += len(self.changes)
        self.changes = []
        for front_end in self.fleet.front_ends:
            front_end.router.blocks(self.name, str(incarnation), batch)


class FrontEnd:
    """A router, and its members by core."""

    def __init__(self, policy: RoutingPolicy, clock: Callable[[], float]) -> None:
        self.router: Router[SimCore] = Router(policy, clock=clock)
        self.members: dict[str, Member[SimCore]] = {}

    def join(self, core: SimCore) -> None:
        self.members[core.name] = self.router.join(core, core.facts, ("model",))
        self.router.blocks(core.name, core.facts.incarnation, BlockBatch(core.latest, (), list(core.cache), True))

    def leave(self, core: SimCore) -> None:
        member = self.members.pop(core.name, None)
        if member is not None:
            member.leave()
            self.router.forget(core.name)


class SimFleet:
    """See the module. ``policy`` makes one for each front end, out of its number."""

    def __init__(self, shape: Shape, policy: Callable[[int], RoutingPolicy], seed: int) -> None:
        self.shape = shape
        self.now = 0.0
        self.figures = Figures()
        self._random = random.Random(seed)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.front_ends = [FrontEnd(policy(number), lambda: self.now) for number in range(shape.front_ends)]
        self.cores = [SimCore(self, f"core-{number}") for number in range(shape.cores)]
        for core in self.cores:
            self._join(core)

    def after(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        """Has ``call`` called in model time."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), call, arguments))

    def run(self, trace: Sequence[Asked]) -> Figures:
        """Returns the figures once all requests have ended."""
        for number, asked in enumerate(trace):
            request = GenerationRequest(
                request_id=str(number),
                model="model",
                prompt_ids=asked.text.ids[: asked.prompt],
                params=SamplingParams(),
                session=asked.text.session,
            )
            front_end = self.front_ends[number % len(self.front_ends)]
            self.after(asked.at, self._place, Job(asked, request, front_end))
        self._plan_changes(trace[-1].at)
        self.after(0.5, self._sample, trace[-1].at)
        while self._events and self.figures.finished < len(trace):
            self.now, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)
        return self.figures

    def first_token(self, job: Job, cached: int) -> None:
        """The core has computed the prompt."""
        if job.placement is not None:
            job.placement.started()
        if not job.begun:
            job.begun = True
            self.figures.ttft.append((self.now - job.asked.at) * 1e3)
            self.figures.prompt_tokens += job.asked.prompt
            self.figures.cached_tokens += cached

    def finished(self, job: Job) -> None:
        """The core has computed the last token."""
        if job.placement is not None:
            job.placement.ended()
        self.figures.finished += 1
        self.figures.answer.append((self.now - job.asked.at) * 1e3)

    def _place(self, job: Job) -> None:
        begin = time.thread_time_ns()
        placement = job.front_end.router.place(job.request, "model", job.avoid)
        self.figures.decisions.append((time.thread_time_ns() - begin) / 1e3)
        if placement is None:
            raise AssertionError("no core is left")
        if len(self.figures.decisions) % CALIBRATE_EVERY == 0:
            begin = time.thread_time_ns()
            chain(root_key(FINGERPRINT), CALIBRATION, BLOCK_SIZE)
            self.figures.calibrations.append((time.thread_time_ns() - begin) / 1e3)
        job.placement = placement
        self.figures.on_liars += placement.core.lie is not None
        placement.core.submit(job)

    def _again(self, jobs: Sequence[Job], core: SimCore) -> None:
        for job in jobs:
            self.figures.migrated += 1
            job.avoid = (core.name,)
            if job.placement is not None:
                job.placement.ended(failed=True)
            self.after(RETRY_S, self._place, job)

    def _join(self, core: SimCore) -> None:
        for front_end in self.front_ends:
            front_end.join(core)
        self.after(self._random.uniform(0.0, STATS_S), self._report, core, core.incarnation)

    def _report(self, core: SimCore, incarnation: int) -> None:
        if core.alive and core.incarnation == incarnation:
            report = core.report()
            for front_end in self.front_ends:
                member = front_end.members.get(core.name)
                if member is not None:
                    member.report(report)
            self.after(STATS_S, self._report, core, incarnation)

    def _plan_changes(self, duration: float) -> None:
        chosen = self._random.sample(self.cores, 4 * self.shape.changes)
        at = self._random.uniform
        for number in range(self.shape.changes):
            liar, leaver, restarted, vanished = chosen[4 * number : 4 * number + 4]
            liar.lie = LIES[number % len(LIES)]
            self.after(at(0.2, 0.9) * duration, self._drain, leaver)
            self.after(at(0.2, 0.9) * duration, self._restart, restarted)
            self.after(at(0.2, 0.9) * duration, self._vanish, vanished)
            self.after(at(0.2, 0.9) * duration, self._arrive, SimCore(self, f"new-{number}"))

    def _arrive(self, core: SimCore) -> None:
        self.cores.append(core)
        self._join(core)

    def _drain(self, core: SimCore) -> None:
        for front_end in self.front_ends:
            front_end.leave(core)
        self.cores.remove(core)  # what runs there ends there

    def _restart(self, core: SimCore) -> None:
        lost = core.lose()
        core.incarnation += 1
        core.latest = 0
        for front_end in self.front_ends:
            front_end.leave(core)
        self._again(lost, core)
        self.after(1.0, self._join, core)

    def _vanish(self, core: SimCore) -> None:
        core.alive = False
        self.after(DEAD_S, self._noticed, core)

    def _noticed(self, core: SimCore) -> None:
        self.cores.remove(core)
        for front_end in self.front_ends:
            front_end.leave(core)
        self._again(core.lose(), core)

    def _sample(self, until: float) -> None:
        loads = sorted(core.load for core in self.cores if core.alive and core.lie is None)
        mean = sum(loads) / len(loads)
        if mean > 0:
            self.figures.max_load.append(loads[-1] / mean)
            self.figures.p99_load.append(loads[int(0.99 * (len(loads) - 1))] / mean)
        if self.now < until:
            self.after(1.0, self._sample, until)
