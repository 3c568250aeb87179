"""`tercet worker` with several ranks, as processes: what it starts, what it says, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tercet_shared.config import WorkerSettings, parse
from tercet_shared.lifecycle.report import Event
from tercet_shared.wire.frames import encode_plan
from tercet_worker.parallel.failures import is_consequence
from tercet_worker.parallel.launch import rank_specs
from tests.fakes.checkpoints import write_tiny_llama
from tests.fakes.ports import free_port
from tests.integration.worker.test_worker_process import FLAGS, TIMEOUT, ScriptedCore, begin, plan, process

TWO = (*FLAGS, "--tensor-parallel-size=2")
STAGES = (*FLAGS, "--pipeline-parallel-size=2", "--nodes=2")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny")


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


async def until_ready(report: Any) -> list[Event]:
    events: list[Event] = []
    while not events or events[-1].event != "ready":
        event = await report()
        assert event is not None
        events.append(event)
    return events


async def end_of(child: asyncio.subprocess.Process, report: Any) -> str:
    """Returns the sentence with which a process ends that failed."""
    message = ""
    while (event := await report()) is not None:
        message = event.message if event.event == "fatal" else message
    assert await asyncio.wait_for(child.wait(), TIMEOUT) == 1
    return message


def ranks_below(child: asyncio.subprocess.Process) -> list[psutil.Process]:
    return sorted(psutil.Process(child.pid).children(), key=lambda rank: rank.cmdline())


def test_the_settings_of_a_rank_are_those_of_the_command() -> None:
    settings = parse(WorkerSettings, [*TWO, "--pipeline-parallel-size=2", "--metrics-port=9000", "model"])
    environ = {"TERCET_DTYPE": "bfloat16", "TERCET_LOG_LEVEL": "debug", "HOME": "/root", "GLOO_SOCKET_IFNAME": "eth1"}
    specs = rank_specs(settings, "127.0.0.1:77", 5, environ)
    own = [parse(WorkerSettings, list(spec.argv[3:])) for spec in specs]
    assert [each.local_rank for each in own] == [0, 1, 2, 3]
    assert [each.rendezvous_fd for each in own] == [5, None, None, None]
    assert [spec.holds for spec in specs] == [(5,), (), (), ()]
    assert [each.metrics_port for each in own] == [None, None, 9000, None], "the one that answers has the figures"
    assert {each.dtype for each in own} == {"float32"}
    assert {each.rendezvous for each in own} == {"127.0.0.1:77"}
    assert specs[0].env == {"HOME": "/root", "GLOO_SOCKET_IFNAME": "eth1", "TORCH_CPP_LOG_LEVEL": "FATAL"}


async def test_ranks_serve_a_core_and_stop(tmp_path: Path, model: Path) -> None:
    async with ScriptedCore(tmp_path / "w.sock").listen() as core, process(tmp_path, model, *TWO) as (child, report):
        found = sorted([await core.worker(), await core.worker()], key=lambda one: one[1].rank)
        (first, hello), (second, other) = found
        assert (hello.group, hello.ranks, hello.stages) == (other.group, 2, 1)
        assert (hello.answers, other.answers) == (True, False)
        assert hello.pid == other.pid == child.pid, "what a supervisor knows"
        events = await until_ready(report)
        assert events[-1].detail["model"] == "tiny"
        assert "waiting for the other ranks" in [event.stage for event in events]
        for step in (begin(1, 0, [1, 2, 3], [0]), plan(2, 0, 1, 3, [])):
            for link in (first, second):
                link.send(encode_plan(step))
            assert len((await core.result()).token_ids) == 1
        processes = ranks_below(child)
        child.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), TIMEOUT) == 0
        assert not any(rank.is_running() for rank in processes)
        assert await report() is None, "nothing of it was a failure"


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_killed_rank_ends_all_and_is_named(tmp_path: Path, model: Path, lost: int) -> None:
    async with ScriptedCore(tmp_path / "w.sock").listen() as core, process(tmp_path, model, *TWO) as (child, report):
        found = sorted([await core.worker(), await core.worker()], key=lambda one: one[1].rank)
        await until_ready(report)
        processes = ranks_below(child)
        processes[lost].kill()
        await asyncio.wait_for(found[lost][0].wait_closed(), TIMEOUT)
        await found[1 - lost][0].close("rank is gone")  # as a core does
        message = await end_of(child, report)
        assert message.startswith(f"The worker's rank {lost} was killed by SIGKILL")
        assert not any(rank.is_running() for rank in processes)


async def test_a_step_that_fails_in_one_rank_ends_all(tmp_path: Path, model: Path) -> None:
    async with ScriptedCore(tmp_path / "w.sock").listen() as core, process(tmp_path, model, *TWO) as (child, report):
        found = sorted([await core.worker(), await core.worker()], key=lambda one: one[1].rank)
        await until_ready(report)
        # A plan that all refuse alike is the answering rank's to report ...
        for link, _ in found:
            link.send(encode_plan(plan(1, 0, 1, 3, [])))
        assert "holds no request" in (await core.result()).error
        # ... and one that only one rank gets leaves it waiting for the other, until that is gone.
        found[0][0].send(encode_plan(begin(2, 0, [1, 2, 3], [0])))
        await found[1][0].close("for a reason of its own")
        message = await end_of(child, report)
        assert is_consequence(message)
        reason = await asyncio.wait_for(found[0][0].wait_closed(), TIMEOUT)
        assert "lost the others of its group" in reason.text or "gone" in reason.text


async def test_a_model_that_cannot_be_divided_is_said_once(tmp_path: Path, model: Path) -> None:
    async with process(tmp_path, model, *FLAGS, "--tensor-parallel-size=5") as (child, report):
        message = await end_of(child, report)
        assert message == "--tensor-parallel-size 5: the model has only 4 query heads."


async def test_an_address_that_is_taken(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        async with process(tmp_path, model, *STAGES, f"--rendezvous={address}") as (child, report):
            assert await end_of(child, report) == f"The ranks cannot meet at {address}: it is in use."


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rendezvous=192.0.2.1:7000",), "it is no address of this host, which has --node-rank 0"),
        ((), "--rendezvous is needed with --nodes"),
        (("--rendezvous=nowhere",), "an address as host:port is needed"),
        (("--node-rank=2", "--rendezvous=127.0.0.1:1"), "there are 2 hosts, counted from 0"),
    ],
)
async def test_a_rendezvous_that_cannot_be(tmp_path: Path, model: Path, flags: tuple[str, ...], message: str) -> None:
    async with process(tmp_path, model, *STAGES, *flags) as (child, report):
        assert message in await end_of(child, report)


async def test_a_host_that_does_not_come(tmp_path: Path, model: Path) -> None:
    address = free_address()
    flags = (*STAGES, f"--rendezvous={address}", "--rendezvous-timeout=4")
    async with process(tmp_path, model, *flags) as (child, report):
        message = await end_of(child, report)
        assert message == f"1 of 2 ranks did not come to the rendezvous at {address} within 4 s: 1 (of host 1)."


async def test_two_hosts(tmp_path: Path, model: Path) -> None:
    flags = (*STAGES, f"--rendezvous={free_address()}")
    async with AsyncExitStack() as stack:
        core = await stack.enter_async_context(ScriptedCore(tmp_path / "w.sock").listen())
        hosts = [
            await stack.enter_async_context(process(tmp_path, model, *flags, f"--node-rank={node}"))
            for node in (1, 0)  # the second one comes first, and waits
        ]
        found = sorted([await core.worker(), await core.worker()], key=lambda one: one[1].rank)
        assert [hello.answers for _, hello in found] == [False, True]
        for link, _ in found:
            link.send(encode_plan(begin(1, 0, [1, 2, 3], [0])))
        assert len((await core.result()).token_ids) == 1
        for _, report in hosts:
            await until_ready(report)
        os.kill(hosts[0][0].pid, signal.SIGKILL)  # its ranks die with it
        await asyncio.wait_for(found[1][0].wait_closed(), TIMEOUT)
        await found[0][0].close("rank 1 of 2 is gone")
        assert "rank 1 of 2 is gone" in await end_of(*hosts[1])
