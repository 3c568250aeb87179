"""Scheduler, isolation and engine through losses and failures in any order: nothing is lost, repeated or leaked."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_core.dumps import StepDumps
from tercet_core.engine import Engine, Link, Loss
from tercet_core.isolation import Isolation
from tercet_core.scheduling.outputs import Output
from tercet_core.scheduling.request import FrontEnd, Request
from tercet_core.scheduling.scheduler import Scheduler
from tercet_core.scheduling.state import Limits
from tercet_shared.hashing import root_key
from tercet_shared.ipc.link import CloseKind, CloseReason
from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.step import GrammarMask, StepPlan, StepResult
from tests.fakes.worker import expected, next_tokens

BLOCK = 4


def make_request(handle: int, prompt: list[int], max_tokens: int, priority: int = 0) -> Request:
    return Request(
        front_end=FrontEnd(0),
        handle=handle,
        attempt=0,
        request_id=str(handle),
        prompt_len=len(prompt),
        tokens=np.array(prompt, np.int32),
        params=SamplingParams(max_tokens=max_tokens),
        root=root_key("m"),
        priority=priority,
    )


def make_scheduler(num_blocks: int = 24, slots: int = 5, stages: int = 1) -> Scheduler:
    limits = Limits(
        max_slots=slots,
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_model_len=64,
        max_batched_tokens=24,
        vocab_size=50_000,
        stages=stages,
    )
    return Scheduler(limits)


@dataclass
class Model:
    """Answers plans as `FakeWorker` does, without a link."""

    last: dict[int, int] = field(default_factory=dict)
    length: dict[int, int] = field(default_factory=dict)

    def answer(self, plan: StepPlan) -> StepResult:
        new = plan.new
        for i, slot in enumerate(new.slots.tolist()):
            ids = new.token_ids[new.token_offsets[i] : new.token_offsets[i + 1]]
            self.last[slot], self.length[slot] = int(ids[-1]), len(ids)
        drawn: list[int] = []
        for row in np.flatnonzero(plan.samples).tolist():
            slot = int(plan.slots[row])
            assert int(plan.computed[row] + plan.num_tokens[row]) == self.length[slot]
            token = int(next_tokens(np.array([self.last[slot]]), np.array([self.length[slot]]))[0])
            self.last[slot], self.length[slot] = token, self.length[slot] + 1
            drawn.append(token)
        offsets = np.zeros(len(plan.slots) + 1, np.int32)
        np.cumsum(plan.samples, out=offsets[1:])
        return StepResult(plan.step_id, offsets, np.array(drawn, np.int32))


def take(outputs: list[Output], heard: dict[int, list[int]], ended: set[int]) -> None:
    for output in outputs:
        offsets = output.token_offsets
        for row, handle in enumerate(output.handles.tolist()):
            assert handle not in ended
            heard[handle] += output.token_ids[offsets[row] : offsets[row + 1]].tolist()
        ended.update(int(output.handles[end.row]) for end in output.ends)


@settings(max_examples=150, derandomize=True, database=None, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_any_order_of_losses_failures_and_aborts(seed: int, depth: int) -> None:
    draw = random.Random(seed)
    scheduler = make_scheduler()
    isolation = Isolation(scheduler)
    model = Model()
    flight: deque[tuple[StepPlan, StepResult | None]] = deque()  # None: forgotten
    heard: dict[int, list[int]] = {}
    ended: set[int] = set()
    requests: dict[int, Request] = {}
    aborted: set[int] = set()
    poisoned = {handle for handle in range(12) if draw.random() < 0.15}

    def land() -> None:
        _, result = flight.popleft()
        if result is None:
            return
        owners = scheduler.suspects()
        if any(request.handle in poisoned for request in owners) or (len(owners) > 1 and draw.random() < 0.03):
            for i, (later, _) in enumerate(flight):
                flight[i] = (later, None)
            culprit = isolation.failed()
            if culprit is not None:
                scheduler.end([culprit])
                ended.add(culprit.handle)
            return
        take(scheduler.apply(result), heard, ended)

    def turn() -> None:
        isolation.advance()
        while len(flight) < depth:
            plan = scheduler.plan()
            ended.update(failure.request.handle for failure in scheduler.take_failures())
            if plan is not None:
                flight.append((plan, model.answer(plan)))
            elif not isolation.advance():
                return

    while len(requests) < 12 or scheduler.num_running or scheduler.num_waiting:
        action = draw.random()
        if action < 0.3 and len(requests) < 12:
            handle = len(requests)
            prompt = [draw.randrange(3, 9)] * draw.randint(1, 30)
            requests[handle] = make_request(handle, prompt, draw.randint(1, 20), draw.randrange(2))
            heard[handle] = []
            scheduler.submit(requests[handle])
            isolation.joined()
        elif action < 0.32 and requests:
            handle = draw.choice(list(requests))
            if handle not in ended:
                scheduler.end([requests[handle]])
                aborted.add(handle)
        elif action < 0.34:
            scheduler.restart()  # the worker is lost
            isolation.give_up()
            model = Model()
            flight.clear()
            scheduler.restart(draw.choice([24, 20, 40]))
        elif flight and action < 0.7:
            land()
        else:
            turn()
        scheduler.check_integrity()
    while flight:
        land()
    scheduler.check_integrity()
    assert scheduler.pool.available == scheduler.pool.num_blocks
    for handle, request in requests.items():
        whole = expected(request.tokens.tolist(), request.params.max_tokens)
        assert heard[handle] == whole[: len(heard[handle])]
        assert handle in aborted or handle in poisoned or heard[handle] == whole


class ScriptedLink:
    """A worker in this process, which answers when it is told."""

    num_blocks = 64

    def __init__(self) -> None:
        self.close_reason: CloseReason | None = None
        self.plans: asyncio.Queue[StepPlan] = asyncio.Queue()

    def start(self, on_result: Callable[[StepResult], None], on_closed: Callable[[CloseReason], None]) -> None:
        self.on_result, self.on_closed = on_result, on_closed

    def submit(self, plan: StepPlan) -> None:
        self.plans.put_nowait(plan)

    def submit_mask(self, mask: GrammarMask) -> None:
        raise AssertionError("a mask for a plan without gated rows")

    async def close(self, goodbye: str) -> None:
        self.close_reason = CloseReason(CloseKind.LOCAL, goodbye)


class Successors:
    """Hands out links in turn."""

    def __init__(self, *links: ScriptedLink) -> None:
        self.losses: list[Loss] = []
        self._links = list(links)

    async def following(self, loss: Loss) -> Link:
        self.losses.append(loss)
        return self._links.pop(0)


async def test_late_results_of_an_old_link_are_ignored() -> None:
    old, new = ScriptedLink(), ScriptedLink()
    workers = Successors(new)
    outputs: list[Output] = []
    engine = Engine(make_scheduler(64), outputs.append, workers, StepDumps(None, "core"), depth=2, max_losses=3)
    running = asyncio.create_task(engine.run(old))
    engine.submit(make_request(1, [9, 8], 6))
    late = [Model().answer(await old.plans.get())]
    old.on_closed(CloseReason(CloseKind.HEARTBEAT_LOST, "stopped"))
    model = Model()
    first = await new.plans.get()
    assert first.new.token_ids.tolist() == [9, 8]
    for result in late:
        old.on_result(result)  # it woke up again
    old.on_closed(CloseReason(CloseKind.PEER_DIED, "gone"))
    new.on_result(model.answer(first))
    while engine.busy:
        new.on_result(model.answer(await new.plans.get()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert workers.losses == [Loss("stopped", hangs=True)]
    assert [int(token) for output in outputs for token in output.token_ids] == expected([9, 8], 6)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_engine_that_can_plan_nothing_waits_for_a_result_and_does_not_spin() -> None:
    scheduler = make_scheduler(64, stages=2)
    plans = 0
    plan = scheduler.plan

    def counted() -> StepPlan | None:
        nonlocal plans
        plans += 1
        return plan()

    scheduler.plan = counted  # type: ignore[method-assign]  # an observer
    link, model = ScriptedLink(), Model()
    outputs: list[Output] = []
    engine = Engine(scheduler, outputs.append, Successors(), StepDumps(None, "core"), depth=3, max_losses=3)
    running = asyncio.create_task(engine.run(link))
    engine.submit(make_request(1, [9, 8], 4))
    for _ in range(4):
        step = await link.plans.get()
        for _ in range(50):
            await asyncio.sleep(0)
        assert link.plans.empty()
        link.on_result(model.answer(step))
    await engine.wait_idle()
    assert [int(token) for output in outputs for token in output.token_ids] == expected([9, 8], 4)
    assert plans <= 2 * 4 + 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
