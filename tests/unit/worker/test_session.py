"""A session's masks: before and after the step wants them, wrong ones, and the end of the link while a step waits."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tercet_shared.errors import InternalError, LinkError, ProtocolError, TercetError
from tercet_shared.ipc.link import CloseKind, CloseReason, Stream
from tercet_shared.wire.frames import decode_result, encode_mask, encode_plan
from tercet_shared.wire.step import GrammarMask, NewSlots, StepPlan, StepResult, empty_i32
from tercet_worker.device_thread import DeviceThread
from tercet_worker.masks import Masks
from tercet_worker.parallel.topology import SINGLE, Topology
from tercet_worker.session import Session

TIMEOUT = 60.0
VOCAB, WORDS = 70, 3
DEPTH = 2


def plan(step: int, *gated: int) -> StepPlan:
    rows = np.zeros(2, np.int32)
    return StepPlan(
        step, empty_i32(), NewSlots.empty(), np.arange(2, dtype=np.int32), rows, rows, np.ones(2, np.bool_),
        np.zeros(3, np.int32), empty_i32(), gated=np.array(gated, np.int32),
    )  # fmt: skip


def mask(step: int, rows: int, fill: int = 5) -> GrammarMask:
    return GrammarMask(step, np.full(rows * WORDS, fill, np.uint32))


class MemoryLink:
    """A link whose other side is the test."""

    def __init__(self) -> None:
        self.close_reason: CloseReason | None = None
        self.results: asyncio.Queue[StepResult] = asyncio.Queue()
        self.room: list[bool] = []  # for the next frames that are tried to be sent at once; then there always is
        self._loop = asyncio.get_running_loop()
        self._callbacks: dict[Stream, Callable[[list[bytes]], None]] = {}
        self._closed = asyncio.Event()

    def on_frames(self, callback: Callable[[list[bytes]], None], stream: Stream = Stream.STEPS) -> None:
        self._callbacks[stream] = callback

    def send(self, frame: bytes) -> None:
        self.results.put_nowait(decode_result(frame))

    def try_send(self, frame: bytes) -> bool:
        if self.room and not self.room.pop(0):
            return False
        self._loop.call_soon_threadsafe(self.send, frame)
        return True

    async def wait_closed(self) -> CloseReason:
        await self._closed.wait()
        assert self.close_reason is not None
        return self.close_reason

    def end(self, text: str) -> None:
        self.close_reason = CloseReason(CloseKind.PROTOCOL, text)
        self._closed.set()

    def deliver(self, *messages: StepPlan | GrammarMask) -> None:
        for message in messages:
            try:
                if isinstance(message, GrammarMask):
                    self._callbacks[Stream.MASKS]([encode_mask(message)])
                else:
                    self._callbacks[Stream.STEPS]([encode_plan(message)])
            except TercetError as error:
                self.end(error.message)

    async def result(self) -> StepResult:
        return await asyncio.wait_for(self.results.get(), TIMEOUT)


class Runner:
    """Answers a step with the first word of each gated row, and tells when it begins to wait for them."""

    limits = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self, *, overlaps: bool = False) -> None:
        self.overlaps = overlaps
        self.last: dict[int, threading.Event] = defaultdict(threading.Event)  # set once a step is executed
        self.wants: asyncio.Queue[int] = asyncio.Queue()
        self.failing: set[int] = set()
        self.refused: set[int] = set()
        self._loop = asyncio.get_running_loop()

    def execute(self, plan: StepPlan, grammar: Callable[[], Any] | None) -> Any:
        if plan.step_id in self.failing:
            raise InternalError("no such luck")
        if plan.step_id in self.refused:
            raise ProtocolError("not like that")
        assert (grammar is None) is (len(plan.gated) == 0)
        words = np.zeros(0, np.int32)
        if grammar is not None:
            self._loop.call_soon_threadsafe(self.wants.put_nowait, plan.step_id)
            words = grammar().reshape(-1, WORDS)[:, 0].astype(np.int32)
        self.last[plan.step_id].set()

        def result() -> StepResult:
            # A device that is through with a step once it has the next one.
            if self.overlaps:
                assert self.last[plan.step_id + 1].wait(TIMEOUT)
            return StepResult(plan.step_id, np.array([0, len(words)], np.int32), words)

        return SimpleNamespace(result=result)

    async def wanted(self) -> int:
        return await asyncio.wait_for(self.wants.get(), TIMEOUT)


@asynccontextmanager
async def session(
    topology: Topology = SINGLE, *, overlaps: bool = False
) -> AsyncIterator[tuple[MemoryLink, Runner, DeviceThread, asyncio.Task[CloseReason]]]:
    link, runner, device = MemoryLink(), Runner(overlaps=overlaps), DeviceThread()
    device.start()
    own = Session(link, runner, device, DEPTH, topology=topology)  # type: ignore[arg-type]  # fakes
    task = asyncio.create_task(own.run())
    await asyncio.sleep(0)
    yield link, runner, device, task
    task.cancel()
    await asyncio.wait((task,))
    # Whatever the session left behind, the thread is free: nothing waits for a mask for ever.
    await asyncio.wait_for(asyncio.wrap_future(device.submit(lambda: None)), TIMEOUT)
    assert device.stop(TIMEOUT)


async def test_a_step_waits_for_its_mask_and_the_next_one_for_the_step() -> None:
    async with session() as (link, runner, _, _):
        link.deliver(plan(1, 0, 1), plan(2))
        assert await runner.wanted() == 1
        assert link.results.empty()
        link.deliver(mask(1, 2, fill=9))
        first, second = await link.result(), await link.result()
        assert (first.step_id, first.token_ids.tolist()) == (1, [9, 9])
        assert (second.step_id, second.token_ids.tolist()) == (2, [])


async def test_results_that_find_no_room_are_not_overtaken() -> None:
    async with session() as (link, runner, _, _):
        link.room = [False, True]
        link.deliver(plan(1), plan(2))
        assert await asyncio.to_thread(runner.last[1].wait, TIMEOUT)
        assert [(await link.result()).step_id for _ in range(2)] == [1, 2]
        link.deliver(plan(3), plan(4))
        assert [(await link.result()).step_id for _ in range(2)] == [3, 4]


async def test_results_keep_their_order_while_the_loop_is_held_up() -> None:
    async with session() as (link, _, device, _):
        link.room = [False, True]
        link.deliver(plan(1), plan(2))
        device.submit(lambda: None).result(TIMEOUT)  # both steps are answered, and the loop has not run since
        assert link.room == [True], "the second one was not even tried"
        assert [(await link.result()).step_id for _ in range(2)] == [1, 2]


async def test_a_result_does_not_overtake_one_that_the_loop_is_sending() -> None:
    async with session() as (link, runner, device, _):
        sending = threading.Event()
        send, execute = link.send, runner.execute

        def slow_send(frame: bytes) -> None:
            sending.set()
            device.submit(lambda: None).result(TIMEOUT)  # the second step is answered in the middle of this
            link.send = send  # type: ignore[method-assign]
            send(frame)

        def second_waits(plan: StepPlan, grammar: Callable[[], Any] | None) -> Any:
            if plan.step_id == 2:
                assert sending.wait(TIMEOUT)
            return execute(plan, grammar)

        link.send, runner.execute = slow_send, second_waits  # type: ignore[method-assign]
        link.room = [False, True]
        link.deliver(plan(1), plan(2))
        assert [(await link.result()).step_id for _ in range(2)] == [1, 2]
        assert link.room == [True], "the second one was not tried"


async def test_a_result_that_cannot_be_written_ends_the_session(caplog: pytest.LogCaptureFixture) -> None:
    async with session() as (link, runner, _, task):
        runner.execute = lambda plan, _grammar: SimpleNamespace(  # type: ignore[method-assign]
            result=lambda: StepResult(plan.step_id, np.zeros(1, np.int32), empty_i32(), error="\ud800")
        )
        link.deliver(plan(1))
        with pytest.raises(InternalError, match="Step 1 cannot be answered: UnicodeEncodeError"):
            await asyncio.wait_for(task, TIMEOUT)
    assert "step 1 cannot be answered" in caplog.text


async def test_the_observer_hears_of_every_step_also_of_the_last() -> None:
    heard: list[int] = []
    last = asyncio.Event()

    def answered(plan: StepPlan, _result: StepResult, _at: int) -> None:
        heard.append(plan.step_id)
        if plan.step_id == 5:
            last.set()

    observer = SimpleNamespace(begin=lambda: None, end=lambda: heard.append(-1), answered=answered)
    link, device = MemoryLink(), DeviceThread()
    device.start()
    own = Session(link, Runner(), device, DEPTH, observer)  # type: ignore[arg-type]  # fakes
    task = asyncio.create_task(own.run())
    await asyncio.sleep(0)
    for step in range(1, 6):
        link.deliver(plan(step))
        assert (await link.result()).step_id == step
    await asyncio.wait_for(last.wait(), TIMEOUT)  # without another plan
    task.cancel()
    await asyncio.wait((task,))
    assert heard == [1, 2, 3, 4, 5, -1]
    assert device.stop(TIMEOUT)


async def test_a_step_is_begun_before_the_one_before_it_has_ended() -> None:
    async with session(overlaps=True) as (link, runner, _, _):
        link.deliver(plan(1))
        for step in (1, 2, 3):
            link.deliver(plan(step + 1))
            assert (await link.result()).step_id == step
        runner.last[5].set()
        assert (await link.result()).step_id == 4


async def test_masks_that_come_before_the_step_runs_or_before_its_plan() -> None:
    async with session() as (link, runner, _, _):
        link.deliver(plan(1, 0), plan(2, 1))
        assert await runner.wanted() == 1
        link.deliver(mask(2, 1, fill=8), mask(1, 1, fill=7))
        assert [(await link.result()).token_ids.tolist() for _ in range(2)] == [[7], [8]]
        # On streams of their own, a mask may overtake its plan.
        link.deliver(mask(3, 2, fill=6), mask(4, 1, fill=5), plan(3, 0, 1), plan(4, 0))
        assert [(await link.result()).token_ids.tolist() for _ in range(2)] == [[6, 6], [5]]


@pytest.mark.parametrize("way", ["closed", "cancelled"])
async def test_a_step_that_waits_is_let_go_at_the_end(way: str, caplog: pytest.LogCaptureFixture) -> None:
    async with session() as (link, runner, device, task):
        link.deliver(plan(1, 0), plan(2, 0))
        assert await runner.wanted() == 1
        if way == "closed":
            link.end("the core is gone")
        else:
            task.cancel()
        await asyncio.wait((task,), timeout=TIMEOUT)
        assert task.done()
        await asyncio.wait_for(asyncio.wrap_future(device.submit(lambda: None)), TIMEOUT)
        assert link.results.empty()
        assert not [record.message for record in caplog.records if record.name.startswith("tercet_worker")]


async def test_a_step_that_fails_needs_no_mask_and_takes_it() -> None:
    async with session() as (link, runner, _, _):
        runner.failing = set(range(1, 9))
        for step in range(1, 9):  # more than the session would keep
            link.deliver(plan(step, 0))
            assert (await link.result()).error == "no such luck"
        link.deliver(mask(8, 1))
        link.deliver(plan(9, 0), mask(9, 1))
        assert (await link.result()).token_ids.tolist() == [5]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([plan(1, 0), mask(1, 2)], "The mask of step 1 has 6 words; its gated rows need 3."),
        ([mask(1, 2), plan(1, 0)], "The mask of step 1 has 6 words; its gated rows need 3."),
        ([plan(1), mask(1, 1)], "A mask came for step 1, which waits for none."),
        ([mask(1, 1), plan(1)], "A mask came for step 1, which has no gated rows."),
        ([plan(1, 0), mask(1, 1), mask(1, 1)], "A mask came for step 1, which waits for none."),
        ([mask(1, 1), mask(1, 1)], "A mask came for step 1, which waits for none."),
        ([mask(1, 1), mask(2, 1), mask(3, 1)], "More than 2 masks came before their plans."),
    ],
)
async def test_masks_that_nobody_can_want_end_the_link(messages: list[Any], text: str) -> None:
    async with session() as (link, _, _, task):
        link.deliver(*messages)
        assert (await asyncio.wait_for(task, TIMEOUT)).text == text


async def test_a_rank_that_does_not_answer_computes_and_says_nothing() -> None:
    async with session(Topology(2, 1, 1)) as (link, runner, device, task):
        # It may be behind the one that answers, by whose results the core counts.
        link.deliver(plan(1), plan(2), plan(3, 0), plan(4))
        assert await runner.wanted() == 3
        link.deliver(mask(3, 1))
        await asyncio.wait_for(asyncio.wrap_future(device.submit(lambda: None)), TIMEOUT)
        link.end("done")
        assert (await asyncio.wait_for(task, TIMEOUT)).text == "done"
        assert link.results.empty()


async def test_a_step_that_all_ranks_refuse_is_answered_and_one_that_fails_in_a_rank_ends_it() -> None:
    async with session(Topology(2, 1, 0)) as (link, runner, _, task):
        runner.refused, runner.failing = {1}, {3}
        link.deliver(plan(1), plan(2))
        assert (await link.result()).error == "not like that"
        assert not (await link.result()).error
        link.deliver(plan(3), plan(4))
        with pytest.raises(InternalError, match="no such luck"):
            await asyncio.wait_for(task, TIMEOUT)
        assert link.results.empty(), "nothing of what follows is executed"


def test_a_mask_of_a_wrong_size_lets_its_step_go() -> None:
    masks = Masks(VOCAB, DEPTH)
    waiting = masks.expect(plan(1, 0))
    assert waiting is not None
    with pytest.raises(ProtocolError, match="has 4 words; its gated rows need 3"):
        masks.put(GrammarMask(1, np.zeros(4, np.uint32)))
    with pytest.raises(LinkError):
        waiting()


def test_closed_masks_let_every_step_go() -> None:
    masks = Masks(VOCAB, DEPTH)
    waiting = [masks.expect(plan(step, 0)) for step in (1, 2)]
    masks.put(mask(1, 1))
    masks.close()
    masks.close()
    assert waiting[0] is not None
    assert waiting[0]().tolist() == [5, 5, 5]
    assert waiting[1] is not None
    with pytest.raises(LinkError, match="closed before the mask"):
        waiting[1]()
