"""The core between a raw front end and a fake worker, over gRPC and the ring."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.errors import ConfigurationError, LinkError
from tercet_shared.ipc.connect import connect
from tercet_shared.ipc.errors import LinkRejectedError
from tercet_shared.wire.frames import encode_hello
from tests.fakes.stream_client import Client
from tests.fakes.worker import FakeWorker, expected, hello
from tests.integration.core.conftest import StartCore, info, until


async def test_tokens_of_one_request_arrive_in_order_with_one_end(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.link), Client(core.settings.listen) as client:
        await client.submit(7, [5, 6, 7], max_tokens=40)
        await client.finished(7)
        choice = client.choices[7]
        assert choice.tokens == expected([5, 6, 7], 40)
        assert (choice.reason, choice.terminal_events) == (pb.FINISH_REASON_LENGTH, 1)


async def test_a_hundred_requests_of_two_front_ends_share_the_worker(start_core: StartCore) -> None:
    async with (
        start_core() as core,
        FakeWorker(core.link) as worker,
        Client(core.settings.listen, "one") as one,
        Client(core.settings.listen, "two") as two,
    ):
        worker.hold()
        for i in range(100):
            await (one, two)[i % 2].submit(i, [i + 3] * (1 + 7 * i % 150), max_tokens=1 + i % 30)
        await until(one, lambda reply: reply.stats.running + reply.stats.waiting == 100)
        worker.release()
        await one.finished(*range(0, 100, 2))
        await two.finished(*range(1, 100, 2))
        for i in range(100):
            choice = (one, two)[i % 2].choices[i]
            assert choice.tokens == expected([i + 3] * (1 + 7 * i % 150), 1 + i % 30)
            assert choice.terminal_events == 1
        assert max(len(plan.slots) for plan in worker.plans) > 10, "requests were batched"
        reply = await info(one)
        assert reply.stats.running == reply.stats.waiting == 0
        assert reply.stats.free_blocks == reply.stats.num_blocks


async def test_a_stop_token_ends_the_request_and_names_itself(start_core: StartCore) -> None:
    tokens = expected([9], 10)
    async with start_core() as core, FakeWorker(core.link), Client(core.settings.listen) as client:
        await client.submit(1, [9], max_tokens=50, stop_token_ids=[tokens[4]])
        await client.finished(1)
        choice = client.choices[1]
        assert choice.tokens == tokens[:5]
        assert (choice.reason, choice.stop_id) == (pb.FINISH_REASON_STOP, tokens[4])


async def test_two_steps_are_in_flight(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.link) as worker, Client(core.settings.listen) as client:
        worker.hold()
        await client.submit(1, [9], max_tokens=50)
        await worker.wait_for_steps(2)
        assert [plan.computed.tolist() for plan in worker.plans] == [[0], [1]]
        worker.release(1)
        await worker.wait_for_steps(3)
        assert worker.steps == 3
        worker.release()
        await client.finished(1)
        assert client.choices[1].tokens == expected([9], 50)


async def test_a_repeated_prompt_comes_from_the_cache(start_core: StartCore) -> None:
    prompt = list(range(10, 110))
    async with start_core() as core, FakeWorker(core.link), Client(core.settings.listen) as client:
        await client.submit(1, prompt, max_tokens=4)
        await client.finished(1)
        await client.submit(2, prompt, max_tokens=4)
        await client.finished(2)
        assert client.choices[1].cached == 0
        assert client.choices[2].cached == 96
        assert client.choices[1].tokens == client.choices[2].tokens
        reply = await client.stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())
        assert reply.dropped_blocks == 6
        await client.submit(3, prompt, max_tokens=4)
        await client.finished(3)
        assert client.choices[3].cached == 0


async def test_abort_frees_slot_and_blocks_while_steps_are_in_flight(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.link) as worker, Client(core.settings.listen) as client:
        worker.hold()
        await client.submit(1, [9] * 100, max_tokens=500)
        await worker.wait_for_steps(2)
        await client.send(aborts=[pb.Abort(handle=1)])
        reply = await until(client, lambda reply: reply.stats.running == 0)
        assert reply.stats.free_blocks == reply.stats.num_blocks
        worker.release()
        await client.submit(2, [8], max_tokens=3)
        await client.finished(2)
        assert client.choices[1].tokens == []
        assert worker.plans[2].freed.tolist() == worker.plans[0].slots.tolist()


async def test_finish_ends_without_a_further_event(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.link), Client(core.settings.listen) as client:
        await client.submit(1, [9], max_tokens=100_000_000 % 900)
        await client.wait_for(lambda: len(client.choices[1].tokens) > 3)
        await client.send(finishes=[pb.Finish(handle=1, output_tokens=4)])
        await client.submit(2, [8], max_tokens=1)
        await client.finished(2)
        await until(client, lambda reply: reply.stats.running == 0)


@pytest.mark.parametrize(
    ("prompt", "sampling", "kind", "param"),
    [
        ([], {}, pb.ERROR_KIND_INVALID, "prompt"),
        ([50_000], {}, pb.ERROR_KIND_INVALID, "prompt"),
        ([-1], {}, pb.ERROR_KIND_INVALID, "prompt"),
        ([1] * 1024, {}, pb.ERROR_KIND_CONTEXT_LENGTH, "prompt"),
        ([1], {"max_tokens": 0}, pb.ERROR_KIND_INVALID, "max_tokens"),
        ([1], {"temperature": float("nan")}, pb.ERROR_KIND_INVALID, "temperature"),
        ([1], {"top_p": 0.0}, pb.ERROR_KIND_INVALID, "top_p"),
        ([1], {"stop_token_ids": [50_000]}, pb.ERROR_KIND_INVALID, "stop_token_ids"),
        ([1], {"stop_token_ids": list(range(65))}, pb.ERROR_KIND_INVALID, "stop_token_ids"),
    ],
)
async def test_a_bad_request_is_rejected_and_others_go_on(
    start_core: StartCore, prompt: list[int], sampling: dict[str, object], kind: int, param: str
) -> None:
    async with start_core() as core, FakeWorker(core.link), Client(core.settings.listen) as client:
        await client.submit(1, [9], max_tokens=200)
        await client.submit(2, prompt, **sampling)
        await client.finished(1, 2)
        rejected = client.choices[2].rejected
        assert rejected is not None
        assert (rejected.kind, rejected.param) == (kind, param)
        assert client.choices[1].tokens == expected([9], 200)


async def test_a_front_end_that_disappears_takes_its_requests_along(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.link) as worker, Client(core.settings.listen, "stays") as stays:
        worker.hold()
        async with Client(core.settings.listen, "leaves") as leaves:
            await leaves.submit(1, [9] * 50, max_tokens=500)
            await worker.wait_for_steps(2)
        await until(stays, lambda reply: reply.stats.running == 0)
        worker.release()
        await stays.submit(1, [4], max_tokens=5)
        await stays.finished(1)
        assert stays.choices[1].tokens == expected([4], 5)


async def test_a_silent_front_end_counts_as_gone(start_core: StartCore) -> None:
    async with (
        start_core(heartbeat_interval=0.05, heartbeat_timeout=0.5) as core,
        FakeWorker(core.link) as worker,
        Client(core.settings.listen, "silent", heartbeat=None) as silent,
    ):
        worker.hold()
        await silent.submit(1, [9] * 50, max_tokens=500)
        await worker.wait_for_steps(2)
        assert await asyncio.wait_for(silent.call.code(), 60) is not None
        info = await silent.stub.Info(pb.InfoRequest())
        assert info.stats.running == 0


async def test_the_first_frame_must_be_hello(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.link), Client(core.settings.listen) as client:
        call = client.stub.Connect()
        await call.write(pb.ClientFrame())
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        call = client.stub.Connect()
        await call.write(pb.ClientFrame(hello=pb.Hello(frontend_id="x", protocol=99)))
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_step_that_fails_ends_its_requests_only(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.link) as worker, Client(core.settings.listen) as client:
        worker.failing_steps[1] = "out of paper"
        await client.submit(1, [9] * 40, max_tokens=5)
        await client.finished(1)
        error = client.choices[1].error
        assert error is not None
        assert "out of paper" in error.message
        assert error.kind == pb.ERROR_KIND_INTERNAL
        await client.submit(2, [9] * 40, max_tokens=5)
        await client.finished(2)
        assert client.choices[2].tokens == expected([9] * 40, 5)
        assert client.choices[2].cached == 0, "what a failed step wrote is not cached"


async def test_a_row_that_is_not_finite_ends_its_request_only(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.link) as worker, Client(core.settings.listen) as client:
        worker.hold()
        await client.submit(1, [9] * 4, max_tokens=5)
        await client.submit(2, [8] * 4, max_tokens=5)
        await worker.wait_for_steps(2)
        both = next((plan for plan in worker.plans if len(plan.slots) == 2), None)
        if both is None:
            worker.release(1)
            await worker.wait_for_steps(3)
            both = worker.plans[2]
        worker.broken_rows[both.step_id] = [0]
        worker.release()
        await client.finished(1, 2)
        errors = [client.choices[handle].error for handle in (1, 2)]
        assert [error is not None for error in errors].count(True) == 1
        whole = 2 if errors[0] is not None else 1
        assert client.choices[whole].tokens == expected([9 if whole == 1 else 8] * 4, 5)


async def test_a_core_without_a_worker_says_so(start_core: StartCore) -> None:
    async with start_core(worker_timeout=0.05) as core:
        with pytest.raises(LinkError, match="No worker has connected"):
            await core.ended()


async def test_a_second_worker_is_refused(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.link), Client(core.settings.listen):
        with pytest.raises(LinkRejectedError, match="has a worker already"):
            await connect(core.link, encode_hello(hello()))


async def test_limits_are_the_smaller_of_both_sides(start_core: StartCore) -> None:
    async with start_core(max_num_seqs=3, max_model_len=2000, max_num_batched_tokens=64) as core:
        async with FakeWorker(core.link) as worker, Client(core.settings.listen) as client:
            assert worker.welcome is not None
            assert (worker.welcome.max_slots, worker.welcome.max_model_len) == (3, 1024)
            assert worker.welcome.max_batched_tokens == 64
            await client.submit(1, [9] * 200, max_tokens=2)
            await client.finished(1)
            assert [int(plan.num_tokens.sum()) for plan in worker.plans[:4]] == [64, 64, 64, 8]


async def test_draining_finishes_what_was_accepted_and_takes_nothing_new(start_core: StartCore) -> None:
    async with start_core(grace=20.0) as core, FakeWorker(core.link) as worker:
        async with Client(core.settings.listen) as client:
            worker.hold()
            await client.submit(1, [9], max_tokens=30)
            await worker.wait_for_steps(2)
            core.stop.set()
            await client.wait_for(lambda: client.draining is not None)
            await client.submit(2, [9], max_tokens=30)
            await client.finished(2)
            rejected = client.choices[2].rejected
            assert rejected is not None
            assert rejected.kind == pb.ERROR_KIND_UNAVAILABLE
            worker.release()
            await client.finished(1)
            assert client.choices[1].tokens == expected([9], 30)
            await core.ended()


async def test_what_outlives_the_grace_ends_with_an_error(start_core: StartCore) -> None:
    async with start_core(grace=0.05) as core, FakeWorker(core.link) as worker:
        async with Client(core.settings.listen) as client:
            worker.hold()
            await client.submit(1, [9], max_tokens=30)
            await worker.wait_for_steps(2)
            core.stop.set()
            await client.finished(1)
            error = client.choices[1].error
            assert error is not None
            assert error.kind == pb.ERROR_KIND_UNAVAILABLE
            await core.ended()


async def test_nothing_is_left_in_the_run_directory(start_core: StartCore, run_dir: Path) -> None:
    async with start_core() as core, FakeWorker(core.link), Client(core.settings.listen):
        pass
    assert list(run_dir.iterdir()) == []


async def test_two_cores_cannot_share_an_address(start_core: StartCore, run_dir: Path) -> None:
    async with start_core() as core:
        async with start_core(link=run_dir / "other.sock") as second:
            with pytest.raises(ConfigurationError, match="cannot listen"):
                await second.ended()
        assert not core.task.done()


async def test_a_resumed_request_goes_on_with_the_next_token(start_core: StartCore) -> None:
    tokens = expected([9, 8], 20)
    async with start_core() as core, FakeWorker(core.link), Client(core.settings.listen) as client:
        await client.submit(1, [9, 8], resumed=tokens[:5], attempt=1, max_tokens=20)
        await client.finished(1)
        assert client.choices[1].tokens == tokens[5:]
