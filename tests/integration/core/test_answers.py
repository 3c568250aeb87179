"""What answers carry besides tokens, over gRPC and the ring: log-probabilities, starts, vectors."""

from __future__ import annotations

import pytest

from tercet_proto.v1 import engine_pb2 as pb
from tests.fakes.stream_client import Client
from tests.fakes.worker import FakeWorker, expected, logprobs_of, vector_of
from tests.integration.core.conftest import StartCore, at_work, info, until

PROMPT = [7, 8, 9, 10, 11] * 40


async def test_every_token_has_its_log_probabilities(start_core: StartCore) -> None:
    async with start_core() as core, at_work(core) as (client, _):
        for handle in range(12):
            asked = {} if handle % 3 == 2 else {"logprobs": handle}
            await client.submit(handle, PROMPT[: 1 + 17 * handle], max_tokens=5 + 3 * handle, **asked)
        await client.finished(*range(12))
        for handle in range(12):
            choice = client.choices[handle]
            assert choice.tokens == expected(PROMPT[: 1 + 17 * handle], 5 + 3 * handle)
            told = [] if handle % 3 == 2 else [logprobs_of(token, handle) for token in choice.tokens]
            assert choice.logprobs == told


async def test_log_probabilities_survive_preemption_and_a_slow_reader(start_core: StartCore) -> None:
    async with start_core() as core, at_work(core, num_blocks=40) as (client, worker):
        worker.hold()
        for handle in range(8):
            await client.submit(handle, PROMPT[: 60 + handle], max_tokens=80, logprobs=3)
        await until(client, lambda reply: reply.stats.running + reply.stats.waiting == 8)
        worker.release()
        await client.finished(*range(8))
        for handle in range(8):
            choice = client.choices[handle]
            assert choice.tokens == expected(PROMPT[: 60 + handle], 80)
            assert choice.logprobs == [logprobs_of(token, 3) for token in choice.tokens]
            assert (choice.started, choice.start_cached >= 0) == (1, True)
        assert (await info(client)).stats.preemptions > 0


@pytest.mark.parametrize("max_num_batched_tokens", [16, 512])
async def test_prompt_log_probabilities_come_before_the_first_token(
    start_core: StartCore, max_num_batched_tokens: int
) -> None:
    async with (
        start_core(max_num_batched_tokens=max_num_batched_tokens) as core,
        at_work(core, max_batched_tokens=512) as (client, _),
    ):
        for handle in range(3):  # the second would find the first one's blocks
            await client.submit(handle, PROMPT, max_tokens=3, prompt_logprobs=2)
            await client.finished(handle)
            choice = client.choices[handle]
            told = {position: logprobs_of(token, 2) for position, token in enumerate(PROMPT) if position}
            assert choice.prompt_logprobs == told
            assert (choice.cached, choice.start_cached, choice.logprobs) == (0, 0, [])
        await client.submit(9, PROMPT, max_tokens=3)
        await client.finished(9)
        assert client.choices[9].cached == 192, "but it has filled the cache"
        assert (client.choices[9].started, client.choices[9].start_cached) == (1, 192)


async def test_the_start_is_told_once_per_attempt(start_core: StartCore) -> None:
    async with start_core() as core, at_work(core) as (client, _):
        tokens = expected(PROMPT, 10)
        await client.submit(1, PROMPT, max_tokens=10)
        await client.submit(2, PROMPT, resumed=tokens[:4], attempt=1, max_tokens=10)
        await client.finished(1, 2)
        assert client.choices[2].tokens == tokens[4:]
        assert [client.choices[handle].started for handle in (1, 2)] == [1, 1]


async def test_prompts_become_vectors_beside_answers(start_core: StartCore) -> None:
    async with start_core() as core, at_work(core) as (client, worker):
        kinds = {handle: (pb.POOLING_NONE, pb.POOLING_LAST, pb.POOLING_MEAN)[handle % 3] for handle in range(30)}
        worker.hold()
        for handle, kind in kinds.items():
            sampling = {"max_tokens": 20} if handle % 3 == 0 else {"temperature": 0.0, "top_p": 0.0, "max_tokens": 0}
            await client.submit(handle, PROMPT[: 1 + 6 * handle], pooling=kind, **sampling)
        await until(client, lambda reply: reply.stats.running + reply.stats.waiting == len(kinds))
        worker.release()
        await client.finished(*kinds)
        for handle, kind in kinds.items():
            choice, prompt = client.choices[handle], PROMPT[: 1 + 6 * handle]
            assert choice.terminal_events == 1
            if kind == pb.POOLING_NONE:
                assert choice.tokens == expected(prompt, 20)
                continue
            assert (choice.tokens, choice.reason, choice.stop_id) == ([], pb.FINISH_REASON_STOP, -1)
            assert choice.pooled == vector_of(prompt, kind)
        reply = await until(client, lambda reply: reply.stats.running == 0)
        assert reply.stats.output_tokens == 200
        assert max(len(plan.slots) for plan in worker.plans) > 3


async def test_a_prompt_as_long_as_the_context_becomes_a_vector_and_one_longer_does_not(start_core: StartCore) -> None:
    async with start_core() as core, at_work(core) as (client, _):
        await client.submit(1, [5] * 1024, pooling=pb.POOLING_MEAN)
        await client.submit(2, [5] * 1025, pooling=pb.POOLING_MEAN)
        await client.submit(3, [5], resumed=[6], pooling=pb.POOLING_LAST)
        await client.finished(1, 2, 3)
        assert client.choices[1].pooled == vector_of([5] * 1024, pb.POOLING_MEAN)
        kinds = []
        for handle in (2, 3):
            rejected = client.choices[handle].rejected
            assert rejected is not None
            kinds.append((rejected.kind, rejected.param))
        assert kinds == [(pb.ERROR_KIND_CONTEXT_LENGTH, "prompt"), (pb.ERROR_KIND_INVALID, "pooling")]


async def test_vectors_survive_preemption_and_the_loss_of_the_worker(start_core: StartCore) -> None:
    async with start_core(max_num_batched_tokens=16) as core, at_work(core) as (client, first):
        first.hold()
        await client.submit(1, PROMPT, pooling=pb.POOLING_MEAN)
        for step in range(5):
            await first.wait_for_steps(step + 1)
            first.release(1)
        await first.connection.close("out of memory")
        async with FakeWorker(core.link):
            await client.finished(1)
            assert client.choices[1].pooled == vector_of(PROMPT, pb.POOLING_MEAN)


async def test_large_answers_are_split_and_arrive_whole(start_core: StartCore) -> None:
    offer = {"max_model_len": 40_000, "num_blocks": 6_000, "max_batched_tokens": 20_000}
    async with start_core() as core, FakeWorker(core.link, **offer), Client(core.settings.listen) as client:
        prompt = PROMPT * 100
        await client.submit(1, prompt, max_tokens=2, prompt_logprobs=20)
        await client.finished(1)
        found = client.choices[1].prompt_logprobs
        assert found == {position: logprobs_of(token, 20) for position, token in enumerate(prompt) if position}
