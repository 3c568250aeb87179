"""A worker without a model, behind the real ring: it keeps its own state from the plans, and its tokens are known.

    async with FakeWorker(core.link) as worker:
        worker.hold()                      # results wait
        plan = await worker.next_plan()
        worker.release()

The token after a text depends on its last token and its length alone (`next_token`), so a test can say what a request
must yield (`expected`), however the core batched, chunked, preempted or resumed it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tercet_shared.ipc.connect import connect
from tercet_shared.ipc.connection import LinkConnection
from tercet_shared.wire.step import (
    PROTOCOL_VERSION,
    CoreWelcome,
    StepPlan,
    StepResult,
    WorkerHello,
    decode_plan,
    decode_welcome,
    encode_hello,
    encode_result,
)

VOCAB = 50_000
TIMEOUT = 20.0
"""Seconds after which a wait fails: far beyond what anything here takes, also on a loaded machine."""


def next_tokens(last: npt.NDArray[Any], length: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Returns the token that follows texts of ``length`` tokens ending in ``last``; never 0, 1 or 2."""
    return ((last.astype(np.int64) * 31 + length * 7 + 11) % (VOCAB - 3) + 3).astype(np.int32)


def expected(prompt: list[int], count: int) -> list[int]:
    """Returns the first ``count`` output tokens for ``prompt``."""
    out: list[int] = []
    last, length = prompt[-1], len(prompt)
    for _ in range(count):
        last = int(next_tokens(np.array([last]), np.array([length]))[0])
        length += 1
        out.append(last)
    return out


def hello(**changes: Any) -> WorkerHello:
    """Returns what the fake worker offers."""
    values: dict[str, Any] = {
        "protocol": PROTOCOL_VERSION,
        "incarnation": "first",
        "model_name": "fake",
        "model_fingerprint": "fake-model",
        "tokenizer_fingerprint": "fake-tokenizer",
        "vocab_size": VOCAB,
        "block_size": 16,
        "num_blocks": 1024,
        "max_slots": 64,
        "max_model_len": 1024,
        "max_batched_tokens": 512,
        "dtype": "none",
        "device": "none",
        "pid": 0,
    }
    return WorkerHello(**(values | changes))


class FakeWorker:
    """Answers every step at once unless held. Use as a context manager, on the loop of the test."""

    def __init__(self, link: Path, **offer: Any) -> None:
        self.hello = hello(**offer)
        self.welcome: CoreWelcome | None = None
        self.plans: list[StepPlan] = []
        self.steps = 0
        self.keep_plans = True
        self.broken_rows: dict[int, list[int]] = {}  # step id -> rows whose logits are not finite
        self.failing_steps: dict[int, str] = {}
        self._link = link
        self._connection: LinkConnection | None = None
        self._held = False
        self._waiting: deque[StepPlan] = deque()
        self._arrived = asyncio.Condition()
        self._notify: set[asyncio.Task[None]] = set()
        slots = self.hello.max_slots
        self._last = np.zeros(slots, np.int32)
        self._length = np.zeros(slots, np.int32)

    @property
    def connection(self) -> LinkConnection:
        assert self._connection is not None
        return self._connection

    async def __aenter__(self) -> Self:
        joined = await connect(self._link, encode_hello(self.hello), timeout_s=TIMEOUT)
        self._connection = joined.connection
        self.welcome = decode_welcome(joined.reply)
        self._connection.on_frames(self._take)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connection.close("the fake worker leaves")

    def hold(self) -> None:
        """Withholds results from now on."""
        self._held = True

    def release(self, count: int | None = None) -> None:
        """Answers ``count`` withheld steps, or all and every later one."""
        for _ in range(len(self._waiting) if count is None else count):
            self._answer(self._waiting.popleft())
        if count is None:
            self._held = False

    async def wait_for_steps(self, count: int) -> None:
        """Waits until ``count`` plans have arrived since the start."""
        async with asyncio.timeout(TIMEOUT), self._arrived:
            await self._arrived.wait_for(lambda: self.steps >= count)

    def _take(self, frames: list[bytes]) -> None:
        for frame in frames:
            plan = decode_plan(frame)
            self.steps += 1
            if self.keep_plans:
                self.plans.append(plan)
            if self._held:
                self._waiting.append(plan)
            else:
                self._answer(plan)
        task = asyncio.get_running_loop().create_task(self._tell())
        self._notify.add(task)
        task.add_done_callback(self._notify.discard)

    async def _tell(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()

    def _answer(self, plan: StepPlan) -> None:
        new = plan.new
        if len(new):
            self._length[new.slots] = np.diff(new.token_offsets)
            self._last[new.slots] = new.token_ids[new.token_offsets[1:] - 1]
        if error := self.failing_steps.get(plan.step_id):
            self._length[plan.slots[plan.samples]] += 1  # the steps behind it were planned as if it had worked
            zeros = np.zeros(len(plan.slots) + 1, np.int32)
            self.connection.send(encode_result(StepResult(plan.step_id, zeros, zeros[:0], error=error)))
            return
        samples = plan.samples.copy()
        broken = np.array(self.broken_rows.get(plan.step_id, []), np.int32)
        samples[broken] = False
        slots = plan.slots[samples]
        assert (plan.computed[samples] + plan.num_tokens[samples] == self._length[slots]).all(), "samples too early"
        self._length[plan.slots[broken]] += 1
        ids = next_tokens(self._last[slots], self._length[slots])
        self._last[slots] = ids
        self._length[slots] += 1
        offsets = np.zeros(len(plan.slots) + 1, np.int32)
        np.cumsum(samples, out=offsets[1:])
        self.connection.send(encode_result(StepResult(plan.step_id, offsets, ids, not_finite=broken)))
