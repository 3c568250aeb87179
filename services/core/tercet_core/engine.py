"""The engine loop: plan while there is room in flight, await the oldest result, apply it, tell the front ends.

One coroutine. Everything else that runs on the event loop (streams, heartbeats) runs while it waits; the scheduler's
methods return at once and are called from that loop only, so no state is ever seen half changed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tercet_core.scheduling.outputs import End, Output
from tercet_core.scheduling.request import Ending
from tercet_shared.errors import LinkError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_core.scheduling.request import Failure, Request
    from tercet_core.scheduling.scheduler import Scheduler
    from tercet_shared.errors import TercetError
    from tercet_shared.ipc.link import CloseReason
    from tercet_shared.wire.step import StepPlan, StepResult


class Link(Protocol):
    """What the engine needs of a worker."""

    def start(self, on_result: Callable[[StepResult], None], on_closed: Callable[[CloseReason], None]) -> None:
        """Hands over every result in order, and the end of the link once."""

    def submit(self, plan: StepPlan) -> None:
        """Sends a plan after all earlier ones; never waits."""


class Engine:
    """Runs a scheduler against one worker.

    Args:
        scheduler: owned by the engine from here on.
        link: the worker.
        publish: takes what one front end is to hear; must return at once.
        depth: steps in flight at most.
    """

    def __init__(self, scheduler: Scheduler, link: Link, publish: Callable[[Output], None], *, depth: int) -> None:
        self.scheduler = scheduler
        self._link = link
        self._publish = publish
        self._depth = depth
        self._results: deque[StepResult] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._lost: LinkError | None = None
        self._planned_at: deque[float] = deque()
        self.step_seconds = 0.0

    def submit(self, request: Request) -> None:
        """Queues a request. Raises `RequestError` when it cannot be served as it is."""
        self.scheduler.submit(request)
        self._idle.clear()
        self._wake.set()

    def end(self, requests: list[Request]) -> None:
        """Ends requests at any moment; those that ended already are left alone."""
        self.scheduler.end(requests)
        self._wake.set()

    async def run(self) -> None:
        """Runs until cancelled, or until the worker is gone.

        Raises:
            LinkError: the worker is gone or broke the protocol. Every request has been told.
        """
        self._link.start(self._on_result, self._on_closed)
        try:
            while True:
                self._turn()
                await self._wake.wait()
                self._wake.clear()
                if self._lost is not None:
                    raise self._lost
        except LinkError as error:
            self.fail_all(UnavailableError(f"The worker behind this core is gone: {error.message}"))
            raise

    async def wait_idle(self) -> None:
        """Waits until no request is left."""
        await self._idle.wait()

    def fail_all(self, error: TercetError) -> None:
        """Ends every request with ``error``."""
        self._fail(self.scheduler.end_all(), error)
        self._idle.set()

    def _turn(self) -> None:
        """Does everything that can be done without waiting."""
        scheduler = self.scheduler
        while self._results:
            for output in scheduler.apply(self._results.popleft()):
                self._publish(output)
            self.step_seconds = time.perf_counter() - self._planned_at.popleft()
        while scheduler.in_flight < self._depth:
            plan = scheduler.plan()
            if failures := scheduler.take_failures():
                self._report(failures)
            if plan is None:
                break
            self._planned_at.append(time.perf_counter())
            self._link.submit(plan)
        if not (scheduler.num_running or scheduler.num_waiting):
            self._idle.set()

    def _report(self, failures: list[Failure]) -> None:
        for failure in failures:
            self._fail([failure.request], failure.error)

    def _fail(self, requests: list[Request], error: TercetError) -> None:
        for request in requests:
            self._publish(
                Output(
                    request.front_end,
                    np.array([request.handle], np.uint64),
                    np.array([request.attempt], np.uint32),
                    np.zeros(2, np.int32),
                    np.zeros(0, np.int32),
                    [End(0, Ending.ERROR, error=error)],
                )
            )

    def _on_result(self, result: StepResult) -> None:
        self._results.append(result)
        self._wake.set()

    def _on_closed(self, reason: CloseReason) -> None:
        self._lost = LinkError(reason.text)
        self._wake.set()
