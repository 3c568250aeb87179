"""One link to a core: plans in, results out, in order.

The event loop takes plans off the ring as they come, also while a step runs; the device thread executes them one
after another and hands each result back to the loop, while the next plan already waits in its queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from tercet_shared.errors import ProtocolError, TercetError, bounded
from tercet_shared.wire.step import StepPlan, StepResult, decode_plan, empty_i32, encode_result

if TYPE_CHECKING:
    from tercet_shared.ipc.link import CloseReason, FrameLink
    from tercet_worker.device_thread import DeviceThread
    from tercet_worker.runner import ModelRunner

logger = logging.getLogger(__name__)

_MAX_ERROR = 500
"""Characters of a step's error that go to the core."""


class Session:
    """Executes the plans of one core until its link closes.

    Args:
        link: open; the caller closes it.
        runner: without requests.
        device: on which the runner is used.
        depth: plans that the core may have under way at once.
    """

    def __init__(self, link: FrameLink, runner: ModelRunner, device: DeviceThread, depth: int) -> None:
        self._link = link
        self._runner = runner
        self._device = device
        self._depth = depth
        self._in_flight = 0
        self._over = False

    async def run(self) -> CloseReason:
        """Serves until the link closes, and returns why. Then, or when cancelled, plans that wait are dropped."""
        loop = asyncio.get_running_loop()

        def on_frames(frames: list[bytes]) -> None:
            for frame in frames:
                self._accept(decode_plan(frame), loop)

        try:
            if self._link.close_reason is None:  # a core may think better of it at once
                self._link.on_frames(on_frames)
            return await self._link.wait_closed()
        finally:
            self._over = True

    def _accept(self, plan: StepPlan, loop: asyncio.AbstractEventLoop) -> None:
        if self._in_flight >= self._depth:
            raise ProtocolError(f"More than the agreed {self._depth} plans are under way.")
        self._in_flight += 1
        arrived = time.monotonic_ns()

        def step() -> None:
            if not self._over:
                loop.call_soon_threadsafe(self._answer, self._execute(plan, arrived))

        self._device.submit(step)

    def _execute(self, plan: StepPlan, arrived: int) -> StepResult:
        """Executes one plan on the device thread. Whatever goes wrong is the step's result: later steps may be fine."""
        started = time.monotonic_ns()
        try:
            result = self._runner.execute(plan).result()
        except TercetError as error:
            logger.error("step %d failed: %s", plan.step_id, error.message)  # noqa: TRY400  # a sentence, no traceback
            result = _failed(plan, error.message)
        except Exception as error:  # a fault in one step must not end the worker; the log has it all
            logger.exception("step %d failed", plan.step_id)
            result = _failed(plan, f"The step failed in the worker: {type(error).__name__}: {error}")
        result.wait_us = (started - arrived) // 1_000
        result.run_us = (time.monotonic_ns() - started) // 1_000
        return result

    def _answer(self, result: StepResult) -> None:
        if self._over or self._link.close_reason is not None:
            return
        self._in_flight -= 1
        self._link.send(encode_result(result))


def _failed(plan: StepPlan, message: str) -> StepResult:
    offsets = np.zeros(len(plan.slots) + 1, np.int32)
    return StepResult(plan.step_id, offsets, empty_i32(), error=bounded(message, _MAX_ERROR))
