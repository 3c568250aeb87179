"""Workers that die, hang, come back, or come back as something else, while front ends wait for tokens."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest

from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.errors import LinkError
from tercet_shared.ipc.connect import connect
from tercet_shared.ipc.errors import LinkRejectedError
from tercet_shared.ipc.link import LEAVES
from tercet_shared.wire.frames import encode_hello, encode_result
from tercet_shared.wire.step import StepResult
from tests.fakes.stream_client import Client
from tests.fakes.worker import TIMEOUT, FakeWorker, expected, hello
from tests.integration.core.conftest import StartCore, at_work, info, until
from tests.integration.core.known_requests import PROMPTS, check_all, submit_all


def die(worker: FakeWorker) -> None:
    """Ends the worker as the kernel ends the descriptors of a killed process: EOF, and no word."""
    worker.connection._sock.shutdown(socket.SHUT_RDWR)


async def leave(worker: FakeWorker, goodbye: str = "out of memory") -> None:
    await worker.connection.close(goodbye)


@pytest.mark.parametrize("answered", [0, 1, 2, 7])
@pytest.mark.parametrize("goodbye", [LEAVES, "out of memory", None])
async def test_requests_go_on_with_the_next_worker(start_core: StartCore, answered: int, goodbye: str | None) -> None:
    async with start_core() as core, at_work(core) as (client, first):
        first.hold()
        await submit_all(client)
        for step in range(answered):
            await first.wait_for_steps(step + 1)
            first.release(1)
        await first.wait_for_steps(answered + 2)
        if goodbye is None:
            die(first)
        else:
            await leave(first, goodbye)
        waiting = await until(client, lambda reply: not reply.ready)
        assert waiting.not_ready_reason == "waiting for the worker"
        assert waiting.stats.free_blocks == waiting.stats.num_blocks
        assert waiting.stats.without_worker_s > 0
        assert waiting.stats.worker_left is (goodbye == LEAVES)
        async with FakeWorker(core.link, incarnation="second") as second:
            await client.finished(*PROMPTS)
            check_all(client)
            reply = await info(client)
            assert (reply.ready, reply.welcome.incarnation) == (True, "second")
            assert reply.stats.without_worker_s == 0
            assert second.plans[0].freed.tolist() == [], "a new worker has nothing to forget"
            assert second.welcome == first.welcome


async def test_what_a_worker_answered_before_it_died_counts(start_core: StartCore) -> None:
    async with start_core() as core, at_work(core) as (client, first):
        first.hold()
        await client.submit(1, [9, 8], max_tokens=40)
        await first.wait_for_steps(2)
        first.release(2)  # both answers are in the ring when the worker is gone
        die(first)
        await client.wait_for(lambda: len(client.choices[1].tokens) == 2)
        async with FakeWorker(core.link) as second:
            await client.finished(1)
            assert client.choices[1].tokens == expected([9, 8], 40)
            assert second.plans[0].new.token_ids.tolist() == [9, 8, *expected([9, 8], 2)]


async def test_recomputed_tokens_are_counted_and_the_cache_is_empty(start_core: StartCore) -> None:
    prompt = list(range(10, 110))
    async with start_core() as core, at_work(core) as (client, first):
        await client.submit(1, prompt, max_tokens=4)
        await client.finished(1)
        first.hold()
        before = first.steps
        await client.submit(2, prompt, max_tokens=4)
        await first.wait_for_steps(before + 1)
        die(first)
        async with FakeWorker(core.link) as second:
            await client.finished(2)
            assert second.plans[0].computed.tolist() == [0], "no block of the old worker is matched"
            reply = await info(client)
            assert reply.stats.recomputed_tokens == 100
            await client.submit(3, prompt, max_tokens=4)
            await client.finished(3)
            assert client.choices[3].cached == 96


async def test_submits_during_the_pause_wait_for_the_worker(start_core: StartCore) -> None:
    async with start_core() as core, at_work(core) as (client, first):
        await leave(first)
        await until(client, lambda reply: not reply.ready)
        await submit_all(client)
        await client.submit(50, [50_000], max_tokens=4)
        await client.finished(50)
        assert client.choices[50].rejected is not None, "a bad request is rejected at once"
        await until(client, lambda reply: reply.stats.waiting == len(PROMPTS))
        async with FakeWorker(core.link):
            await client.finished(*PROMPTS)
            check_all(client)


async def test_aborts_and_front_ends_that_leave_during_the_pause(start_core: StartCore) -> None:
    async with start_core() as core, at_work(core) as (client, first):
        first.hold()
        async with Client(core.settings.listen, "leaves") as leaves:
            await client.submit(1, [9] * 30, max_tokens=500)
            await client.submit(2, [8] * 30, max_tokens=5)
            await leaves.submit(1, [7] * 30, max_tokens=500)
            await until(client, lambda reply: reply.stats.running + reply.stats.waiting == 3)
            die(first)
            await until(client, lambda reply: not reply.ready)
            await client.send(aborts=[pb.Abort(handle=1)])
        await until(client, lambda reply: reply.stats.waiting == 1)
        async with FakeWorker(core.link) as second:
            await client.finished(2)
            assert client.choices[2].tokens == expected([8] * 30, 5)
            assert client.choices[1].tokens == []
            assert all(len(plan.slots) == 1 for plan in second.plans)


async def test_many_deaths_with_progress_in_between_end_nothing(start_core: StartCore) -> None:
    async with start_core(worker_failures=2) as core, at_work(core) as (client, first):
        worker = first
        worker.hold()
        await submit_all(client)
        for round_ in range(7):
            for step in range(4):
                await worker.wait_for_steps(step + 1)
                worker.release(1)
            await worker.wait_for_steps(6)
            die(worker)
            worker = FakeWorker(core.link, incarnation=f"number {round_}")
            if round_ < 6:
                worker.hold()
            await worker.__aenter__()
        await client.finished(*PROMPTS)
        check_all(client)
        await worker.__aexit__()


async def test_deaths_without_a_step_in_between_end_the_core(start_core: StartCore) -> None:
    async with start_core(worker_failures=3) as core, at_work(core) as (client, first):
        first.hold()
        await client.submit(1, [9], max_tokens=500)
        await first.wait_for_steps(2)
        await leave(first)
        for _ in range(2):
            async with FakeWorker(core.link) as worker:
                worker.hold()
                await worker.wait_for_steps(2)
                await leave(worker)
        await client.finished(1)
        error = client.choices[1].error
        assert error is not None
        assert error.kind == pb.ERROR_KIND_UNAVAILABLE
        with pytest.raises(LinkError, match=r"lost 3 times in a row without a step in between.*out of memory"):
            await core.ended()


async def test_the_loss_of_an_idle_worker_does_not_count(start_core: StartCore) -> None:
    async with start_core(worker_failures=1) as core, at_work(core) as (client, first):
        worker = first
        for _ in range(3):
            await leave(worker)
            await until(client, lambda reply: not reply.ready)
            worker = FakeWorker(core.link)
            await worker.__aenter__()
            await until(client, lambda reply: reply.ready)
        await submit_all(client)
        await client.finished(*PROMPTS)
        check_all(client)
        await worker.__aexit__()


async def test_no_next_worker_within_the_time_ends_the_core(start_core: StartCore) -> None:
    async with start_core() as core, at_work(core) as (client, worker):
        core.settings.worker_timeout = 0.05  # from here on: the first one had all the time it needed
        worker.hold()
        await client.submit(1, [9], max_tokens=500)
        await worker.wait_for_steps(2)
        die(worker)
        await client.finished(1)
        error = client.choices[1].error
        assert error is not None
        assert error.kind == pb.ERROR_KIND_UNAVAILABLE
        with pytest.raises(LinkError, match="No worker has connected"):
            await core.ended()


@pytest.mark.parametrize(
    ("offer", "sentence"),
    [
        ({"model_fingerprint": "other"}, "another model"),
        ({"tokenizer_fingerprint": "other"}, "another tokenizer"),
        ({"vocab_size": 40_000}, "another vocabulary"),
        ({"block_size": 32}, "another block size"),
        ({"dtype": "bfloat16"}, "another dtype"),
        ({"max_slots": 8}, "max_slots of 8, but this core has promised 64"),
        ({"max_model_len": 512}, "max_model_len of 512, but this core has promised 1024"),
        ({"max_batched_tokens": 64}, "max_batched_tokens of 64, but this core has promised 512"),
    ],
)
async def test_a_worker_that_cannot_take_over_is_refused(
    start_core: StartCore, offer: dict[str, str | int], sentence: str
) -> None:
    async with start_core() as core, at_work(core) as (client, first):
        first.hold()
        await submit_all(client)
        await first.wait_for_steps(2)
        die(first)
        await until(client, lambda reply: not reply.ready)
        with pytest.raises(LinkRejectedError, match=sentence):
            await connect(core.link, encode_hello(hello(**offer)))
        async with FakeWorker(core.link):
            await client.finished(*PROMPTS)
            check_all(client)


@pytest.mark.parametrize("num_blocks", [40, 5000])
async def test_the_next_worker_may_have_another_pool(start_core: StartCore, num_blocks: int) -> None:
    async with start_core() as core, at_work(core) as (client, first):
        first.hold()
        await submit_all(client)
        await first.wait_for_steps(2)
        die(first)
        async with FakeWorker(core.link, num_blocks=num_blocks):
            await client.finished(*PROMPTS)
            check_all(client)
            reply = await until(client, lambda reply: reply.stats.running + reply.stats.waiting == 0)
            assert reply.stats.free_blocks == reply.stats.num_blocks == reply.welcome.num_blocks == num_blocks


async def test_preempted_requests_survive_it_too(start_core: StartCore) -> None:
    async with start_core() as core, at_work(core, num_blocks=24) as (client, first):
        first.hold()
        await submit_all(client)
        await until(client, lambda reply: reply.stats.running + reply.stats.waiting == len(PROMPTS))
        while not (await info(client)).stats.preemptions:
            before = first.steps
            first.release(1)
            await first.wait_for_steps(before + 1)
        die(first)
        async with FakeWorker(core.link, num_blocks=24):
            await client.finished(*PROMPTS)
            check_all(client)


async def test_a_worker_without_heartbeats_is_reported_and_replaced(start_core: StartCore) -> None:
    async with start_core(heartbeat_interval=0.1, heartbeat_timeout=1.2) as core:
        async with at_work(core, pid=4711) as (client, first):
            first.hold()
            await submit_all(client)
            await first.wait_for_steps(2)
            timer = first.connection._timer
            assert timer is not None
            timer.cancel()
            child, pid, message = await asyncio.wait_for(core.reporter.restarts.get(), TIMEOUT)
            assert (child, pid) == ("worker", 4711)
            assert "has shown no life" in message
            async with FakeWorker(core.link):
                await client.finished(*PROMPTS)
                check_all(client)
            assert core.reporter.restarts.empty()


async def test_a_worker_that_breaks_the_protocol_may_come_again(start_core: StartCore) -> None:
    async with start_core() as core, at_work(core) as (client, first):
        first.hold()
        await submit_all(client)
        await first.wait_for_steps(2)
        first.connection.send(b"\xc1 not a frame")
        assert "MessagePack" in (await asyncio.wait_for(first.connection.wait_closed(), TIMEOUT)).text
        async with FakeWorker(core.link):
            await client.finished(*PROMPTS)
            check_all(client)


async def test_an_answer_to_a_step_that_nobody_asked_for_ends_the_link(start_core: StartCore) -> None:
    async with start_core() as core, at_work(core) as (client, first):
        first.hold()
        await submit_all(client)
        await first.wait_for_steps(2)
        zeros = np.zeros(2, np.int32)
        first.connection.send(encode_result(StepResult(2, zeros, zeros[:0])))
        assert "answered step 2" in (await asyncio.wait_for(first.connection.wait_closed(), TIMEOUT)).text
        async with FakeWorker(core.link):
            await client.finished(*PROMPTS)
            check_all(client)


async def test_front_ends_hear_of_the_new_incarnation(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.link) as first, Client(core.settings.listen) as client:
        assert client.welcome.incarnation == "first"
        await leave(first)
        call = client.stub.Connect()
        await call.write(pb.ClientFrame(hello=pb.Hello(frontend_id="late", protocol=1)))
        async with FakeWorker(core.link, incarnation="second", num_blocks=99):
            async with asyncio.timeout(TIMEOUT):
                while True:
                    frame = await call.read()
                    if frame.HasField("welcome") and frame.welcome.incarnation == "second":
                        break
            assert frame.welcome.num_blocks == 99
        call.cancel()


async def test_a_stop_during_the_pause_ends_within_the_grace(start_core: StartCore) -> None:
    async with start_core(grace=0.1) as core, at_work(core) as (client, first):
        first.hold()
        await client.submit(1, [9], max_tokens=30)
        await first.wait_for_steps(2)
        die(first)
        await until(client, lambda reply: not reply.ready)
        core.stop.set()
        await client.finished(1)
        error = client.choices[1].error
        assert error is not None
        assert error.kind == pb.ERROR_KIND_UNAVAILABLE
        await core.ended()


async def test_two_workers_at_once_leave_one(start_core: StartCore) -> None:
    async with start_core() as core:
        joined = await asyncio.gather(
            *(connect(core.link, encode_hello(hello(incarnation=str(i)))) for i in range(4)), return_exceptions=True
        )
        kept = [each for each in joined if not isinstance(each, BaseException)]
        assert all(isinstance(each, LinkRejectedError) for each in joined if isinstance(each, BaseException))
        await core.ready()
        surplus = [
            asyncio.ensure_future(each.connection.wait_closed())
            for each in kept
            if each.connection.close_reason is None
        ]
        while len([task for task in surplus if not task.done()]) > 1:
            await asyncio.wait(surplus, timeout=TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        for task in surplus:
            task.cancel()
        open_ = [each for each in kept if each.connection.close_reason is None]
        assert len(open_) == 1
        await open_[0].connection.close()
