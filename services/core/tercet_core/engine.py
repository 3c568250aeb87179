"""The engine loop: plan while there is room in flight, await the oldest result, apply it, tell the front ends.

One coroutine. Everything else that runs on the event loop (streams, heartbeats) runs while it waits; the scheduler's
methods return at once and are called from that loop only, so no state is ever seen half changed. What grammars compute
runs on another thread, which the coroutine awaits.

When the worker is lost, every request stays: what was in flight is forgotten, requests go on from their known tokens on
the next worker, and submits queue meanwhile. When a step fails, its requests are tried again apart (`Isolation`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tercet_core.isolation import Isolation
from tercet_core.observer import Observer
from tercet_core.preparation import NoGuides, Preparation
from tercet_core.scheduling.outputs import End, row_of
from tercet_core.scheduling.request import Ending
from tercet_core.scheduling.resumption import end_of
from tercet_core.step_timer import StepTimer
from tercet_core.token_rate import TokenRate
from tercet_shared.errors import InternalError, LinkError, ProtocolError, UnavailableError
from tercet_shared.ipc.errors import FrameTooLargeError
from tercet_shared.ipc.link import LEAVES, CloseKind, CloseReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_core.dumps import StepDumps
    from tercet_core.preparation import Guides
    from tercet_core.scheduling.outputs import Output
    from tercet_core.scheduling.request import Failure, Request
    from tercet_core.scheduling.scheduler import Scheduler
    from tercet_shared.errors import TercetError
    from tercet_shared.wire.step import GrammarMask, StepPlan, StepResult

_log = logging.getLogger(__name__)


class Link(Protocol):
    """What the engine needs of a worker."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the worker's KV pool."""

    @property
    def close_reason(self) -> CloseReason | None:
        """Why the link is closed; None while it is open."""

    def start(self, on_result: Callable[[StepResult], None], on_closed: Callable[[CloseReason], None]) -> None:
        """Hands over every result in order, and the end of the link once. Raises `LinkError` when it is closed."""

    def submit(self, plan: StepPlan) -> None:
        """Sends a plan after all earlier ones; never waits. Raises `LinkError`."""

    def submit_mask(self, mask: GrammarMask) -> None:
        """Sends the mask of a plan that was sent; never waits. Raises `LinkError`."""

    async def close(self, goodbye: str) -> None:
        """Ends the link and tells the worker why. Idempotent."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The end of a worker, as far as the engine is concerned.

    Attributes:
        reason: one sentence.
        hangs: whether its process may still exist but cannot be relied on, so that somebody should end it.
        orderly: whether it was asked to go, and said so.
    """

    reason: str
    hangs: bool
    orderly: bool = False


class Workers(Protocol):
    """Where the next worker comes from."""

    async def following(self, loss: Loss) -> Link:
        """Waits for a worker that can take over. Raises `LinkError` when none comes."""


@dataclass(slots=True)
class _Sent:
    """A plan without its result."""

    plan: StepPlan
    at: float  # perf_counter
    forgotten: bool = False  # its result does not count: a step before it failed


class Engine:
    """Runs a scheduler against one worker after another.

    Args:
        scheduler: owned by the engine from here on.
        publish: takes what one front end is to hear; must return at once.
        workers: asked when the worker is lost.
        dumps: told of failed steps.
        guides: compiles grammars and computes masks; without it requests with a grammar are refused.
        observer: hears what happens.
        depth: steps in flight at most.
        max_losses: workers lost in a row, with work and without a step in between, that end the engine.
        step_timeout_s: seconds for a step's result, after which the worker is given up although it shows life.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        publish: Callable[[Output], None],
        workers: Workers,
        dumps: StepDumps,
        *,
        depth: int,
        max_losses: int,
        step_timeout_s: float = 30.0,
        guides: Guides | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._tell = publish
        self._workers = workers
        self._dumps = dumps
        self._observer = Observer() if observer is None else observer
        self._depth = depth
        self._max_losses = max_losses
        # Twice what it takes to single out one of all requests: then it is not the requests.
        self._max_failed_steps = 2 * scheduler.limits.max_slots.bit_length() + 2
        self._isolation = Isolation(scheduler)
        self._guides: Guides = NoGuides() if guides is None else guides
        self._preparation = Preparation(self._guides, self._admit, self._refuse)
        self._link: Link | None = None
        self._lost_at: float | None = None  # monotonic; when the worker was lost that has no successor yet
        self.worker_left = False
        """Whether the worker that was lost last had said so before."""
        self._flight: deque[_Sent] = deque()
        self._results: deque[StepResult] = deque()
        self._closed: CloseReason | None = None
        self._step_timeout_s = step_timeout_s
        self._overdue: int | None = None  # the step that the worker has not answered in time
        self._waits = False  # for a result, or for something to do
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._losses = 0  # in a row
        self._failed_steps = 0  # in a row
        self.progress = 0
        """Plans and results so far; see `Watchdog`."""
        self.step_seconds = 0.0
        self.token_rate = TokenRate()

    @property
    def busy(self) -> bool:
        """Whether there is something to compute and a worker to compute it."""
        return self._link is not None and self.scheduler.num_running + self.scheduler.num_waiting > 0

    @property
    def has_worker(self) -> bool:
        """Whether a worker is connected."""
        return self._link is not None

    @property
    def without_worker_s(self) -> float:
        """Seconds since the worker was lost; 0 while there is one."""
        return 0.0 if self._lost_at is None else time.monotonic() - self._lost_at

    def submit(self, request: Request) -> None:
        """Queues a request, also while there is no worker; one with a grammar when that is compiled.

        Raises:
            RequestError: it cannot be served as it is. What is wrong with a grammar the front end hears later.
        """
        over = end_of(request, self.scheduler.limits.max_model_len)
        if request.grammar is None and over is None:
            self._admit(request)
            self._observer.arrived(request)
            return
        if over is None:
            self.scheduler.check(request)
        self._observer.arrived(request)
        if request.grammar is None:
            self._admit(request)
            return
        # With a grammar, too: more tokens may end it than are known so far, and that counts more than a limit.
        self._preparation.start(request, request.grammar)
        self._idle.clear()

    def end(self, requests: list[Request], reason: str = "abort") -> None:
        """Ends requests at any moment, for a reason in one word; those that ended already are left alone."""
        self._observer.ended(requests, self.scheduler, reason)
        self._preparation.cancel(requests)
        self.scheduler.end(requests)
        self._note_idle()
        self._wake.set()

    async def run(self, link: Link) -> None:
        """Runs until cancelled, or until there is no worker any more.

        Raises:
            LinkError: no worker takes over, or too many were lost in a row. Every request has been told.
        """
        try:
            while True:
                loss = await self._serve(link)
                self._forget_worker(loss)
                link = await self._workers.following(loss)
                self.scheduler.restart(link.num_blocks)
        except LinkError as error:
            self.fail_all(UnavailableError(f"The worker behind this core is gone: {error.message}"))
            raise

    async def wait_idle(self) -> None:
        """Waits until no request is left."""
        await self._idle.wait()

    def fail_all(self, error: TercetError) -> None:
        """Ends every request with ``error``."""
        self._fail([*self._preparation.cancel_all(), *self.scheduler.end_all()], error)
        self._idle.set()

    def _admit(self, request: Request) -> None:
        if (over := end_of(request, self.scheduler.limits.max_model_len)) is not None:
            self._publish(row_of(request, [], over))
            self._note_idle()
            return
        self.scheduler.submit(request)
        self._isolation.joined()
        self._idle.clear()
        self._wake.set()

    def _publish(self, output: Output) -> None:
        self._observer.published(output, self.scheduler)
        self._tell(output)

    def _refuse(self, request: Request, error: TercetError) -> None:
        self._fail([request], error)
        self._note_idle()

    # ---------------------------------------------------------------------------------------- one worker

    async def _serve(self, link: Link) -> Loss:
        """Runs on one worker until it is lost."""

        def on_result(result: StepResult) -> None:
            if link is self._link:
                self._results.append(result)
                self._wake.set()

        def on_closed(reason: CloseReason) -> None:
            if link is self._link:
                self._closed = reason
                self._wake.set()

        def on_overdue(step: int) -> None:
            if link is self._link:
                self._overdue = step
                self._wake.set()

        self._link, self._closed, self._overdue, self._failed_steps = link, None, None, 0
        self._lost_at = None
        try:
            link.start(on_result, on_closed)
            with StepTimer(self._step_timeout_s, self._awaited, on_overdue):
                while True:
                    await self._land_results(link)
                    if (loss := self._loss()) is not None:
                        return loss
                    await self._send_plans(link)
                    self._note_idle()
                    self._waits = True
                    await self._wake.wait()
                    self._waits = False
                    self._wake.clear()
        except FrameTooLargeError:  # the same would happen with any worker
            raise
        except LinkError as error:
            # It broke the protocol, or cannot compute; unless it was gone before, which then is the reason.
            closed = link.close_reason
            await link.close(error.message)
            if closed is not None:
                return _loss_by(closed)
            return Loss(error.message, hangs=not isinstance(error, ProtocolError))
        finally:
            self._link, self._waits = None, False
            self._flight.clear()
            self._results.clear()

    def _loss(self) -> Loss | None:
        """Returns the loss of the worker, if it is lost. Raises `LinkError` when it does not answer."""
        if self._closed is not None:
            return _loss_by(self._closed)
        if self._overdue is not None and self._flight and self._flight[0].plan.step_id == self._overdue:
            raise LinkError(f"the worker has not answered step {self._overdue} for {self._step_timeout_s:g} s")
        return None

    def _awaited(self) -> int | None:
        """Returns the step in flight that only the worker holds up, if any."""
        return self._flight[0].plan.step_id if self._waits and self._flight and not self._results else None

    async def _land_results(self, link: Link) -> None:
        while self._results:
            result = self._results.popleft()
            if not self._flight or self._flight[0].plan.step_id != result.step_id:
                expected = self._flight[0].plan.step_id if self._flight else "none"
                raise ProtocolError(
                    f"The worker answered step {result.step_id}; the oldest step in flight is {expected}."
                )
            sent = self._flight.popleft()
            self.progress += 1
            if sent.forgotten:
                continue
            if result.error:
                self._land_failure(sent.plan, result.error)
                await self._work_guides(link)
                continue
            begin = time.perf_counter()
            outputs = self.scheduler.apply(result)
            self._failed_steps = self._losses = 0
            for output in outputs:
                self._publish(output)
            now = time.perf_counter()
            self.step_seconds = now - sent.at
            self.token_rate.landed(sent.plan, sent.at, begin)
            self._observer.applied(result, begin - sent.at, now - begin)
            await self._work_guides(link)  # the worker may be waiting for a mask, so before anything is planned

    async def _send_plans(self, link: Link) -> None:
        self._isolation.advance()
        while len(self._flight) < self._depth:
            begin = time.perf_counter()
            plan = self.scheduler.plan()
            if failures := self.scheduler.take_failures():
                self._report(failures)
            if plan is None:
                if self._isolation.advance():
                    continue
                return
            self.progress += 1
            now = time.perf_counter()
            self._observer.planned(plan, self.scheduler, now - begin)
            self._flight.append(_Sent(plan, now))
            link.submit(plan)
            if len(plan.gated):  # of which nothing may be in flight
                await self._work_guides(link)

    async def _work_guides(self, link: Link) -> None:
        """Lets grammars take what has landed, sends the masks that are due, and publishes what they force and end.

        The loop goes on meanwhile: requests may come and end, but nothing is planned or applied.
        """
        work = self.scheduler.guide_work()
        if work is None:
            return
        await self._guides.compute(work)
        settled = self.scheduler.settle(work)
        for output in settled.outputs:
            self._publish(output)
        for mask in settled.masks:
            if link.close_reason is None:  # else what it has answered still counts
                link.submit_mask(mask)

    # ---------------------------------------------------------------------------------------- when things break

    def _land_failure(self, plan: StepPlan, error: str) -> None:
        """Finds out who is to blame for a failed step; raises `LinkError` when it is not the requests."""
        self._dumps.write(plan, error, self.scheduler.suspects())
        for later in self._flight:
            later.forgotten = True
        culprit = self._isolation.failed()
        if culprit is not None:
            self.scheduler.end([culprit])
            self._fail([culprit], InternalError(f"The step failed: {error}"))
        self._failed_steps += 1
        if self._failed_steps > self._max_failed_steps:
            raise LinkError(f"{self._failed_steps} steps in a row have failed, the last one with: {error}")

    def _forget_worker(self, loss: Loss) -> None:
        """Keeps every request, and raises `LinkError` when workers are lost again and again."""
        self._lost_at = time.monotonic()
        self.worker_left = loss.orderly
        self.scheduler.restart()
        self._isolation.give_up()
        self._note_idle()
        waiting = self.scheduler.num_waiting
        if waiting:  # the loss of an idle worker costs nobody anything
            self._losses += 1
        if self._losses >= self._max_losses:
            raise LinkError(
                f"The worker was lost {self._losses} times in a row without a step in between, "
                f"the last time because {loss.reason}"
            )
        _log.warning("the worker is lost: %s; %d requests wait for the next one", loss.reason, waiting)

    def _report(self, failures: list[Failure]) -> None:
        for failure in failures:
            self._fail([failure.request], failure.error)

    def _fail(self, requests: list[Request], error: TercetError) -> None:
        for request in requests:
            self._publish(row_of(request, [], End(0, Ending.ERROR, error=error)))

    def _note_idle(self) -> None:
        if not (self.scheduler.num_running or self.scheduler.num_waiting or len(self._preparation)):
            self._idle.set()


def _loss_by(reason: CloseReason) -> Loss:
    # One that says what went wrong is lost like one that cannot say anything any more: perhaps by what it computed.
    orderly = reason.kind is CloseKind.GOODBYE and reason.text.endswith(LEAVES)
    return Loss(reason.text, hangs=reason.kind is CloseKind.HEARTBEAT_LOST, orderly=orderly)
