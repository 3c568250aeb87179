"""Workers of several ranks: gathered, served as one, and gone as one."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from tercet_core.links import gate, gathering
from tercet_core.links.gate import WorkerGate
from tercet_shared.config import CoreSettings, parse
from tercet_shared.errors import LinkError, ProtocolError
from tercet_shared.ipc.connect import connect
from tercet_shared.ipc.connect_remote import connect_remote
from tercet_shared.ipc.errors import LinkRejectedError
from tercet_shared.ipc.link import LEAVES
from tercet_shared.ipc.listener import LinkListener
from tercet_shared.ipc.remote import RemoteLink
from tercet_shared.wire.frames import encode_hello, encode_plan, encode_result
from tercet_shared.wire.step import StepResult
from tests.fakes.stream_client import Client
from tests.fakes.worker import TIMEOUT, FakeGroup, FakeWorker, hello, rank_of
from tests.integration.core.conftest import StartCore, info, until
from tests.integration.core.known_requests import PROMPTS, check_all, submit_all


def die(worker: FakeWorker) -> None:
    """Ends a rank as the kernel ends the descriptors of a killed process: EOF, and no word."""
    if isinstance(worker.connection, RemoteLink):
        worker.connection._wire._call.cancel()
    else:
        worker.connection._sock.shutdown(socket.SHUT_RDWR)


async def gone(client: Client) -> None:
    """Waits until the core knows that its worker is: only then is there room for the next."""
    await until(client, lambda reply: not reply.ready)


async def goodbye_of(worker: FakeWorker) -> str:
    return str((await asyncio.wait_for(worker.connection.wait_closed(), TIMEOUT)).text)


REMOTE = [set(), {1}, {2}, {0, 1}, {0, 1, 2}]
"""Which of three ranks are on another host."""


@pytest.mark.parametrize(("ranks", "remote"), [(2, set()), (5, set()), *((3, remote) for remote in REMOTE)])
async def test_every_plan_reaches_every_rank_and_one_answers(
    start_core: StartCore, ranks: int, remote: set[int]
) -> None:
    async with AsyncExitStack() as stack:
        core = await stack.enter_async_context(start_core())
        group = FakeGroup(core.link, ranks, remote=(remote, core.settings.listen))
        await stack.enter_async_context(group)
        client = await stack.enter_async_context(Client(core.settings.listen))
        await submit_all(client)
        await client.finished(*PROMPTS)
        check_all(client)
        for rank in group.ranks:
            await rank.wait_for_steps(group.answering.steps)
            assert [encode_plan(plan) for plan in rank.plans] == [encode_plan(plan) for plan in group.answering.plans]
        reply = await info(client)
        assert (reply.ready, reply.welcome.incarnation) == (True, "first group")


@pytest.mark.parametrize(("ranks", "stages", "depth"), [(2, 2, 3), (4, 4, 5), (4, 1, 2)])
async def test_requests_take_turns_in_the_stages(start_core: StartCore, ranks: int, stages: int, depth: int) -> None:
    async with start_core() as core, FakeGroup(core.link, ranks, stages=stages) as group:
        async with Client(core.settings.listen) as client:
            await core.ready()
            assert all(rank.welcome is not None and rank.welcome.pipeline_depth == depth for rank in group.ranks)
            group.answering.hold()
            await submit_all(client)
            # All of them, so that none still has a prompt when the others have their turns.
            await until(client, lambda reply: reply.stats.running + reply.stats.waiting == len(PROMPTS))
            group.answering.release()
            await client.finished(*PROMPTS)
            check_all(client)
            most = max(len(plan.slots) for plan in group.answering.plans[8:])
            assert most == -(-len(PROMPTS) // stages)


async def test_there_is_no_worker_before_the_last_rank_is_here(start_core: StartCore) -> None:
    async with start_core() as core:
        group = FakeGroup(core.link, 3)
        for rank in (group.ranks[2], group.ranks[0]):
            await rank.__aenter__()
        assert not core.reporter.is_ready.is_set()
        with pytest.raises(LinkRejectedError, match="waits for rank 1 of 3 of another worker"):
            await connect(core.link, encode_hello(hello()))
        with pytest.raises(LinkRejectedError, match="waits for rank 1 of 3 of another worker"):
            await connect(core.link, encode_hello(hello(**rank_of("other", 0, 2))))
        assert not core.reporter.is_ready.is_set()
        await group.ranks[1].__aenter__()
        await core.ready()
        for offer in ({}, rank_of("other", 0, 2), rank_of("first group", 0, 3)):
            with pytest.raises(LinkRejectedError, match="this core has a worker already"):
                await connect(core.link, encode_hello(hello(**offer)))
        for rank in group.ranks:
            assert rank.connection.close_reason is None
            await rank.__aexit__()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rank": 0}, "rank 0 of the group is here already"),
        ({"answers": True}, "rank 1 wants to answer for its group, but rank 0 does"),
        ({"ranks": 4}, "rank 1 says ranks 4, but rank 0 of its group 3"),
        ({"stages": 3}, "rank 1 says stages 3, but rank 0 of its group 1"),
        ({"num_blocks": 5}, "rank 1 says num_blocks 5, but rank 0 of its group 1024"),
        ({"max_slots": 5}, "rank 1 says max_slots 5, but rank 0 of its group 64"),
        ({"model_fingerprint": "other"}, "rank 1 says model_fingerprint other, but rank 0 of its group fake-model"),
        ({"dtype": "bfloat16"}, "rank 1 says dtype bfloat16, but rank 0 of its group none"),
    ],
)
async def test_a_rank_that_disagrees_is_refused_and_the_others_wait_on(
    start_core: StartCore, changes: dict[str, Any], complaint: str
) -> None:
    offer = rank_of("g", 1, 3) | {"answers": False}
    async with start_core() as core, FakeWorker(core.link, **(rank_of("g", 0, 3) | {"answers": True})) as first:
        with pytest.raises(LinkRejectedError, match=complaint):
            await connect(core.link, encode_hello(hello(**(offer | changes))))
        async with FakeWorker(core.link, **offer), FakeWorker(core.link, **(offer | {"rank": 2})):
            await core.ready()
        assert first.welcome is not None


async def test_a_group_in_which_nobody_answers_is_sent_away(start_core: StartCore) -> None:
    async with start_core() as core:
        mute = [FakeWorker(core.link, **(rank_of("g", number, 2) | {"answers": False})) for number in range(2)]
        for rank in mute:
            await rank.__aenter__()
        for rank in mute:
            assert await goodbye_of(rank) == "no rank of the group says that it answers"
        async with FakeGroup(core.link, 2):
            await core.ready()


async def test_a_rank_that_leaves_early_takes_the_others_along_and_all_may_come_again(start_core: StartCore) -> None:
    async with start_core() as core:
        for end in ("dies", "leaves"):
            group = FakeGroup(core.link, 3)
            first, second = group.ranks[:2]
            await first.__aenter__()
            await second.__aenter__()
            if end == "dies":
                die(second)
            else:
                await second.connection.close("out of memory")
            goodbye = await goodbye_of(first)
            assert goodbye.startswith("rank 1 of 3 left before all were here: ")
            assert ("out of memory" in goodbye) == (end == "leaves")
        async with FakeGroup(core.link, 3), Client(core.settings.listen) as client:  # the same group as before
            await core.ready()
            await submit_all(client)
            await client.finished(*PROMPTS)
            check_all(client)


async def test_ranks_that_stay_away_are_named(run_dir: Path) -> None:
    group = FakeGroup(run_dir / "worker.sock", 4)
    settings = parse(CoreSettings, []).model_copy(update={"worker_timeout": 0.0})
    waiting = WorkerGate("core", settings)
    with LinkListener(run_dir / "worker.sock") as listener:
        accepting = asyncio.create_task(listener.serve(waiting.judge, waiting.admit))
        for number in (1, 3):
            await group.ranks[number].__aenter__()
        with pytest.raises(LinkError, match="not whole within 0 s: ranks 0 and 2 of 4 did not connect"):
            await waiting.worker()
        await waiting.close("the core stops")
        for number in (1, 3):
            assert await goodbye_of(group.ranks[number]) == "the core stops"
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)


async def test_what_is_left_of_a_dead_group_makes_way(start_core: StartCore, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_core() as core, FakeWorker(core.link, **rank_of("dead", 1, 2)) as left:
        monkeypatch.setattr(gate, "_STALE_S", 0.0)
        async with FakeGroup(core.link, 2, "alive"):
            await core.ready()
            assert await goodbye_of(left) == "rank 0 of 2 did not come, and another worker did"
            with pytest.raises(LinkRejectedError, match="has a worker already"):
                await connect(core.link, encode_hello(left.hello))


async def test_a_single_worker_takes_the_place_of_a_dead_group(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_core() as core, FakeWorker(core.link, **rank_of("dead", 1, 2)) as left:
        monkeypatch.setattr(gate, "_STALE_S", 0.0)
        async with FakeWorker(core.link):
            await core.ready()
            assert "another worker did" in await goodbye_of(left)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("goodbye", [LEAVES, "out of memory", None])
@pytest.mark.parametrize("remote", [set(), {1}, {2}])
async def test_the_end_of_one_rank_is_the_end_of_all_and_requests_go_on(
    start_core: StartCore, lost: int, goodbye: str | None, remote: set[int]
) -> None:
    async with AsyncExitStack() as stack:
        core = await stack.enter_async_context(start_core())
        group = FakeGroup(core.link, 3, remote=(remote, core.settings.listen))
        await stack.enter_async_context(group)
        client = await stack.enter_async_context(Client(core.settings.listen))
        group.answering.hold()
        await submit_all(client)
        for step in range(3):
            await group.answering.wait_for_steps(step + 1)
            group.answering.release(1)
        await group.answering.wait_for_steps(5)
        if goodbye is None:
            die(group.ranks[lost])
        else:
            await group.ranks[lost].connection.close(goodbye)
        others = [rank for rank in group.ranks if rank is not group.ranks[lost]]
        for rank in others:
            reason = await goodbye_of(rank)
            assert reason.startswith(f"rank {lost} of 3: ")
            assert goodbye is None or reason.endswith(goodbye)
        waiting = await until(client, lambda reply: not reply.ready)
        assert waiting.stats.worker_left is (goodbye == LEAVES)
        async with FakeGroup(core.link, 3, "second group", (remote, core.settings.listen)) as second:
            await client.finished(*PROMPTS)
            check_all(client)
            assert (await info(client)).welcome.incarnation == "second group"
            assert second.answering.plans[0].freed.tolist() == []


async def test_a_single_worker_may_follow_a_group_and_the_other_way_round(start_core: StartCore) -> None:
    async with start_core() as core, FakeGroup(core.link, 2) as group, Client(core.settings.listen) as client:
        group.answering.hold()
        await submit_all(client)
        await group.answering.wait_for_steps(2)
        die(group.ranks[0])
        await goodbye_of(group.answering)
        await gone(client)
        async with FakeWorker(core.link) as single:
            single.hold()
            await single.wait_for_steps(2)
        await gone(client)
        async with FakeGroup(core.link, 3, "second group"):
            await client.finished(*PROMPTS)
            check_all(client)


async def test_a_rank_that_hangs_ends_the_group_whose_launcher_is_reported(start_core: StartCore) -> None:
    async with start_core(heartbeat_interval=0.1, heartbeat_timeout=1.2) as core:
        async with FakeGroup(core.link, 2, pid=4711) as group, Client(core.settings.listen) as client:
            group.answering.hold()
            await submit_all(client)
            await group.answering.wait_for_steps(2)
            group.ranks[0].connection._timer.cancel()
            child, pid, message = await asyncio.wait_for(core.reporter.restarts.get(), TIMEOUT)
            assert (child, pid) == ("worker", 4711)
            assert message.startswith("rank 0 of 2: ")
            assert "has shown no life" in message
            assert (await goodbye_of(group.answering)) == message
            async with FakeGroup(core.link, 2, "second group"):
                await client.finished(*PROMPTS)
                check_all(client)


async def test_a_group_that_does_not_answer_is_reported_and_replaced(start_core: StartCore) -> None:
    async with start_core(step_timeout=0.3) as core:
        async with FakeGroup(core.link, 2, pid=4711) as group, Client(core.settings.listen) as client:
            group.answering.hold()
            await submit_all(client)
            child, pid, message = await asyncio.wait_for(core.reporter.restarts.get(), TIMEOUT)
            assert (child, pid) == ("worker", 4711)
            assert "has not answered step 1" in message
            for rank in group.ranks:
                assert "has not answered step 1" in await goodbye_of(rank)
            async with FakeGroup(core.link, 2, "second group"):
                await client.finished(*PROMPTS)
                check_all(client)


async def test_a_result_of_a_rank_that_does_not_answer_breaks_the_protocol(start_core: StartCore) -> None:
    async with start_core() as core, FakeGroup(core.link, 2) as group, Client(core.settings.listen) as client:
        group.answering.hold()
        await submit_all(client)
        await group.answering.wait_for_steps(2)
        zeros = np.zeros(2, np.int32)
        group.ranks[0].connection.send(encode_result(StepResult(1, zeros, zeros[:0])))
        assert "rank 1 answers for its group, but rank 0 of 2 sent a result" in await goodbye_of(group.ranks[0])
        assert (await goodbye_of(group.answering)).startswith("rank 0 of 2: ")
        await gone(client)
        async with FakeGroup(core.link, 2, "second group"):
            await client.finished(*PROMPTS)
            check_all(client)


async def test_two_groups_at_once_leave_one(start_core: StartCore) -> None:
    async with start_core() as core:
        offers = [rank_of(name, number, 3) for number in range(3) for name in ("left", "right")]
        joined = await asyncio.gather(
            *(connect(core.link, encode_hello(hello(**offer))) for offer in offers), return_exceptions=True
        )
        await core.ready()
        kept = [each for each in joined if not isinstance(each, BaseException)]
        assert all(isinstance(each, LinkRejectedError) for each in joined if isinstance(each, BaseException))
        ends = [asyncio.ensure_future(each.connection.wait_closed()) for each in kept]
        while len([end for end in ends if not end.done()]) > 3:
            await asyncio.wait(ends, timeout=TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        assert len([each for each in kept if each.connection.close_reason is None]) == 3
        for each in kept:
            await each.connection.close()


async def test_a_single_worker_on_another_host(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.settings.listen) as first, Client(core.settings.listen) as client:
        first.hold()
        await submit_all(client)
        await first.wait_for_steps(2)
        with pytest.raises(LinkRejectedError, match="has a worker already"):
            await connect_remote(core.settings.listen, encode_hello(hello()))
        die(first)
        await gone(client)  # a cancelled call is no end of file in the kernel: gRPC's threads say so in their own time
        async with FakeWorker(core.settings.listen, incarnation="second"):
            await client.finished(*PROMPTS)
            check_all(client)


async def test_workers_on_other_hosts_hear_that_the_core_stops(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.settings.listen) as worker:
        await core.ready()
        core.stop.set()
        assert await goodbye_of(worker) == "the core stops"
        await core.ended()


class Process:
    """A rank in a process of its own, which can be killed; see `tests/fakes/rank.py`."""

    def __init__(self, where: Path | str, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.fakes.rank", str(where), *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    async def line(self) -> str:
        assert self._process.stdout is not None
        return (await asyncio.wait_for(asyncio.to_thread(self._process.stdout.readline), TIMEOUT)).strip()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.mark.parametrize("remote", [False, True])
async def test_a_rank_that_is_killed_takes_the_group_along_which_comes_again(
    start_core: StartCore, remote: bool
) -> None:
    async with start_core() as core:
        where = core.settings.listen if remote else core.link
        with Process(where, "first", "0", "3") as killed, Process(core.link, "first", "1", "3") as other:
            async with FakeWorker(core.link, **rank_of("first", 2, 3)) as answering:
                answering.hold()
                async with Client(core.settings.listen) as client:
                    await submit_all(client)
                    await answering.wait_for_steps(2)
                    answering.release(2)
                    await answering.wait_for_steps(4)
                    killed.kill()
                    assert (await goodbye_of(answering)).startswith("rank 0 of 3: the worker is gone")
                    assert (await other.line()).startswith("goodbye: rank 0 of 3: the worker is gone")
                    await gone(client)
                    with Process(where, "second", "0", "3"), Process(core.link, "second", "1", "3"):
                        async with FakeWorker(core.link, **rank_of("second", 2, 3)):
                            await client.finished(*PROMPTS)
                            check_all(client)


async def test_a_core_takes_no_workers_from_other_hosts_unless_it_is_told_to(start_core: StartCore) -> None:
    async with start_core(remote_workers=False) as core:
        with pytest.raises(ProtocolError, match="--remote-workers"):
            await connect_remote(core.settings.listen, encode_hello(hello()))


async def test_ranks_that_wait_in_vain_are_sent_away(start_core: StartCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_PATIENCE_S", 0.05)
    async with start_core() as core:
        async with FakeWorker(core.link, **rank_of("half", 0, 2)) as alone:
            assert (await goodbye_of(alone)).startswith("rank 1 of 2 did not come within")
        async with FakeWorker(core.link):
            await core.ready()
