"""The worker over the real link: a scripted core on one side, `serve` or the whole process on the other."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from tercet_shared.config import WorkerSettings, parse
from tercet_shared.errors import CheckpointError, LinkError, ProtocolError
from tercet_shared.ipc.connection import LinkConnection
from tercet_shared.ipc.link import CloseKind, CloseReason, Stream
from tercet_shared.ipc.listener import Accepted, LinkListener, Rejected, Verdict
from tercet_shared.lifecycle.report import Event, parse_event
from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.frames import decode_hello, decode_result, encode_mask, encode_plan, encode_welcome
from tercet_shared.wire.step import (
    PROTOCOL_VERSION,
    CoreWelcome,
    GrammarMask,
    NewSlot,
    NewSlots,
    Slot,
    StepPlan,
    StepResult,
    WorkerHello,
    empty_i32,
    offsets_of,
)
from tercet_worker.device_thread import DeviceThread
from tercet_worker.program.compiled import CompiledModel
from tercet_worker.program.decode import DecodeSteps
from tercet_worker.worker import serve
from tests.fakes.checkpoints import write_tiny_llama

T = TypeVar("T")

TIMEOUT = 180.0
"""Seconds after which a wait fails: processes start meanwhile that load torch, also on a busy machine."""
FLAGS = ("--dtype=float32", "--num-kv-blocks=32", "--max-num-seqs=4", "--max-num-batched-tokens=64", "--threads=1")


class ScriptedCore:
    """Accepts workers, sends them plans by hand, keeps what they answer."""

    def __init__(self, path: Path, *, depth: int = 2, reject: str | None = None, **accepted: int) -> None:
        self.listener = LinkListener(path)
        self.links: asyncio.Queue[tuple[LinkConnection, WorkerHello]] = asyncio.Queue()
        self.results: asyncio.Queue[StepResult] = asyncio.Queue()
        self.rejected = asyncio.Event()
        self.reject = reject
        self._depth, self._accepted = depth, accepted

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[ScriptedCore]:
        with self.listener:
            serving = asyncio.create_task(self.listener.serve(self._judge, self._take))
            try:
                yield self
            finally:
                serving.cancel()
                with suppress(asyncio.CancelledError):
                    await serving

    def _judge(self, frame: bytes) -> Verdict:
        if self.reject is not None:
            self.rejected.set()
            return Rejected(self.reject)
        hello = decode_hello(frame)
        limits = {name: getattr(hello, name) for name in ("max_slots", "max_model_len", "max_batched_tokens")}
        welcome = CoreWelcome(
            protocol=PROTOCOL_VERSION, core_id="scripted", pipeline_depth=self._depth, **(limits | self._accepted)
        )
        return Accepted(encode_welcome(welcome))

    def _take(self, connection: LinkConnection, hello: bytes) -> None:
        def deliver(frames: list[bytes]) -> None:
            for frame in frames:
                self.results.put_nowait(decode_result(frame))

        connection.on_frames(deliver)
        self.links.put_nowait((connection, decode_hello(hello)))

    async def worker(self) -> tuple[LinkConnection, WorkerHello]:
        return await asyncio.wait_for(self.links.get(), TIMEOUT)

    async def result(self) -> StepResult:
        return await asyncio.wait_for(self.results.get(), TIMEOUT)


def begin(step: int, slot: int, tokens: list[int], blocks: list[int]) -> StepPlan:
    """Prefills a new greedy request in one step."""
    row = NewSlot(Slot(slot), step, len(tokens), np.array(tokens, np.int32), SamplingParams(temperature=0.0))
    return plan(step, slot, len(tokens), 0, blocks, NewSlots.build([row]))


def plan(step: int, slot: int, count: int, computed: int, blocks: list[int], new: NewSlots | None = None) -> StepPlan:
    return StepPlan(
        step,
        empty_i32(),
        new or NewSlots.empty(),
        np.array([slot], np.int32),
        np.array([count], np.int32),
        np.array([computed], np.int32),
        np.ones(1, np.bool_),
        offsets_of([len(blocks)]),
        np.array(blocks, np.int32),
    )


def gate(step: StepPlan) -> StepPlan:
    """Has the only row of a plan draw under a mask."""
    step.gated = np.zeros(1, np.int32)
    return step


def mask(step: int, *tokens: int) -> bytes:
    """The frame of a mask for one row."""
    words = np.zeros(384 // 32, np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return encode_mask(GrammarMask(step, words))


class Reports:
    """A reporter that tests can wait on."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, float | None]] = []
        self.ready_event = asyncio.Event()

    def progress(self, stage: str, fraction: float | None = None) -> None:
        self.stages.append((stage, fraction))

    def ready(self, **detail: Any) -> None:
        self.ready_event.set()

    def fatal(self, message: str) -> None:
        raise AssertionError(message)

    def restart(self, child: str, pid: int, message: str) -> None:
        raise AssertionError(message)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny")


Run = Callable[..., Awaitable[None]]


@pytest.fixture
async def worker(tmp_path: Path, model: Path) -> AsyncIterator[tuple[asyncio.Task[None], Reports, asyncio.Event]]:
    """`serve` as a task of this loop; stopped at the end."""
    settings = parse(WorkerSettings, [str(model), *FLAGS, f"--link={tmp_path / 'w.sock'}"])
    reports, stop = Reports(), asyncio.Event()
    task = asyncio.create_task(serve(settings, reports, stop))
    yield task, reports, stop
    stop.set()
    with suppress(LinkError, CheckpointError):
        await asyncio.wait_for(task, TIMEOUT)


Worker = tuple[asyncio.Task[None], Reports, asyncio.Event]


async def test_a_step_and_what_the_worker_says_of_itself(tmp_path: Path, worker: Worker) -> None:
    async with ScriptedCore(tmp_path / "w.sock").listen() as core:
        link, hello = await core.worker()
        assert (hello.model_name, hello.dtype, hello.vocab_size) == ("tiny", "float32", 384)
        assert (hello.block_size, hello.num_blocks, hello.max_slots) == (16, 32, 4)
        assert (hello.max_model_len, hello.max_batched_tokens, hello.pid) == (512, 64, os.getpid())
        assert hello.incarnation
        # Two plans at once; the second reads the token of the first on the worker's side.
        link.send(encode_plan(begin(1, 2, [5, 6, 7], [30])))
        link.send(encode_plan(plan(2, 2, 1, 3, [])))
        first, second = await core.result(), await core.result()
        assert (first.step_id, second.step_id) == (1, 2)
        for result in (first, second):
            assert not result.error
            assert result.token_offsets.tolist() == [0, 1]
            assert 0 <= result.token_ids[0] < 384
            assert result.run_us > 0
        # The same tokens from scratch give the same next token.
        link.send(encode_plan(begin(3, 0, [5, 6, 7, int(first.token_ids[0])], [4])))
        assert (await core.result()).token_ids.tolist() == second.token_ids.tolist()
        stages = [stage for stage, _ in worker[1].stages]
        assert stages[:2] == ["reading checkpoint", "preparing kernels"]
        assert ("loading weights", 1.0) in worker[1].stages
        assert stages[-2:] == ["allocating the KV cache", "connecting to the core"]
        assert worker[1].ready_event.is_set()
        await link.close()


async def test_gated_steps_draw_under_their_masks(tmp_path: Path, worker: Worker) -> None:
    async with ScriptedCore(tmp_path / "w.sock").listen() as core:
        link, _ = await core.worker()
        # The mask of a step goes out when the step before it has been read, as the core does; or before its plan.
        link.send(encode_plan(gate(begin(1, 2, [5, 6, 7], [30]))))
        link.send(encode_plan(gate(plan(2, 2, 1, 3, []))))
        link.send(mask(1, 77), Stream.MASKS)
        assert (await core.result()).token_ids.tolist() == [77]
        link.send(mask(2, 300, 301), Stream.MASKS)
        second = await core.result()
        assert second.token_ids[0] in {300, 301}
        link.send(mask(3, 9), Stream.MASKS)
        link.send(encode_plan(gate(plan(3, 2, 1, 4, []))))
        assert (await core.result()).token_ids.tolist() == [9]
        # A step that is refused takes its mask, too.
        link.send(encode_plan(gate(plan(4, 2, 1, 99, []))))
        link.send(mask(4, 9), Stream.MASKS)
        assert "another number of computed tokens" in (await core.result()).error
        # Tokens that a grammar forces follow the last drawn one.
        forced = plan(5, 2, 3, 5, [])
        forced.appended_offsets, forced.appended_ids = offsets_of([2]), np.array([40, 41], np.int32)
        link.send(encode_plan(forced))
        third = await core.result()
        text = [5, 6, 7, 77, int(second.token_ids[0]), 9, 40, 41]
        link.send(encode_plan(begin(6, 0, text, [4])))
        assert (await core.result()).token_ids.tolist() == third.token_ids.tolist()
        await link.close()


async def test_a_mask_that_fits_no_step_ends_the_link(tmp_path: Path, worker: Worker) -> None:
    async with ScriptedCore(tmp_path / "w.sock").listen() as core:
        link, _ = await core.worker()
        link.send(encode_plan(gate(begin(1, 2, [5, 6, 7], [30]))))
        link.send(encode_mask(GrammarMask(1, np.zeros(11, np.uint32))), Stream.MASKS)
        reason = await asyncio.wait_for(link.wait_closed(), TIMEOUT)
        assert "The mask of step 1 has 11 words; its gated rows need 12." in reason.text
        # The step that waited was let go: the worker is there for the next core.
        link, _ = await core.worker()
        link.send(encode_plan(begin(1, 2, [5, 6, 7], [30])))
        assert len((await core.result()).token_ids) == 1
        await link.close()


async def test_when_the_core_goes_while_a_step_waits_for_its_mask(tmp_path: Path, worker: Worker) -> None:
    async with ScriptedCore(tmp_path / "w.sock").listen() as core:
        link, _ = await core.worker()
        link.send(encode_plan(begin(1, 0, [1, 2, 3], [0])))
        link.send(encode_plan(gate(plan(2, 0, 1, 3, []))))
        assert (await core.result()).step_id == 1
        await link.close("the core stops")
        link, _ = await core.worker()
        link.send(encode_plan(begin(1, 0, [1, 2, 3], [0])))
        assert not (await core.result()).error
        await link.close()


async def test_stopping_while_a_step_waits_for_its_mask(tmp_path: Path, worker: Worker) -> None:
    task, _, stop = worker
    async with ScriptedCore(tmp_path / "w.sock").listen() as core:
        link, _ = await core.worker()
        link.send(encode_plan(begin(1, 0, [1, 2, 3], [0])))
        link.send(encode_plan(gate(plan(2, 0, 1, 3, []))))
        assert (await core.result()).step_id == 1
        stop.set()
        await asyncio.wait_for(task, TIMEOUT)
        for thread in threading.enumerate():
            if thread.name == "device":
                thread.join(TIMEOUT)
                assert not thread.is_alive()


async def test_a_bad_plan_is_an_error_of_its_step_only(tmp_path: Path, worker: Worker) -> None:
    async with ScriptedCore(tmp_path / "w.sock").listen() as core:
        link, _ = await core.worker()
        link.send(encode_plan(plan(1, 3, 1, 0, [1])))
        link.send(encode_plan(begin(2, 1, [9, 8], [2])))
        bad, good = await core.result(), await core.result()
        assert bad.step_id == 1
        assert bad.error == "Slot 3 of the plan is scheduled and holds no request."
        assert bad.token_offsets.tolist() == [0, 0]
        assert (good.step_id, good.error, len(good.token_ids)) == (2, "", 1)
        await link.close()


async def test_a_fault_in_a_step_is_an_error_of_that_step(
    tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedCore(tmp_path / "w.sock").listen() as core:
        link, _ = await core.worker()
        link.send(encode_plan(begin(1, 0, [1, 2, 3], [0])))
        assert not (await core.result()).error
        with monkeypatch.context() as patch:
            patch.setattr(DecodeSteps, "run", lambda *_: 1 / 0)
            link.send(encode_plan(plan(2, 0, 1, 3, [])))
            failed = await core.result()
        assert failed.error == "The step failed in the worker: ZeroDivisionError: division by zero"
        assert "Traceback" in caplog.text
        # Its rows were not computed, so a plan that assumes so is refused, and one that computes them again is not.
        link.send(encode_plan(plan(3, 0, 1, 4, [])))
        assert "another number of computed tokens" in (await core.result()).error
        link.send(encode_plan(begin(4, 0, [1, 2, 3], [0])))
        assert not (await core.result()).error
        await link.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_rows_that_are_not_finite_are_told_and_the_others_go_on(
    tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    async with ScriptedCore(tmp_path / "w.sock").listen() as core:
        link, _ = await core.worker()
        params = SamplingParams(temperature=temperature)
        rows = [NewSlot(Slot(slot), 1, 2, np.array([7, slot], np.int32), params) for slot in range(3)]
        both = StepPlan(
            1, empty_i32(), NewSlots.build(rows), np.arange(3, dtype=np.int32), np.full(3, 2, np.int32),
            np.zeros(3, np.int32), np.ones(3, np.bool_), offsets_of([1, 1, 1]), np.array([5, 6, 7], np.int32),
        )  # fmt: skip
        original = CompiledModel.forward

        def poisoned(self: CompiledModel, *inputs: Any) -> Any:
            hidden = original(self, *inputs)
            hidden[3] = float("nan")  # the last token of the second row
            return hidden

        with monkeypatch.context() as patch:
            patch.setattr(CompiledModel, "forward", poisoned)
            link.send(encode_plan(both))
            result = await core.result()
        assert result.not_finite.tolist() == [1]
        assert result.token_offsets.tolist() == [0, 1, 1, 2]
        # The step that was planned meanwhile holds the bad row too; the others must not suffer from it.
        again = StepPlan(
            2, empty_i32(), NewSlots.empty(), np.arange(3, dtype=np.int32), np.ones(3, np.int32),
            np.full(3, 2, np.int32), np.ones(3, np.bool_), offsets_of([0, 0, 0]), empty_i32(),
        )  # fmt: skip
        link.send(encode_plan(again))
        result = await core.result()
        assert not result.error
        assert result.token_offsets.tolist() == [0, 1, 2, 3]
        await link.close()


async def test_when_the_core_is_gone_the_worker_looks_for_the_next_one(tmp_path: Path, worker: Worker) -> None:
    path = tmp_path / "w.sock"
    async with ScriptedCore(path).listen() as core:
        link, first = await core.worker()
        link.send(encode_plan(begin(1, 0, [1, 2, 3], [0])))
        await core.result()
        await link.close("the core stops")
    async with ScriptedCore(path).listen() as core:
        link, second = await core.worker()
        assert second.incarnation != first.incarnation
        assert second.model_fingerprint == first.model_fingerprint
        # The slots are empty, the weights are there.
        link.send(encode_plan(plan(1, 0, 1, 3, [])))
        assert "holds no request" in (await core.result()).error
        link.send(encode_plan(begin(2, 0, [1, 2, 3], [0])))
        assert not (await core.result()).error
        await link.close()


async def test_more_plans_than_agreed_end_the_link(tmp_path: Path, worker: Worker) -> None:
    async with ScriptedCore(tmp_path / "w.sock", depth=1).listen() as core:
        link, _ = await core.worker()
        for step in range(1, 6):
            link.send(encode_plan(begin(step, 0, [1] * 60, [0, 1, 2, 3])))
        reason: CloseReason = await asyncio.wait_for(link.wait_closed(), TIMEOUT)
        assert "More than the agreed 1 plans" in reason.text


async def test_a_refused_worker_says_why(tmp_path: Path, worker: Worker) -> None:
    async with ScriptedCore(tmp_path / "w.sock", reject="another model is served here").listen():
        with pytest.raises(LinkError, match="refused this worker: another model is served here"):
            await asyncio.wait_for(worker[0], TIMEOUT)


async def test_a_worker_that_served_a_core_is_patient_with_its_refusal(tmp_path: Path, worker: Worker) -> None:
    async with ScriptedCore(tmp_path / "w.sock").listen() as core:
        link, first = await core.worker()
        core.reject = "this core has a worker already"  # it may not have seen yet that the old link is gone
        await link.close("start again")
        await asyncio.wait_for(core.rejected.wait(), TIMEOUT)
        core.reject = None
        link, second = await core.worker()
        assert second.incarnation != first.incarnation
        link.send(encode_plan(begin(1, 0, [1, 2, 3], [0])))
        assert not (await core.result()).error
        await link.close()


async def test_a_core_that_takes_more_than_was_offered_is_none(tmp_path: Path, worker: Worker) -> None:
    async with ScriptedCore(tmp_path / "w.sock", max_slots=5).listen():
        with pytest.raises(ProtocolError, match="accepts a max_slots of 5; the worker offered 4"):
            await asyncio.wait_for(worker[0], TIMEOUT)


async def test_stopping_while_no_core_is_there(
    tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tercet_worker.worker._LONGEST_DELAY", 0.05)
    caplog.set_level("INFO")
    task, reports, stop = worker
    missing = f"no core can be reached at {tmp_path / 'w.sock'}: No such file or directory; looking on"
    async with asyncio.timeout(TIMEOUT):
        while missing not in caplog.messages:
            await asyncio.sleep(0)
            assert not task.done()
    assert ("connecting to the core", None) in reports.stages
    stop.set()
    await asyncio.wait_for(task, TIMEOUT)
    assert not reports.ready_event.is_set()


@pytest.mark.parametrize("late", [False, True])
async def test_stopping_in_the_middle_of_loading(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    settings = parse(WorkerSettings, [str(model), *FLAGS, f"--link={tmp_path / 'w.sock'}"])
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    class StopAtHalf(Reports):
        asked = False

        def progress(self, stage: str, fraction: float | None = None) -> None:
            super().progress(stage, fraction)
            if fraction is not None and fraction > 0.5 and not self.asked:
                self.asked = True
                loop.call_soon_threadsafe(stop_when_loaded if late else stop.set)

    def stop_when_loaded() -> None:
        """Has the loop hear of both at once."""
        assert over.wait(TIMEOUT)
        stop.set()

    class Device(DeviceThread):
        def submit(self, work: Callable[[], T]) -> Future[T]:
            loading = super().submit(work)
            super().submit(over.set)
            return loading

    over = threading.Event()
    monkeypatch.setattr("tercet_worker.worker.DeviceThread", Device)
    reports = StopAtHalf()
    await asyncio.wait_for(serve(settings, reports, stop), TIMEOUT)
    assert "connecting to the core" not in [stage for stage, _ in reports.stages]


async def test_a_checkpoint_error_ends_it(tmp_path: Path) -> None:
    settings = parse(WorkerSettings, [str(tmp_path / "nothing"), f"--link={tmp_path / 'w.sock'}"])
    with pytest.raises(CheckpointError, match="does not exist"):
        await asyncio.wait_for(serve(settings, Reports(), asyncio.Event()), TIMEOUT)


@asynccontextmanager
async def process(tmp_path: Path, model: Path, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Any]]:
    """The worker as a process, and a coroutine function that returns its next report (None at the end)."""
    reading, writing = os.pipe()
    command = (sys.executable, "-m", "tercet_worker", str(model), f"--link={tmp_path / 'w.sock'}", *flags)
    child = await asyncio.create_subprocess_exec(*command, f"--report-fd={writing}", pass_fds=(writing,))
    os.close(writing)
    stream = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb", buffering=0)
    )

    async def report() -> Event | None:
        line = await asyncio.wait_for(stream.readline(), TIMEOUT)
        return parse_event(line) if line else None

    try:
        yield child, report
    finally:
        transport.close()
        if child.returncode is None:
            child.kill()
        await child.wait()


async def test_the_process_reports_serves_and_stops(tmp_path: Path, model: Path) -> None:
    async with ScriptedCore(tmp_path / "w.sock").listen() as core, process(tmp_path, model, *FLAGS) as (child, report):
        link, hello = await core.worker()
        assert hello.pid == child.pid
        events = []
        while not events or events[-1].event != "ready":
            event = await report()
            assert event is not None
            events.append(event)
        assert {event.stage for event in events[:-1]} >= {"reading checkpoint", "loading weights"}
        assert events[-1].detail["model"] == "tiny"
        link.send(encode_plan(begin(1, 0, [1, 2, 3], [0])))
        assert len((await core.result()).token_ids) == 1
        child.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), TIMEOUT) == 0
        reason = await asyncio.wait_for(link.wait_closed(), TIMEOUT)
        assert (reason.kind, reason.text) == (CloseKind.GOODBYE, "the worker stops")
        assert await report() is None


async def test_the_process_ends_with_a_sentence(tmp_path: Path, model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"short")
    async with process(tmp_path, model) as (child, report):
        events = []
        while (event := await report()) is not None:
            events.append(event)
        assert events[-1].event == "fatal"
        assert "model.safetensors" in events[-1].message
        assert await asyncio.wait_for(child.wait(), TIMEOUT) == 1
