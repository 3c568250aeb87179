"""Front ends that do not read, or come twice, slow nobody and lose nothing of the others."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from tercet_core.streams import connection
from tercet_core.streams.outbox import Outbox
from tercet_proto.v1 import engine_pb2 as pb
from tercet_proto.v1 import engine_pb2_grpc
from tests.fakes.stream_client import TIMEOUT, Client
from tests.fakes.worker import FakeWorker, expected
from tests.integration.core.conftest import StartCore, at_work, until

SAMPLING = pb.Sampling(top_p=1, max_tokens=1000)


@asynccontextmanager
async def stuck(address: str, requests: int) -> AsyncIterator[Any]:
    """The call of a front end that shows life but does not read, and has submitted so many requests."""
    # Without the probe gRPC's window stays small, and what is not read piles up in the core.
    async with grpc.aio.insecure_channel(address, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        call: Any = engine_pb2_grpc.EngineStub(channel).Connect()  # type: ignore[no-untyped-call]
        await call.write(pb.ClientFrame(hello=pb.Hello(frontend_id="stuck", protocol=1)))
        for first in range(0, requests, 40):
            submits = [
                pb.Submit(handle=handle, prompt_ids=np.array([handle + 3], "<i4").tobytes(), sampling=SAMPLING)
                for handle in range(first, first + 40)
            ]
            await call.write(pb.ClientFrame(submits=submits))
        enough = asyncio.Event()
        beating = asyncio.create_task(_beat(call, enough))
        try:
            yield call
        finally:
            enough.set()
            # Its last heartbeat may have met the end of the stream.
            await asyncio.gather(beating, return_exceptions=True)


async def test_a_front_end_that_stops_reading_is_cut_off(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # More than the one that reads is told in all, so that it has room however late it is.
    monkeypatch.setattr(connection, "Outbox", functools.partial(Outbox, max_rows=10_000))
    async with start_core() as core, FakeWorker(core.link), Client(core.settings.listen, "reads") as reads:
        async with stuck(core.settings.listen, 400) as call:
            for handle in range(20):
                await reads.submit(handle, [handle + 5], max_tokens=200)
            await reads.finished(*range(20))
            for handle in range(20):
                assert reads.choices[handle].tokens == expected([handle + 5], 200)
            reply = await until(reads, lambda reply: reply.stats.running + reply.stats.waiting == 0)
            assert reply.stats.free_blocks == reply.stats.num_blocks
            assert "stuck does not read its stream" in caplog.text
            # It wakes up: what was on its way, then the reason; or gRPC's own, where a heartbeat was just being sent.
            with pytest.raises(grpc.aio.AioRpcError, match=r"does not read its stream|Internal error from Core"):
                await asyncio.wait_for(_read_all(call), TIMEOUT)


async def test_a_front_end_that_was_cut_off_may_leave_before_it_has_heard_of_it(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "Outbox", functools.partial(Outbox, max_rows=1_000))
    caplog.set_level(logging.INFO)
    async with start_core() as core, FakeWorker(core.link):
        async with stuck(core.settings.listen, 200) as call:
            await eventually(lambda: "stuck does not read its stream" in caplog.text)
            call.cancel()
            await eventually(lambda: "front end stuck left" in caplog.text)
    assert "Traceback" not in caplog.text


async def test_a_core_that_did_not_run_does_not_blame_its_front_ends_for_that_time(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    clock = loop.time
    async with start_core() as core, at_work(core) as (client, _):
        await client.submit(1, [9], max_tokens=3)
        await client.finished(1)
        monkeypatch.setattr(loop, "time", lambda: clock() + 30.0)  # as if this process had been stopped for so long
        await client.submit(2, [8], max_tokens=3)
        await client.finished(2)
        assert client.choices[2].tokens == expected([8], 3)


async def eventually(condition: Callable[[], bool]) -> None:
    """Waits for what the core writes to its log."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def _read_all(call: Any) -> None:
    while isinstance(await call.read(), pb.EngineFrame):
        pass


async def _beat(call: Any, enough: asyncio.Event) -> None:
    """Ends by itself: cancelling a task that writes would cancel the call."""
    while not enough.is_set():
        await call.write(pb.ClientFrame())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(enough.wait(), 0.3)


async def test_a_front_end_that_reconnects_while_its_old_stream_is_open(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.link) as worker:
        worker.hold()
        async with Client(core.settings.listen, "same") as old:
            await old.submit(1, [9] * 20, max_tokens=300)
            await worker.wait_for_steps(2)
            async with Client(core.settings.listen, "same") as new:
                await new.submit(1, [8] * 20, max_tokens=30, attempt=1)
                worker.release()
                await new.finished(1)
                await old.finished(1)
                assert new.choices[1].tokens == expected([8] * 20, 30)
                assert old.choices[1].tokens == expected([9] * 20, 300), "streams do not share handles"
                worker.hold()
                await old.submit(2, [7], max_tokens=300)
                await new.submit(2, [6], max_tokens=40)
                await until(new, lambda reply: reply.stats.running + reply.stats.waiting == 2)
                await old.__aexit__(None, None, None)
                await until(new, lambda reply: reply.stats.running + reply.stats.waiting == 1)
                worker.release()
                await new.finished(2)
                assert new.choices[2].tokens == expected([6], 40)
