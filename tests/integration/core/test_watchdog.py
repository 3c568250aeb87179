"""A core that hangs says so and ends; one that is idle, slow or without a worker does not."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tercet_core.engine import Engine
from tercet_core.step_timer import StepTimer
from tercet_core.watchdog import ROUNDS, Watchdog
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.errors import TercetError
from tercet_shared.lifecycle.report import parse_event
from tests.fakes.stream_client import TIMEOUT, Client
from tests.fakes.worker import FakeWorker, expected
from tests.integration.core.conftest import StartCore, at_work, until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_step_that_never_ends_turns_liveness_red_and_ends_the_core(start_core: StartCore) -> None:
    async with start_core(watchdog=1.0) as core, at_work(core) as (client, worker):
        liveness = health_pb2_grpc.HealthStub(client._channel).Watch(health_pb2.HealthCheckRequest(service="liveness"))
        assert (await asyncio.wait_for(liveness.read(), TIMEOUT)).status == SERVING
        await client.submit(1, [9], max_tokens=5)
        await client.finished(1)
        worker.hold()
        await client.submit(2, [9], max_tokens=5)
        assert (await asyncio.wait_for(liveness.read(), TIMEOUT)).status == NOT_SERVING
        await client.finished(2)
        error = client.choices[2].error
        assert error is not None
        assert error.kind == pb.ERROR_KIND_UNAVAILABLE
        with pytest.raises(TercetError, match="no step was planned or applied for 1 s"):
            await core.ended()


async def test_a_step_that_is_not_answered_costs_the_worker_not_the_core(start_core: StartCore) -> None:
    async with start_core(step_timeout=0.3) as core, at_work(core, pid=4711) as (client, worker):
        await client.submit(1, [9], max_tokens=3)
        await client.finished(1)
        worker.hold()
        await client.submit(2, [9], max_tokens=5)
        child, pid, reason = await asyncio.wait_for(core.reporter.restarts.get(), TIMEOUT)
        assert (child, pid) == ("worker", 4711)
        assert re.fullmatch(r"the worker has not answered step \d+ for 0\.3 s", reason)
        closed = await asyncio.wait_for(worker.connection.wait_closed(), TIMEOUT)
        assert "has not answered" in closed.text
        await client.submit(3, [8], max_tokens=2)
        async with FakeWorker(core.link, incarnation="second"):
            await client.finished(2)
            await client.finished(3)
        assert client.choices[2].tokens == expected([9], 5)
        assert client.choices[3].tokens == expected([8], 2)


def test_only_the_same_step_awaited_all_the_time_is_overdue() -> None:
    told: list[int] = []
    steps: list[int | None] = [1] * 9 + [None] + [1] * 9 + [2] * 11
    times: list[float] = []

    class Loop:
        def call_later(self, delay: float, callback: Callable[[], None]) -> Handle:
            times.append(delay)
            self.callback = callback
            return Handle()

    class Handle:
        def cancel(self) -> None:
            times.append(-1)

    loop = Loop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "get_running_loop", lambda: loop)
        with StepTimer(20.0, lambda: steps.pop(0), told.append):
            while steps:
                assert told == []
                loop.callback()
    assert told == [2]
    assert set(times[:-1]) == {2.0}
    assert times[-1] == -1


async def test_nobody_to_compute_is_not_a_hang(start_core: StartCore, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, is_busy = 0, Engine.busy.fget
    assert is_busy is not None

    def busy(engine: Engine) -> bool:
        nonlocal looks
        looks += 1
        return bool(is_busy(engine))

    monkeypatch.setattr(Engine, "busy", property(busy))
    async with start_core(watchdog=1.0) as core, at_work(core) as (client, worker):
        await worker.connection.close("gone")
        await until(client, lambda reply: not reply.ready)
        await client.submit(1, [9], max_tokens=5)
        await until(client, lambda reply: reply.stats.waiting == 1)
        enough = looks + ROUNDS + 2
        await until(client, lambda _: looks >= enough)
        assert not core.task.done()
        async with FakeWorker(core.link):
            await client.finished(1)
            assert client.choices[1].tokens == expected([9], 5)


class WatchedEngine:
    """What a watchdog sees."""

    def __init__(self) -> None:
        self.busy = False
        self.progress = 0


def told_in(rounds: list[str]) -> list[str]:
    """Returns what a watchdog says in rounds in each of which the loop beats, there is work, a step is made, or not."""
    engine, told, script = WatchedEngine(), list[str](), iter(rounds)
    watchdog = Watchdog(engine, 2.0, on_stuck=told.append, on_hang=told.append)

    class Script:
        def wait(self, seconds: float) -> bool:
            assert seconds == 2.0 / ROUNDS
            happened = next(script, None)
            if happened is None:
                return True
            watchdog._beats += "beat" in happened
            engine.progress += "step" in happened
            engine.busy = "work" in happened
            return False

    class Loop:
        def call_soon_threadsafe(self, callback: Callable[[str], None], text: str) -> None:
            callback(text)

    over: Any = Script()
    loop: Any = Loop()
    watchdog._over = over
    watchdog._watch(loop)
    return told


def test_an_idle_engine_is_left_alone_and_a_stuck_one_is_told_once() -> None:
    stuck = "The core has work, but no step was planned or applied for 2 s."
    hanging = "The event loop of the core has been stuck for 2 s."
    nearly = ROUNDS - 1
    assert told_in(["beat"] * 50) == []
    assert told_in(["beat work step"] * 50) == []
    assert told_in((["beat work"] * nearly + ["beat work step"]) * 3) == []
    assert told_in((["beat work"] * nearly + ["beat"]) * 3) == []
    assert told_in(["beat work"] * 50) == [stuck]
    assert told_in([""] * 50) == told_in(["work"] * 50) == [hanging]
    assert told_in((["work"] * nearly + ["beat work"] * nearly + ["beat work step"]) * 3) == []


async def test_a_hanging_event_loop_is_noticed_from_outside() -> None:
    noticed = threading.Event()
    told: list[str] = []

    def on_hang(text: str) -> None:
        told.append(text)
        noticed.set()

    watchdog = Watchdog(WatchedEngine(), 0.1, on_stuck=told.append, on_hang=on_hang)
    task = asyncio.create_task(watchdog.run())
    await asyncio.sleep(0)
    assert noticed.wait(TIMEOUT), "this blocks the loop"
    assert told == ["The event loop of the core has been stuck for 0.1 s."]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_process_ends_when_its_event_loop_hangs(run_dir: Path) -> None:
    # A core whose loop is blocked for good by a signal.
    program = run_dir / "core.py"
    program.write_text(
        "import asyncio, sys, threading\n"
        "from tercet_core.core import serve\n"
        "from tercet_shared.config import CoreSettings\n"
        "from tercet_shared.lifecycle.service import run_service\n"
        "async def blocked(settings, reporter, stop):\n"
        "    task = asyncio.create_task(serve(settings, reporter, stop))\n"
        "    await stop.wait()\n"
        "    threading.Event().wait()\n"
        "sys.exit(run_service(CoreSettings, blocked))\n"
    )
    reading, writing = os.pipe()
    listen, link = f"unix:{run_dir}/core.sock", run_dir / "worker.sock"
    command = (sys.executable, str(program), f"--listen={listen}", f"--link={link}", "--watchdog=1")
    process = await asyncio.create_subprocess_exec(
        *command, f"--report-fd={writing}", pass_fds=(writing,), stderr=asyncio.subprocess.PIPE
    )
    os.close(writing)
    events = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(events), os.fdopen(reading, "rb", buffering=0)
    )
    try:
        assert parse_event(await asyncio.wait_for(events.readline(), TIMEOUT)).stage == "waiting for the worker"
        async with FakeWorker(link):
            async with Client(listen):
                assert parse_event(await asyncio.wait_for(events.readline(), TIMEOUT)).event == "ready"
                process.send_signal(signal.SIGTERM)
                _, log = await asyncio.wait_for(process.communicate(), TIMEOUT)
        assert process.returncode == 1
        fatal = parse_event(await asyncio.wait_for(events.readline(), TIMEOUT))
        assert (fatal.event, fatal.message) == ("fatal", "The event loop of the core has been stuck for 1 s.")
        assert b"in blocked" in log, "where it hangs is in the log"
    finally:
        transport.close()
        if process.returncode is None:
            process.kill()
            await process.wait()
