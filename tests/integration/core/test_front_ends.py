"""Front ends that do not read, or come twice, slow nobody and lose nothing of the others."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

import grpc
import numpy as np
import pytest

from tercet_core.streams import connection
from tercet_core.streams.outbox import Outbox
from tercet_proto.v1 import engine_pb2 as pb
from tests.fakes.stream_client import TIMEOUT, Client
from tests.fakes.worker import FakeWorker, expected
from tests.integration.core.conftest import StartCore, until


async def test_a_front_end_that_stops_reading_is_cut_off(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "Outbox", functools.partial(Outbox, max_rows=2_000))
    async with start_core() as core, FakeWorker(core.link), Client(core.settings.listen, "reads") as reads:
        call = reads.stub.Connect()
        await call.write(pb.ClientFrame(hello=pb.Hello(frontend_id="stuck", protocol=1)))
        sampling = pb.Sampling(top_p=1, max_tokens=1000)
        for first in range(0, 400, 40):
            submits = [
                pb.Submit(handle=handle, prompt_ids=np.array([handle + 3], "<i4").tobytes(), sampling=sampling)
                for handle in range(first, first + 40)
            ]
            await call.write(pb.ClientFrame(submits=submits))
        for handle in range(20):
            await reads.submit(handle, [handle + 5], max_tokens=200)
        enough = asyncio.Event()
        beating = asyncio.create_task(_beat(call, enough))
        await reads.finished(*range(20))
        for handle in range(20):
            assert reads.choices[handle].tokens == expected([handle + 5], 200)
        reply = await until(reads, lambda reply: reply.stats.running + reply.stats.waiting == 0)
        assert reply.stats.free_blocks == reply.stats.num_blocks
        assert "stuck does not read its stream" in caplog.text
        enough.set()
        # Its last heartbeat may have met the end of the stream.
        await asyncio.gather(beating, return_exceptions=True)
        # It wakes up: what was on its way, then the reason; or gRPC's own, where a heartbeat was just being sent.
        with pytest.raises(grpc.aio.AioRpcError, match=r"does not read its stream|Internal error from Core"):
            await asyncio.wait_for(_read_all(call), TIMEOUT)


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
