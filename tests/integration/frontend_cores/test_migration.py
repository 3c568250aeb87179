"""Choices that lose their core and go on elsewhere."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_frontend.cores.interface import Finished, FinishReason, Start, Tokens
from tercet_frontend.cores.journey import Loss
from tercet_frontend.cores.stream import CoreState
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.errors import (
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from tercet_shared.pooling import Pooling
from tercet_shared.structured import Grammar, GrammarKind
from tests.fakes.core import LENGTH, STOP, TIMEOUT, FakeCore, FakeRequest, scored
from tests.integration.frontend_cores.support import collect, open_cores, request, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tercet_frontend.cores import StaticCores
    from tercet_frontend.cores.generation import StreamGeneration

ENDED = Finished(FinishReason.STOP, None, 0)


@asynccontextmanager
async def fleet(
    count: int, *, heartbeat: float = 0.5, **options: Any
) -> AsyncIterator[tuple[list[FakeCore], StaticCores]]:
    """Cores that are all connected; ``heartbeat``: seconds between theirs."""
    async with AsyncExitStack() as stack:
        fakes = [
            await stack.enter_async_context(FakeCore(core_id=f"core-{n}", heartbeat=heartbeat)) for n in range(count)
        ]
        cores = await stack.enter_async_context(open_cores(*[fake.address for fake in fakes], **options))
        await until(cores, lambda: all(stream.info for stream in cores.streams))
        yield fakes, cores


async def arrival(fakes: Sequence[FakeCore]) -> tuple[FakeCore, FakeRequest]:
    """Returns the next request, and which core has it."""
    waiting = {asyncio.create_task(fake.next_request()): fake for fake in fakes}
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        (task,) = done
        return waiting[task], task.result()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def others(fakes: Sequence[FakeCore], but: FakeCore) -> list[FakeCore]:
    return [fake for fake in fakes if fake is not but]


async def taken(generation: StreamGeneration, count: int) -> list[int]:
    """Takes ``count`` tokens."""
    ids: list[int] = []
    async with asyncio.timeout(TIMEOUT):
        while len(ids) < count:
            ids += (await generation.next()).ids
    return ids


async def test_a_core_killed_in_the_middle_twice() -> None:
    async with fleet(3) as (fakes, cores):
        asked = request(4, 5, max_tokens=9, seed=7, temperature=0.5)
        generation = cores.submit(asked)
        first, received = await arrival(fakes)
        received.send(10, 11)
        assert await taken(generation, 2) == [10, 11]
        await first.kill()
        second, again = await arrival(others(fakes, first))
        assert (again.submit.attempt, again.prompt_ids, again.resumed_ids) == (1, [4, 5], [10, 11])
        assert again.submit.sampling == received.submit.sampling  # limits count from the original prompt
        again.send(12)
        assert await taken(generation, 1) == [12]
        await second.kill()
        _, last = await arrival([fake for fake in fakes if fake not in {first, second}])
        assert (last.submit.attempt, last.resumed_ids) == (2, [10, 11, 12])
        last.send(13, finish=LENGTH)
        assert await generation.next() == Tokens([13], Finished(FinishReason.LENGTH, None, 0))
        counters = cores.migrations
        assert (counters.losses[Loss.BROKEN], counters.moved, counters.resumed_tokens) == (2, 2, 5)
        assert (counters.failed, cores.migrating) == (0, 0)
        assert [stream.active for stream in cores.streams] == [0, 0, 0]


async def test_tokens_that_nobody_has_taken_go_along() -> None:
    async with fleet(2) as (fakes, cores):
        generation = cores.submit(request(1))
        first, received = await arrival(fakes)
        received.send(5, 6)
        first.drain()  # behind the tokens, so that they are there when this is seen
        await until(cores, lambda: any(stream.not_ready_reason() for stream in cores.streams))
        await first.kill()
        _, again = await arrival(others(fakes, first))
        assert again.resumed_ids == [5, 6]
        again.send(7, finish=STOP)
        assert await collect(generation) == ([5, 6, 7], ENDED)


async def test_before_the_first_token() -> None:
    async with fleet(2) as (fakes, cores):
        generation = cores.submit(request(1, 2))
        first, _ = await arrival(fakes)
        await first.kill()
        _, again = await arrival(others(fakes, first))
        assert (again.submit.attempt, again.resumed_ids) == (1, [])
        again.send(5, starts=1, finish=STOP, cached=1)
        tokens = await generation.next()
        assert (tokens.ids, tokens.start) == ([5], Start(1, None))


@pytest.mark.parametrize(
    ("params", "last", "finished"),
    [
        ({"max_tokens": 2}, 6, Finished(FinishReason.LENGTH, None, 0)),
        ({"eos_token_ids": (6,)}, 6, Finished(FinishReason.STOP, 6, 0)),
        ({"stop_token_ids": (6,), "max_tokens": 2}, 6, Finished(FinishReason.STOP, 6, 0)),  # as the core has it
    ],
)
async def test_between_the_last_token_and_its_end(params: dict[str, Any], last: int, finished: Finished) -> None:
    async with fleet(2) as (fakes, cores):
        generation = cores.submit(request(**params))
        first, received = await arrival(fakes)
        received.send(5, last, starts=0)
        assert await taken(generation, 2) == [5, last]
        await first.kill()
        assert await generation.next() == Tokens([], finished)
        assert (cores.migrations.completed, cores.migrations.moved) == (1, 0)
        assert len(fakes[0].requests + fakes[1].requests) == 1


async def test_log_probabilities_and_what_was_cached_stay_right() -> None:
    async with fleet(3) as (fakes, cores):
        generation = cores.submit(request(1, 2, 3, 4, 5, logprobs=2, prompt_logprobs=1))
        first, received = await arrival(fakes)
        partial = received.prompt_scores(1, 2)  # not all of them, and computed in another order
        partial.logprobs.token_logprobs = np.array([-8.0, -9.0], "<f4").tobytes()
        received.connection.send(pb.EngineFrame(prompt_logprobs=[partial]))
        received.connection.end(grpc.StatusCode.UNAVAILABLE)
        second, received = await arrival(others(fakes, first))
        received.send_prompt_scores(1, 4)
        received.send(5, 6, starts=2, scores=[scored(0, 5, 2), scored(1, 6, 2)])
        start = await generation.next()
        received.connection.end(grpc.StatusCode.UNAVAILABLE)
        _, received = await arrival(others(fakes, second))
        assert received.resumed_ids == [5, 6]
        received.send_prompt_scores(1, 4)  # again, as it was asked to
        received.send(7, starts=5, scores=[scored(2, 7, 2)], finish=STOP, cached=5)
        end = await generation.next()
        assert start.start is not None
        assert start.start.cached_tokens == 2
        assert [each.logprob for each in start.start.prompt_logprobs or ()] == [
            scored(position, position + 1, 1)[0] for position in range(1, 5)
        ]
        assert (end.ids, end.start, end.finished) == ([7], None, Finished(FinishReason.STOP, None, 2))
        expected = [scored(position, token, 2) for position, token in enumerate([5, 6, 7])]
        assert [each.logprob for each in generation.logprobs or ()] == [logprob for logprob, _, _ in expected]
        assert len(end.logprobs or ()) == 1


async def test_a_grammar_goes_along_and_a_vector_comes() -> None:
    async with fleet(2) as (fakes, cores):
        grammar = Grammar(GrammarKind.REGEX, "a+", "guided_regex")
        text = cores.submit(replace(request(1), grammar=grammar, tenant="t", cache_salt="s", priority=-2))
        first, received = await arrival(fakes)
        received.send(5)
        await taken(text, 1)
        await first.kill()
        second, again = await arrival(others(fakes, first))
        same = ("grammar", "tenant", "cache_salt", "priority", "traceparent", "request_id")
        assert [getattr(again.submit, name) for name in same] == [getattr(received.submit, name) for name in same]
        vector = cores.submit(replace(request(2), pooling=Pooling.LAST))
        await second.next_request()
        await first.start()
        await cores.wait_until_ready()
        await second.kill()
        requests = {received.prompt_ids[0]: received for received in await first.next_requests(2)}
        assert requests[2].submit.pooling == pb.POOLING_LAST
        requests[2].send(finish=STOP, pooled=[1.0, 2.0])
        pooled = (await vector.next()).pooled
        assert pooled is not None
        assert pooled.tolist() == [1.0, 2.0]
        text.abort("over")


async def test_siblings_move_each_for_itself() -> None:
    async with fleet(2) as (fakes, cores):
        fakes[1].drain()
        await until(cores, cores.streams[1].not_ready_reason)
        siblings = [cores.submit(request(1, request_id="one", seed=n)) for n in range(3)]
        received = await fakes[0].next_requests(3)
        fakes[0].step([received[0].row(1), received[1].row(2, 3, finish=STOP)])
        assert [(await siblings[n].next()).ids for n in range(2)] == [[1], [2, 3]]
        await fakes[1].kill()
        await fakes[1].start()
        await until(cores, lambda: not cores.streams[1].not_ready_reason())
        await fakes[0].kill()
        again = {each.submit.sampling.seed: each for each in await fakes[1].next_requests(2)}
        assert {seed: each.resumed_ids for seed, each in again.items()} == {0: [1], 2: []}
        fakes[1].step([each.row(9, finish=STOP) for each in again.values()])
        assert [await collect(siblings[n]) for n in (0, 2)] == [([9], ENDED), ([9], ENDED)]


@pytest.mark.parametrize("how", ["reject", "end", "reject a running one as overloaded"])
async def test_a_core_that_cannot_go_on_says_so(how: str) -> None:
    async with fleet(2, max_attempts=2) as (fakes, cores):
        generation = cores.submit(request(1))
        first, received = await arrival(fakes)
        if how != "reject":
            received.send(5)
        if how == "reject":
            received.reject(pb.ERROR_KIND_UNAVAILABLE, "This core takes no new requests.")
        elif how == "end":
            received.fail(pb.ERROR_KIND_UNAVAILABLE, "The grace is over.", ids=[6])
        else:
            received.fail(pb.ERROR_KIND_UNAVAILABLE, "The grace is over.", ids=[6])
            first, received = await arrival(others(fakes, first))
            received.reject(pb.ERROR_KIND_OVERLOADED, "Full.")
        _, again = await arrival(others(fakes, first))  # though it is ready, it is not asked again
        assert again.resumed_ids == ([] if how == "reject" else [5, 6])
        again.send(7, finish=STOP)
        assert (await collect(generation))[0] == [*again.resumed_ids, 7]
        assert cores.migrations.poisoned == 0


@pytest.mark.parametrize("left", [False, True])
async def test_a_core_without_a_worker_is_left_where_another_has_the_model(left: bool) -> None:
    async with fleet(2, max_attempts=2) as (fakes, cores):
        generation = cores.submit(request(1))
        first, received = await arrival(fakes)
        (second,) = others(fakes, first)
        received.send(5)
        first.stats(without_worker_s=1.0)  # it may well have another one in a moment
        received.send(6)
        assert await taken(generation, 2) == [5, 6]
        assert cores.migrating == 0
        first.stats(without_worker_s=3.5, worker_left=left)
        again = await second.next_request()
        assert again.resumed_ids == [5, 6]
        await first.wait_for(lambda: received.aborted)
        received.send(99)  # too late
        again.send(7, finish=STOP)
        assert await collect(generation) == ([7], ENDED)
        assert cores.migrations.losses == {Loss.RENEWED if left else Loss.STALLED: 1}
        assert generation.journey is not None
        assert generation.journey.losses == (not left)  # a worker that says goodbye was not killed by what it ran
        new = cores.submit(request(2))
        await second.next_request()
        # With a worker again, it is as good as before.
        first.stats()
        await until_reported(cores, first, 0.0)
        await second.kill()
        await first.next_request()
        new.abort("done")


async def test_without_another_one_the_worker_is_waited_for() -> None:
    async with fleet(2) as (fakes, cores):
        generation = cores.submit(request(1))
        first, received = await arrival(fakes)
        (second,) = others(fakes, first)
        for fake in (second, first):  # neither has a worker
            fake.stats(without_worker_s=100.0)
            await until_reported(cores, fake, 100.0)
        later = cores.submit(request(2))
        _, other = await arrival(fakes)
        assert (cores.migrating, received.aborted) == (0, False)
        for each in (received, other):
            each.send(5, finish=STOP)
        assert (await collect(generation), await collect(later)) == (([5], ENDED), ([5], ENDED))


async def until_reported(cores: StaticCores, fake: FakeCore, seconds: float) -> None:
    """Returns when a core's word of its worker has come."""
    (stream,) = [stream for stream in cores.streams if stream.address == fake.address]
    async with asyncio.timeout(TIMEOUT):
        while stream.stats.without_worker_s != seconds:
            assert stream.state is CoreState.READY
            await asyncio.sleep(0)


async def test_a_core_that_is_too_small_for_what_was_begun_is_passed_over() -> None:
    async with fleet(3) as (fakes, cores):
        generation = cores.submit(request(4, 5, max_tokens=100))
        first, received = await arrival(fakes)
        received.send(6)
        assert await taken(generation, 1) == [6]
        small, large = others(fakes, first)
        small.welcome.max_model_len = 101
        large.welcome.max_model_len = 102
        for fake in (small, large):
            await fake.kill()
            await fake.start()
        lengths = {small.address: 101, large.address: 102, first.address: 2048}
        await until(
            cores,
            lambda: all(
                stream.info and not stream.not_ready_reason() and stream.info.max_model_len == lengths[stream.address]
                for stream in cores.streams
            ),
        )
        for _ in range(8):
            received.reject(pb.ERROR_KIND_UNAVAILABLE, "This core waits for its worker.")
            core, received = await arrival([first, large, small])
            assert core is not small
            assert received.resumed_ids == [6]
        received.send(7, finish=STOP)
        assert await collect(generation) == ([7], ENDED)


async def test_the_only_core_is_asked_though_it_may_be_too_small() -> None:
    async with fleet(1) as ((core,), cores):
        generation = cores.submit(request(4, 5, max_tokens=100))
        (await core.next_request()).send(6)
        assert await taken(generation, 1) == [6]
        await core.kill()
        core.welcome.max_model_len = 50
        await core.start()
        (await core.next_request()).reject(pb.ERROR_KIND_CONTEXT_LENGTH, "Too long.", "max_tokens")
        with pytest.raises(ContextLengthError):
            await generation.next()


async def test_the_same_core_when_there_is_no_other() -> None:
    async with fleet(1) as ((core,), cores):
        generation = cores.submit(request(1))
        for attempt in range(5):
            received = await core.next_request()
            assert received.submit.attempt == attempt
            received.reject(pb.ERROR_KIND_UNAVAILABLE, "Not yet.")
        (await core.next_request()).send(5, finish=STOP)
        assert await collect(generation) == ([5], ENDED)


async def test_a_core_that_drains_hands_over() -> None:
    async with fleet(2, max_attempts=1) as (fakes, cores):
        generation = cores.submit(request(1))
        first, received = await arrival(fakes)
        first.drain("SIGTERM")
        received.send(5)
        assert await taken(generation, 1) == [5]
        received.connection.end(grpc.StatusCode.OK)  # the grace is over
        _, again = await arrival(others(fakes, first))
        assert again.resumed_ids == [5]
        again.send(6, finish=STOP)
        assert await collect(generation) == ([6], ENDED)
        assert (cores.migrations.losses[Loss.DRAINED], cores.migrations.poisoned) == (1, 0)


async def test_a_partition_that_heals_answers_once() -> None:
    async with fleet(2, heartbeat=0.05, heartbeat_interval=0.1, heartbeat_timeout=0.6) as (fakes, cores):
        generation = cores.submit(request(1))
        first, received = await arrival(fakes)
        received.send(5)
        assert await taken(generation, 1) == [5]
        first.go_silent()
        received.send(66, 67)  # on its way when the network was cut
        second, again = await arrival(others(fakes, first))
        assert (again.submit.attempt, again.resumed_ids) == (1, [5])
        first.speak()
        received.send(68, finish=STOP)
        await until(cores, lambda: all(not stream.not_ready_reason() for stream in cores.streams))
        again.send(6)
        stale = again.row(99)
        stale.attempt = 0
        second.step([stale, again.row(7, finish=STOP)])
        assert await collect(generation) == ([6, 7], ENDED)
        assert cores.migrations.losses[Loss.SILENT] == 1


@pytest.mark.parametrize("limit", [1, 3])
async def test_a_request_that_kills_cores_is_not_carried_for_ever(limit: int) -> None:
    async with fleet(1, max_attempts=limit) as ((core,), cores):
        poison = cores.submit(request(1))
        for attempt in range(limit):
            received = await core.next_request()
            assert received.submit.attempt == attempt
            received.send(attempt)
            assert await taken(poison, 1) == [attempt]
            await core.kill()
            await core.start()
        with pytest.raises(InternalError, match="lost while running this request"):
            await poison.next()
        with pytest.raises(RuntimeError):  # one terminal event
            await poison.next()
        assert (cores.migrations.poisoned, cores.migrations.failed) == (1, 1)
        await cores.wait_until_ready()
        innocent = cores.submit(request(2))
        (await core.next_request()).send(5, finish=STOP)
        assert await collect(innocent) == ([5], ENDED)


async def test_a_request_that_kills_workers_is_not_carried_for_ever() -> None:
    async with fleet(3, max_attempts=2) as (fakes, cores):
        poison = cores.submit(request(1))
        first, received = await arrival(fakes)
        received.fail(pb.ERROR_KIND_UNAVAILABLE, "The worker behind this core is gone.")
        _, again = await arrival(others(fakes, first))
        again.fail(pb.ERROR_KIND_UNAVAILABLE, "The worker behind this core is gone.")
        with pytest.raises(InternalError, match="lost while running this request"):
            async with asyncio.timeout(TIMEOUT):
                await poison.next()
        assert (cores.migrations.poisoned, cores.migrations.losses) == (1, {Loss.ENDED: 2})


async def test_what_a_core_gives_up_at_its_end_is_not_to_blame() -> None:
    async with fleet(2, max_attempts=1) as (fakes, cores):
        generation = cores.submit(request(1))
        first, received = await arrival(fakes)
        first.drain("SIGTERM")
        received.fail(pb.ERROR_KIND_UNAVAILABLE, "The grace is over.", ids=[5])
        _, again = await arrival(others(fakes, first))
        again.send(6, finish=STOP)
        assert await collect(generation) == ([5, 6], ENDED)
        assert cores.migrations.losses == {Loss.DRAINED: 1}


async def test_what_was_never_written_is_not_to_blame() -> None:
    async with fleet(1, max_attempts=1) as ((core,), cores):
        written = cores.submit(request(1))
        await core.next_request()
        unwritten = cores.submit(request(2))
        cores.streams[0]._leave(CoreState.CONNECTING, "lost in the same turn of the loop", Loss.BROKEN)
        core.connections[0].end(grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(InternalError):
            await written.next()
        received = await core.next_request()
        assert received.prompt_ids == [2]
        received.send(5, finish=STOP)
        assert await collect(unwritten) == ([5], ENDED)
        losses = cores.migrations.losses
        assert (losses[Loss.BROKEN], losses[Loss.UNSENT]) == (1, 1)


async def test_no_core_is_left_and_then_one_comes() -> None:
    async with fleet(1) as ((core,), cores):
        generation = cores.submit(request(1))
        (await core.next_request()).send(5)
        assert await taken(generation, 1) == [5]
        await core.kill()
        await until(cores, lambda: cores.not_ready_reason() is not None)
        with pytest.raises(UnavailableError):  # who is new does not wait
            cores.submit(request(2))
        await core.start()
        again = await core.next_request()
        assert again.resumed_ids == [5]
        again.send(6, finish=STOP)
        assert await collect(generation) == ([6], ENDED)


async def test_no_core_comes() -> None:
    async with fleet(1, migration_timeout=0.2) as ((core,), cores):
        generation = cores.submit(request(1))
        (await core.next_request()).send(5)
        assert await taken(generation, 1) == [5]
        await core.kill()
        async with asyncio.timeout(TIMEOUT):
            with pytest.raises(UnavailableError, match="no other is ready"):
                await generation.next()
        assert (cores.migrations.failed, cores.migrating) == (1, 0)


async def test_a_core_that_refuses_for_ever() -> None:
    async with (
        FakeCore(unsound=lambda _: "") as core,
        open_cores(core.address, migration_timeout=0.3, backoff_first=0.05) as cores,
    ):
        await cores.wait_until_ready()
        generation = cores.submit(request(1))
        ending = asyncio.create_task(generation.next())
        while not ending.done():
            arriving = asyncio.create_task(core.next_request())
            await asyncio.wait({ending, arriving}, return_when=asyncio.FIRST_COMPLETED)
            if arriving.done():
                arriving.result().reject(pb.ERROR_KIND_UNAVAILABLE, "No worker.")
            else:
                arriving.cancel()
        with pytest.raises(UnavailableError, match="No worker"):
            await ending
        assert len(core.requests) <= 20


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("how", ["abort", "finish"])
async def test_given_up_between_two_cores(how: str, connected: bool) -> None:
    async with fleet(2, backoff_first=0.2 if connected else 0.01) as (fakes, cores):
        generation = cores.submit(request(1))
        first, received = await arrival(fakes)
        (rest,) = others(fakes, first)
        received.send(5)
        assert await taken(generation, 1) == [5]
        if not connected:
            await rest.kill()
            await until(cores, lambda: any(stream.not_ready_reason() for stream in cores.streams))
        killing = asyncio.create_task(first.kill())
        await until(cores, lambda: cores.migrating)  # seen before its turn comes
        generation.abort("the client is gone") if how == "abort" else generation.finish(1)
        assert cores.migrating == 0
        await killing
        if not connected:
            await rest.start()
            await until(cores, lambda: cores.not_ready_reason() is None)
        marker = cores.submit(request(2))
        (await rest.next_request()).send(6, finish=STOP)
        assert await collect(marker) == ([6], ENDED)
        assert [each.prompt_ids for each in rest.requests] == [[2]]  # nothing of the other one
        with pytest.raises(RuntimeError):
            await generation.next()


async def test_the_queue_deadline_counts_from_the_first_submission() -> None:
    async with fleet(2) as (fakes, cores):
        waiting = cores.submit(replace(request(1), queue_timeout=60.0))
        first, received = await arrival(fakes)
        await first.kill()
        _, again = await arrival(others(fakes, first))
        assert 0 < again.submit.queue_deadline_s < received.submit.queue_deadline_s == 60.0
        again.send(5)
        assert await taken(waiting, 1) == [5]
        await first.start()
        await until(cores, lambda: all(not stream.not_ready_reason() for stream in cores.streams))
        again.connection.end(grpc.StatusCode.UNAVAILABLE)
        assert (await first.next_request()).submit.queue_deadline_s == 0  # it has begun


async def test_the_queue_deadline_passes_between_two_cores() -> None:
    async with fleet(1) as ((core,), cores):
        generation = cores.submit(replace(request(1), queue_timeout=0.5))
        await core.next_request()
        await core.kill()
        async with asyncio.timeout(TIMEOUT):
            with pytest.raises(OverloadedError, match="first step"):
                await generation.next()


async def test_a_request_that_the_next_core_cannot_take_fails_alone() -> None:
    async with FakeCore() as wide, FakeCore(max_submit_bytes=2_000) as narrow:
        narrow.greets = False
        async with open_cores(wide.address, narrow.address) as cores:
            await cores.wait_until_ready()
            large, small = cores.submit(request(*range(600))), cores.submit(request(1))
            received = await wide.next_requests(2)
            (await narrow.connected()).send(pb.EngineFrame(welcome=narrow.welcome))
            await until(cores, lambda: all(stream.info for stream in cores.streams))
            received[0].connection.end(grpc.StatusCode.UNAVAILABLE)
            wide.greets = False
            with pytest.raises(InvalidRequestError, match="2000"):
                await large.next()
            (await narrow.next_request()).send(5, finish=STOP)
            assert await collect(small) == ([5], ENDED)


async def test_a_choice_does_not_change_its_weights_in_the_middle() -> None:
    async with (
        FakeCore(core_id="a") as old,
        FakeCore(core_id="b", model_fingerprint="other weights") as new,
        open_cores(old.address, new.address) as cores,
    ):
        await until(cores, lambda: all(stream.info for stream in cores.streams))
        new.drain()
        await until(cores, cores.streams[1].not_ready_reason)
        begun, unbegun = cores.submit(request(1)), cores.submit(request(2))
        received = {each.prompt_ids[0]: each for each in await old.next_requests(2)}
        received[1].send(5)
        assert await taken(begun, 1) == [5]
        await new.kill()
        await new.start()
        await until(cores, lambda: not cores.streams[1].not_ready_reason())
        await old.kill()
        assert (await new.next_request()).prompt_ids == [2]  # which has no tokens yet
        await old.start()
        assert (await old.next_request()).resumed_ids == [5]
        unbegun.abort("over")


async def test_those_of_a_dead_core_spread_over_the_others() -> None:
    async with fleet(3, backoff_first=0.4) as (fakes, cores):
        for fake in fakes[1:]:
            fake.drain()
        await until(cores, lambda: all(stream.not_ready_reason() for stream in cores.streams[1:]))
        generations = [cores.submit(request(n)) for n in range(200)]
        await fakes[0].next_requests(200)
        for fake in fakes[1:]:
            await fake.kill()
            await fake.start()
        await until(cores, lambda: all(not stream.not_ready_reason() for stream in cores.streams))
        killing = asyncio.create_task(fakes[0].kill())
        await until(cores, lambda: cores.migrating == 200)
        turns = [timer.when() for timer in cores._migrator._pausing.values()]
        assert max(turns) - min(turns) > 0.1  # not all at one moment
        await killing
        for fake in fakes[1:]:
            await fake.next_requests(100)  # each as many as the other: who was placed counts for who comes next
        for generation in generations:
            generation.abort("over")


async def test_a_thousand_choices_move_at_once() -> None:
    async with fleet(2) as (fakes, cores):
        fakes[1].drain()
        await until(cores, cores.streams[1].not_ready_reason)
        generations = [cores.submit(request(n, max_tokens=5)) for n in range(1_000)]
        received = await fakes[0].next_requests(1_000)
        fakes[0].step([each.row(1, 2) for each in received])
        await fakes[1].kill()
        await fakes[1].start()
        await until(cores, lambda: not cores.streams[1].not_ready_reason())
        for generation in generations:
            await taken(generation, 2)
        await fakes[0].kill()
        again = await fakes[1].next_requests(1_000)
        assert {each.prompt_ids[0] for each in again} == set(range(1_000))
        assert all(each.resumed_ids == [1, 2] for each in again)
        fakes[1].step([each.row(3, finish=STOP) for each in again])
        for generation in generations:
            assert await collect(generation) == ([3], ENDED)
        assert cores.migrations.resumed_tokens == 2_000
        assert sum(stream.active for stream in cores.streams) == 0


_MOVES = st.tuples(st.integers(0, 1), st.integers(0, 4), st.sampled_from(["send", "end it", "break the stream"]))
"""Which of two requests, how many tokens, and what happens then."""


@settings(max_examples=20, derandomize=True, database=None, deadline=None)
@given(
    outputs=st.tuples(*[st.lists(st.integers(0, 49_151), min_size=1, max_size=12)] * 2),
    moves=st.lists(_MOVES, max_size=10),
)
def test_any_losses_give_the_undisturbed_tokens(
    outputs: tuple[list[int], ...], moves: list[tuple[int, int, str]]
) -> None:
    asyncio.run(_disturbed(outputs, moves))


async def _disturbed(outputs: tuple[list[int], ...], moves: list[tuple[int, int, str]]) -> None:
    """Tokens in any groups, losses of any kind anywhere: nothing is lost, repeated or reordered."""
    async with FakeCore() as core, open_cores(core.address, max_attempts=100, backoff_first=0.001) as cores:
        await cores.wait_until_ready()
        generations = [cores.submit(request(n, max_tokens=len(output))) for n, output in enumerate(outputs)]
        running = {each.prompt_ids[0]: each for each in await core.next_requests(2)}
        sent = [0, 0]
        for n, count, act in [*moves, (0, 12, "send"), (1, 12, "send")]:
            if n not in running:
                continue
            ids = outputs[n][sent[n] : sent[n] + count]
            sent[n] += len(ids)
            done = sent[n] == len(outputs[n])
            request_now = running.pop(n) if done else running[n]
            lost: set[int] = set()
            if act == "send":
                request_now.send(*ids, finish=LENGTH if done else None)
            elif act == "end it":
                request_now.fail(pb.ERROR_KIND_UNAVAILABLE, "moved", ids=ids)
                lost = {n} & running.keys()
            else:
                request_now.send(*ids)
                request_now.connection.end(grpc.StatusCode.UNAVAILABLE)
                lost = set(running)
            for again in await core.next_requests(len(lost)):
                which = again.prompt_ids[0]
                lost.remove(which)
                running[which] = again
                assert again.resumed_ids == outputs[which][: sent[which]]
        assert [(await collect(generation))[0] for generation in generations] == list(outputs)
        assert cores.migrations.failed == 0
