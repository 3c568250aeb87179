"""One link to a core: plans and masks in, results out, in order.

The event loop takes plans off the ring as they come, also while a step runs; the device thread executes them one
after another and hands each result back to the loop, while the next plan already waits in its queue. Masks come on a
stream of their own; a step with gated rows waits for its own on the device thread (see ``masks.py``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tercet_shared.errors import InternalError, ProtocolError, TercetError, bounded
from tercet_shared.ipc.link import Stream
from tercet_shared.wire.frames import decode_from_core, encode_result
from tercet_shared.wire.step import GrammarMask, StepPlan, StepResult, empty_i32
from tercet_worker.device_thread import DeviceThread
from tercet_worker.masks import Masks
from tercet_worker.parallel.topology import SINGLE
from tercet_worker.telemetry.observer import StepObserver

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_shared.ipc.link import CloseReason, FrameLink
    from tercet_worker.parallel.topology import Topology
    from tercet_worker.pending import PendingStep
    from tercet_worker.runner import ModelRunner

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_ERROR = 500
"""Characters of a step's error that go to the core."""


class Session:
    """Executes the plans of one core until its link closes.

    Args:
        link: open; the caller closes it.
        runner: without requests.
        device: on which the runner is used.
        depth: plans that the core may have under way at once.
        observer: hears of every step.
        topology: which rank of which group this is. One rank answers. A step that fails in one rank of a group, and not
            in all alike, ends it: what they compute together cannot be trusted any more.

    A plan or mask that breaks the protocol closes the link.
    """

    def __init__(
        self,
        link: FrameLink,
        runner: ModelRunner,
        device: DeviceThread,
        depth: int,
        observer: StepObserver | None = None,
        topology: Topology = SINGLE,
    ) -> None:
        self._link = link
        self._runner = runner
        self._device = device
        # A rank that does not answer may be behind the one that does, by which the core counts, and learn late of what
        # it has done.
        self._depth = depth if topology.answers else 3 * depth
        self._topology = topology
        self._broken: asyncio.Future[None] | None = None
        self._observer = StepObserver() if observer is None else observer
        self._masks = Masks(runner.limits.vocab_size, depth)
        # Of plans. Each is counted on one thread: the loop, and whichever computes.
        self._accepted = 0
        self._answered = 0
        self._handed = 0  # results that were given to the loop to send
        self._sent = 0  # those of them that it has sent
        self._unseen: deque[tuple[StepPlan, StepResult, int]] = deque()  # what the observer has not heard of yet
        self._ended = False  # as the observer knows
        self._over = False
        # Where steps overlap, a thread of its own waits for each, while the device is given the next one.
        self._results = DeviceThread("results") if runner.overlaps else None

    async def run(self) -> CloseReason:
        """Serves until the link closes, and returns why. Then, or when cancelled, plans that wait are dropped.

        Raises:
            TercetError: a step failed in this rank of a group.
        """
        loop = asyncio.get_running_loop()
        broken = self._broken = loop.create_future()

        def on_frames(frames: list[bytes]) -> None:
            for frame in frames:
                message = decode_from_core(frame)
                if isinstance(message, GrammarMask):
                    self._masks.put(message)
                else:
                    self._accept(message, loop)
            loop.call_soon(self._observe)

        self._observer.begin()
        if self._results is not None:
            self._results.start()
        try:
            for stream in Stream:
                if self._link.close_reason is None:  # a core may think better of it at once
                    self._link.on_frames(on_frames, stream)
            return await self._closed_or(broken)
        finally:
            self._over = True
            if self._results is not None:
                self._results.stop(0)
            self._masks.close()
            try:
                self._observe()
            finally:
                self._ended = True
                self._observer.end()

    async def _closed_or(self, broken: asyncio.Future[None]) -> CloseReason:
        closed = asyncio.ensure_future(self._link.wait_closed())
        try:
            await asyncio.wait((closed, broken), return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                broken.result()
            return await closed
        finally:
            closed.cancel()
            broken.cancel()

    def _accept(self, plan: StepPlan, loop: asyncio.AbstractEventLoop) -> None:
        if self._accepted - self._answered >= self._depth:
            raise ProtocolError(f"More than the agreed {self._depth} plans are under way.")
        grammar = self._masks.expect(plan)
        self._accepted += 1
        arrived = time.monotonic_ns()

        def begin() -> None:
            if self._over:
                return
            started = time.monotonic_ns()
            pending = self._guarded(loop, plan, lambda: self._runner.execute(plan, grammar))
            if pending is None:
                return
            if self._results is None:
                end(pending, started)
            else:
                self._results.submit(lambda: end(pending, started))

        def end(pending: PendingStep | StepResult, started: int) -> None:
            result = pending if isinstance(pending, StepResult) else self._guarded(loop, plan, pending.result)
            if result is None:
                return
            result.wait_us = (started - arrived) // 1_000
            result.run_us = (time.monotonic_ns() - started) // 1_000
            try:
                self._answer(loop, plan, result)
            except Exception as error:  # the core waits for it, and nobody looks at what this thread raises
                logger.exception("step %d cannot be answered", plan.step_id)
                reason = f"Step {plan.step_id} cannot be answered: {type(error).__name__}: {error}"
                self._give_up(loop, InternalError(reason))

        self._device.submit(begin)

    def _guarded(self, loop: asyncio.AbstractEventLoop, plan: StepPlan, work: Callable[[], T]) -> T | StepResult | None:
        """Returns what ``work`` returns. Whatever goes wrong is the step's result: later steps may be fine.

        In a rank of a group it ends the group, and None is returned.
        """
        try:
            return work()
        except TercetError as error:
            # A plan that cannot be executed is refused by all ranks alike, before anything is done.
            if self._topology.ranks > 1 and not isinstance(error, ProtocolError):
                self._give_up(loop, error)
                return None
            if not self._over:  # else it may have waited for a mask that cannot come any more
                logger.error("step %d failed: %s", plan.step_id, error.message)  # noqa: TRY400  # no traceback
            return _failed(plan, error.message)
        except Exception as error:  # a fault in one step must not end the worker; the log has it all
            logger.exception("step %d failed", plan.step_id)
            if self._topology.ranks > 1:
                rank = self._topology.rank
                self._give_up(loop, InternalError(f"A step failed in rank {rank}: {type(error).__name__}: {error}"))
                return None
            return _failed(plan, f"The step failed in the worker: {type(error).__name__}: {error}")

    def _give_up(self, loop: asyncio.AbstractEventLoop, error: TercetError) -> None:
        if not self._over:
            self._over = True
            loop.call_soon_threadsafe(self._break, error)

    def _answer(self, loop: asyncio.AbstractEventLoop, plan: StepPlan, result: StepResult) -> None:
        """Sends a result, on the thread that has it.

        Through the loop it would wait for a processor, and for the interpreter, which the next step has both.
        """
        if self._over:
            return
        self._answered += 1  # before the core can know of it, and send another plan
        if not self._topology.answers:
            return
        frame = encode_result(result)
        self._unseen.append((plan, result, time.time_ns()))
        if self._handed != self._sent or not self._link.try_send(frame):
            self._handed += 1
            loop.call_soon_threadsafe(self._send, frame)
        elif self._accepted == self._answered:  # else the observer hears of it with the plan that follows
            loop.call_soon_threadsafe(self._observe)

    def _send(self, frame: bytes) -> None:
        try:
            if not self._over and self._link.close_reason is None:
                self._link.send(frame)
        finally:
            self._sent += 1  # not before: the next one would overtake it
        self._observe()

    def _observe(self) -> None:
        """Tells the observer what it has not heard of yet."""
        while self._unseen and not self._ended:
            self._observer.answered(*self._unseen.popleft())

    def _break(self, error: TercetError) -> None:
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)


def _failed(plan: StepPlan, message: str) -> StepResult:
    offsets = np.zeros(len(plan.slots) + 1, np.int32)
    return StepResult(plan.step_id, offsets, empty_i32(), error=bounded(message, _MAX_ERROR))
