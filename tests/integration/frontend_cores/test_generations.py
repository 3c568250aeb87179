"""Tokens, ends and errors of choices on a stream that works."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tercet_frontend.cores.interface import Finished, FinishReason, Tokens
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.errors import (
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    TercetError,
)
from tests.fakes.core import ABORT, LENGTH, STOP, FakeCore, step_frame
from tests.integration.frontend_cores.support import collect, open_cores, request

if TYPE_CHECKING:
    from tercet_frontend.cores import StaticCores

ENDED = Finished(FinishReason.STOP, None, 0)


async def test_a_submit_carries_the_whole_request(core: FakeCore, cores: StaticCores) -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "seed": 2**64 - 1, "max_tokens": 9,
        "min_tokens": 2, "stop_token_ids": (5, 6), "eos_token_ids": (2,),
    }  # fmt: skip
    cores.submit(request(10, 49_151, request_id="cmpl-1", **sampling))
    received = await core.next_request()
    assert received.prompt_ids == [10, 49_151]
    assert (received.submit.request_id, received.submit.attempt) == ("cmpl-1", 0)
    for name, value in sampling.items():
        got = getattr(received.submit.sampling, name)
        assert (tuple(got) if isinstance(value, tuple) else got) == value


async def test_tokens_then_the_end(core: FakeCore, cores: StaticCores) -> None:
    generation = cores.submit(request())
    received = await core.next_request()
    received.send(5, 6)
    assert await generation.next() == Tokens([5, 6], None)
    received.send(7, finish=STOP, stop_id=7, cached=16)
    assert await generation.next() == Tokens([7], Finished(FinishReason.STOP, 7, 16))
    with pytest.raises(RuntimeError):
        await generation.next()


@pytest.mark.parametrize(
    ("wire", "reason"), [(STOP, FinishReason.STOP), (LENGTH, FinishReason.LENGTH), (ABORT, FinishReason.ABORT)]
)
async def test_an_end_without_a_token(core: FakeCore, cores: StaticCores, wire: int, reason: FinishReason) -> None:
    generation = cores.submit(request())
    (await core.next_request()).send(finish=wire)
    assert await generation.next() == Tokens([], Finished(reason, None, 0))


async def test_two_choices_interleaved(core: FakeCore, cores: StaticCores) -> None:
    first, second = cores.submit(request(1)), cores.submit(request(2))
    a, b = await core.next_requests(2)
    core.step([a.row(1, 2), b.row(101)])
    core.step([b.row(102), a.row(3)])
    core.step([a.row(), b.row(103, finish=STOP)])
    core.step([a.row(4, finish=LENGTH)])
    assert await collect(second) == ([101, 102, 103], ENDED)
    assert await collect(first) == ([1, 2, 3, 4], Finished(FinishReason.LENGTH, None, 0))


async def test_a_row_twice_in_one_frame(core: FakeCore, cores: StaticCores) -> None:
    generation = cores.submit(request())
    received = await core.next_request()
    core.step([received.row(1), received.row(2, finish=STOP)])
    assert await generation.next() == Tokens([1, 2], ENDED)


async def test_cancelling_next_loses_nothing(core: FakeCore, cores: StaticCores) -> None:
    generation = cores.submit(request())
    received = await core.next_request()
    expected = []
    ids = []
    for token in range(50):
        waiting = asyncio.create_task(generation.next())
        await asyncio.sleep(0)
        received.send(token)
        expected.append(token)
        if token % 2:
            waiting.cancel()
        results = await asyncio.gather(waiting, return_exceptions=True)
        if isinstance(results[0], Tokens):
            ids += results[0].ids
    received.send(finish=STOP)
    rest, _ = await collect(generation)
    assert ids + rest == expected


async def test_cancelled_at_the_moment_of_the_wake_up(core: FakeCore, cores: StaticCores) -> None:
    generation = cores.submit(request())
    waiting = asyncio.create_task(generation.next())
    await asyncio.sleep(0)
    generation.received += [1, 2]  # as the stream does, in the same turn of the loop as the cancellation
    generation.wake()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await generation.next() == Tokens([1, 2], None)


async def test_one_reader_at_a_time(cores: StaticCores) -> None:
    generation = cores.submit(request())
    waiting = asyncio.create_task(generation.next())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="awaited already"):
        await generation.next()
    generation.abort("over")
    with pytest.raises(RuntimeError, match="over"):  # it does not hang
        await waiting


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (pb.ERROR_KIND_INVALID, InvalidRequestError),
        (pb.ERROR_KIND_CONTEXT_LENGTH, ContextLengthError),
        (pb.ERROR_KIND_OVERLOADED, OverloadedError),
        (pb.ERROR_KIND_INTERNAL, InternalError),
        (pb.ERROR_KIND_UNSPECIFIED, InternalError),
    ],
)
async def test_kinds_of_errors(core: FakeCore, cores: StaticCores, kind: int, error: type[TercetError]) -> None:
    refused, failed = cores.submit(request(1)), cores.submit(request(2))
    a, b = await core.next_requests(2)
    a.reject(kind, "Not taken.", "max_tokens")
    b.fail(kind, "Broken.", ids=[4])
    with pytest.raises(TercetError, match="Not taken") as caught:
        await refused.next()
    assert (type(caught.value), caught.value.param) == (error, "max_tokens")
    assert await failed.next() == Tokens([4], None)  # what came before the error is not lost
    with pytest.raises(TercetError, match="Broken") as caught:
        await failed.next()
    assert (type(caught.value), caught.value.param) == (error, None)
    with pytest.raises(RuntimeError):
        await failed.next()


async def test_finish_reaches_the_core(core: FakeCore, cores: StaticCores) -> None:
    generation = cores.submit(request())
    received = await core.next_request()
    received.send(1, 2, 3)
    await generation.next()
    generation.finish(2)
    await core.wait_for(lambda: received.finished_at == 2)
    generation.finish(1)
    generation.abort("again")
    other = cores.submit(request())
    (await core.next_request()).send(finish=STOP)
    await collect(other)
    assert (received.finished_at, received.aborted) == (2, False)


async def test_late_rows_of_a_choice_that_is_over_are_ignored(core: FakeCore, cores: StaticCores) -> None:
    given_up, other = cores.submit(request(1)), cores.submit(request(2))
    a, b = await core.next_requests(2)
    given_up.abort("the client is gone")
    await core.wait_for(lambda: a.abort_reason == "the client is gone")
    core.step([a.row(1), b.row(2)])
    core.step([a.row(finish=STOP), b.row(3, finish=STOP)])
    assert await collect(other) == ([2, 3], ENDED)
    assert given_up.received == []


async def test_rows_of_an_older_attempt_are_dropped(core: FakeCore, cores: StaticCores) -> None:
    generation = cores.submit(request())
    received = await core.next_request()
    generation.attempt = 1  # as a resubmission does
    stale, current = received.row(66), received.row(7)
    current.attempt = 1
    late_end, end = received.row(finish=LENGTH), received.row(8, finish=STOP)
    end.attempt = 1
    core.step([stale, current, late_end])
    received.reject(pb.ERROR_KIND_INTERNAL, "stale")
    core.step([end])
    assert await collect(generation) == ([7, 8], ENDED)


async def test_aborts_and_finishes_go_ahead_of_submits(core: FakeCore, cores: StaticCores) -> None:
    old = [cores.submit(request(n)) for n in range(3)]
    await core.next_requests(3)
    connection = core.connections[0]
    before = len(connection.frames)
    cores.submit(request(9))
    old[0].abort("x")
    cores.submit(request(9))
    old[1].finish(0)
    old[2].abort("y")
    await core.next_requests(2)
    await core.wait_for(lambda: all(connection.requests[generation.handle].over for generation in old))
    (frame,) = connection.frames[before:]  # one frame, whose fields are applied in the proto's order
    assert [abort.handle for abort in frame.aborts] == [old[0].handle, old[2].handle]
    assert [finish.handle for finish in frame.finishes] == [old[1].handle]
    assert len(frame.submits) == 2


async def test_a_submit_that_was_not_written_is_taken_back(core: FakeCore, cores: StaticCores) -> None:
    cores.submit(request(1)).abort("at once")
    kept = cores.submit(request(2))
    received = await core.next_request()
    assert received.prompt_ids == [2]
    received.send(finish=STOP)
    await collect(kept)
    assert all(not frame.aborts for frame in core.connections[0].frames)


async def test_an_oversize_submit_fails_alone() -> None:
    async with FakeCore(max_submit_bytes=2_000) as core, open_cores(core.address) as cores:
        await cores.wait_until_ready()
        generation = cores.submit(request(1))
        with pytest.raises(InvalidRequestError, match="2000"):
            cores.submit(request(*range(600)))
        (await core.next_request()).send(5, finish=STOP)
        assert await collect(generation) == ([5], ENDED)


async def test_submits_are_batched_below_the_limit() -> None:
    async with FakeCore(max_submit_bytes=4_000) as core, open_cores(core.address) as cores:
        await cores.wait_until_ready()
        for _ in range(100):
            cores.submit(request(*range(100)))
        for generation in [cores.submit(request(1)) for _ in range(100)]:
            generation.abort("not written yet")
        await core.next_requests(100)
        frames = core.connections[0].frames[1:]
        assert max(frame.ByteSize() for frame in frames) <= 4_000
        assert 10 < len(frames) < 20  # nine to a frame
        assert sorted(core.connections[0].requests) == list(range(1, 101))


async def test_a_large_submit_passes_grpc_s_default_limit() -> None:
    async with FakeCore(max_submit_bytes=32 << 20) as core, open_cores(core.address) as cores:
        await cores.wait_until_ready()
        generation = cores.submit(request(*range(1_500_000)))
        received = await core.next_request()
        assert len(received.prompt_ids) == 1_500_000
        received.send(*range(1_500_000), finish=STOP)
        ids, _ = await collect(generation)
        assert ids == list(range(1_500_000))


async def test_a_thousand_choices(core: FakeCore, cores: StaticCores) -> None:
    rng = np.random.default_rng(0)
    generations = [cores.submit(request(n)) for n in range(1_000)]
    readers = [asyncio.create_task(collect(generation)) for generation in generations]
    received = {r.prompt_ids[0]: r for r in await core.next_requests(1_000)}
    expected: dict[int, list[int]] = {n: [] for n in received}
    for _ in range(30):
        rows = []
        for n in rng.permutation(1_000)[:700].tolist():
            ids = rng.integers(0, 49_152, rng.integers(1, 4)).tolist()
            expected[n] += ids
            rows.append(received[n].row(*ids))
        core.step(rows)
    core.step([r.row(finish=STOP) for r in received.values()])
    results = await asyncio.gather(*readers)
    assert [ids for ids, _ in results] == [expected[n] for n in range(1_000)]
    assert cores.streams[0].active == 0


@pytest.mark.parametrize(
    "damage",
    [
        {"handles": b"1234567"},
        {"attempts": b""},
        {"token_offsets": np.array([0, 5], "<i4").tobytes()},
        {"token_offsets": np.array([1, 2], "<i4").tobytes()},
        {"token_offsets": b""},
        {"finish_rows": np.array([1], "<i4").tobytes()},
        {"finish_rows": np.array([-1], "<i4").tobytes()},
        {"finish_reasons": b""},
        {"start_rows": np.array([1], "<i4").tobytes(), "start_cached": np.array([0], "<i4").tobytes()},
        {"start_rows": np.array([0], "<i4").tobytes()},
        {"pooled_rows": np.array([5], "<i4").tobytes(), "pooled": np.array([1.0], "<f4").tobytes()},
        {"pooled_rows": np.array([0, 0], "<i4").tobytes(), "pooled": np.array([1.0], "<f4").tobytes()},
    ],
)
async def test_a_malformed_frame_ends_the_stream(core: FakeCore, cores: StaticCores, damage: dict[str, bytes]) -> None:
    generation = cores.submit(request())
    received = await core.next_request()
    frame = step_frame([received.row(1, 2, finish=STOP)])
    for name, value in damage.items():
        setattr(frame.step, name, value)
    core.connections[0].send(frame)
    again = await core.next_request()  # on a new stream, and nothing of the frame was used
    assert (again.connection, again.resumed_ids) == (core.connections[1], [])
    again.send(1, finish=STOP)
    assert await collect(generation) == ([1], ENDED)


async def test_the_playing_core(core: FakeCore) -> None:
    async with FakeCore(outputs=lambda r: [*r.prompt_ids, 2, 9]) as player, open_cores(player.address) as cores:
        await cores.wait_until_ready()
        stopped = cores.submit(request(5, 6, eos_token_ids=(2,)))
        limited = cores.submit(request(7, 8, 9, max_tokens=2))
        whole = cores.submit(request(4))
        assert await collect(stopped) == ([5, 6, 2], Finished(FinishReason.STOP, 2, 0))
        assert await collect(limited) == ([7, 8], Finished(FinishReason.LENGTH, None, 0))
        assert await collect(whole) == ([4, 2, 9], ENDED)
