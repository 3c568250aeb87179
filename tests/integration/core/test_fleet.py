"""A core as one of a fleet: it resumes what others began, says what it has cached, registers, and leaves in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tercet_core.membership import advertised
from tercet_core.streams import block_feed
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.config import CoreSettings, parse
from tercet_shared.errors import ConfigurationError
from tercet_shared.hashing import BlockKey, chain, root_key
from tercet_shared.registry.blocks import split_keys
from tercet_shared.registry.client import close_client, redis_client
from tercet_shared.registry.interface import BlockBatch, CoreState
from tercet_shared.registry.redis import RedisFleet
from tests.fakes.block_mirror import Mirror, Mirrors
from tests.fakes.grammars import END
from tests.fakes.ports import free_port
from tests.fakes.redis_server import RedisServer, redis_server
from tests.fakes.stream_client import TIMEOUT, Client
from tests.fakes.worker import FakeWorker, expected, logprobs_of
from tests.integration.core.conftest import StartCore, at_work, until
from tests.integration.core.test_grammars import foretold, grammar_of, guided_core, guided_worker, prompt_of
from tests.integration.core.test_leftovers import core_process, waits_for_its_worker

PROMPT = list(range(20, 60))


# -------------------------------------------------------------------------------------------- what others began


async def test_a_request_is_resumed_as_if_nothing_had_happened(start_core: StartCore) -> None:
    tokens = expected(PROMPT, 20)
    async with start_core() as core, at_work(core) as (client, worker):
        await client.submit(
            1, PROMPT, resumed=tokens[:7], attempt=2, max_tokens=20, min_tokens=12, presence_penalty=0.5, seed=3,
            logprobs=2, stop_token_ids=[1],
        )  # fmt: skip
        await client.finished(1)
        choice = client.choices[1]
        assert choice.tokens == tokens[7:]
        assert (choice.reason, choice.started) == (pb.FINISH_REASON_LENGTH, 1)
        assert choice.logprobs == [logprobs_of(token, 2) for token in tokens[7:]], "of new tokens only"
        new = worker.plans[0].new
        # With the original prompt's length the worker tells prompt from output: for penalties, minimum and noise.
        assert new.prompt_lens.tolist() == [len(PROMPT)]
        assert new.token_ids.tolist() == PROMPT + tokens[:7]


@pytest.mark.parametrize(
    ("resumed", "sampling", "reason", "stop_id"),
    [
        ([7, 8, 9], {"max_tokens": 3}, pb.FINISH_REASON_LENGTH, -1),
        ([7, 8, 9, 10], {"max_tokens": 3}, pb.FINISH_REASON_LENGTH, -1),
        ([7, 8, 9], {"max_tokens": 3, "stop_token_ids": [9]}, pb.FINISH_REASON_STOP, 9),
        ([7, 8, 9], {"max_tokens": 9, "eos_token_ids": [9]}, pb.FINISH_REASON_STOP, 9),
    ],
)
async def test_a_request_that_had_all_its_tokens_only_ends(
    start_core: StartCore, resumed: list[int], sampling: dict[str, Any], reason: int, stop_id: int
) -> None:
    async with start_core() as core, at_work(core) as (client, worker):
        await client.submit(1, PROMPT, resumed=resumed, attempt=1, **sampling)
        await client.submit(2, PROMPT, max_tokens=2)
        await client.finished(1, 2)
        choice = client.choices[1]
        assert (choice.tokens, choice.reason, choice.stop_id) == ([], reason, stop_id)
        assert choice.terminal_events == 1
        assert client.choices[2].tokens == expected(PROMPT, 2)
        await client.submit(1, PROMPT, attempt=0, max_tokens=2)  # its handle is free again
        await client.finished(1)
        assert all(len(plan.new) <= 1 for plan in worker.plans)


async def test_a_guided_request_that_had_its_end_only_ends(start_core: StartCore) -> None:
    tokens = foretold(2)
    assert tokens[-1] == END
    async with guided_core(start_core) as core, at_work(core, guided_worker(core.link)) as (client, _):
        # Its parameters name no end: it follows from the model, and counts more than the limit.
        await client.submit(2, prompt_of(2), resumed=tokens, attempt=1, grammar=grammar_of(2), max_tokens=len(tokens))
        await client.finished(2)
        choice = client.choices[2]
        assert (choice.tokens, choice.reason, choice.stop_id) == ([], pb.FINISH_REASON_STOP, END)


# -------------------------------------------------------------------------------------------- what it has cached


class Listener:
    """A front end that only wants block events."""

    def __init__(self, address: str, *, asks: bool = True) -> None:
        self.mirror = Mirror()
        self.messages: list[pb.BlockEvents] = []
        self.incarnation = ""
        self._asks = asks
        self._address = address

    async def run(self) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            call: Any = channel.stream_stream(
                "/tercet.v1.Engine/Connect",
                request_serializer=pb.ClientFrame.SerializeToString,
                response_deserializer=pb.EngineFrame.FromString,
            )()
            await call.write(
                pb.ClientFrame(hello=pb.Hello(frontend_id="f", protocol=2, oldest_protocol=1, block_events=self._asks))
            )
            beating = asyncio.create_task(self._beat(call))
            try:
                while isinstance(frame := await call.read(), pb.EngineFrame):
                    self._take(frame)
            finally:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)

    async def _beat(self, call: Any) -> None:
        while True:
            await call.write(pb.ClientFrame())
            await asyncio.sleep(0.5)

    def _take(self, frame: pb.EngineFrame) -> None:
        if frame.HasField("welcome"):
            self.incarnation = frame.welcome.incarnation
        if frame.HasField("block_events"):
            events = frame.block_events
            assert self.incarnation, "events before the first Welcome"
            stored = () if events.snapshot else [change == 0 for change in events.changes]
            self.messages.append(events)
            self.mirror.take(
                self.incarnation, BlockBatch(events.first, stored, split_keys(events.keys), snapshot=events.snapshot)
            )


@asynccontextmanager
async def listening(address: str, *, asks: bool = True) -> AsyncIterator[Listener]:
    listener = Listener(address, asks=asks)
    task = asyncio.create_task(listener.run())
    try:
        yield listener
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(TIMEOUT):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


def keys_of(tokens: list[int]) -> set[BlockKey]:
    return set(chain(root_key("fake-model"), np.array(tokens, np.int32), 16))


async def test_front_ends_that_ask_hear_what_is_cached(start_core: StartCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_feed, "MAX_EVENTS", 3)
    one, two = list(range(3, 103)), list(range(200, 290))
    async with start_core() as core, at_work(core, incarnation="first") as (client, worker):
        await client.submit(1, one, max_tokens=1)
        await client.finished(1)
        async with listening(core.settings.listen) as asks, listening(core.settings.listen, asks=False) as other:
            await eventually(lambda: asks.mirror.keys == keys_of(one))
            assert asks.messages[0].snapshot
            assert all(len(message.keys) <= 48 for message in asks.messages)
            await client.submit(2, two, max_tokens=1)
            await eventually(lambda: asks.mirror.keys == keys_of(one) | keys_of(two))
            worker.connection._sock.shutdown(2)
            await until(client, lambda reply: not reply.ready)
            async with FakeWorker(core.link, incarnation="second"):
                await eventually(lambda: asks.mirror.keys == set() and asks.incarnation == "second")
                await client.submit(3, two, max_tokens=1)
                await eventually(lambda: asks.mirror.keys == keys_of(two))
                await client.stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())
                await eventually(lambda: asks.mirror.keys == set())
            assert asks.mirror.voids == 0
            assert other.messages == []


async def test_load_is_told_in_tokens(start_core: StartCore) -> None:
    async with start_core(max_num_seqs=1) as core, at_work(core, max_slots=2) as (client, worker):
        worker.hold()
        await client.submit(1, [9] * 700, max_tokens=2)
        await client.submit(2, [8] * 50, max_tokens=2)
        # 512 of the first prompt are in the first step, and the rest in the second, which is planned at once.
        await until(client, lambda reply: reply.stats.pending_tokens == 50)
        worker.release()
        await client.finished(1, 2)
        reply = await until(client, lambda reply: reply.stats.running + reply.stats.waiting == 0)
        assert reply.stats.pending_tokens == 0
        assert 0 < reply.stats.token_ms < 1e4


# -------------------------------------------------------------------------------------------- where it is registered


@pytest.fixture
async def redis() -> AsyncIterator[RedisServer]:
    async with redis_server() as server:
        yield server


@asynccontextmanager
async def fleet_of(redis: RedisServer) -> AsyncIterator[tuple[RedisFleet, Mirrors]]:
    client, mirrors = redis_client(redis.url, timeout=1.0), Mirrors()
    fleet = RedisFleet(client, sink=mirrors, interval=0.1)
    task = asyncio.create_task(fleet.run())
    try:
        yield fleet, mirrors
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await close_client(client)


async def test_a_core_is_found_by_its_front_ends(
    start_core: StartCore, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet_of(redis) as (fleet, mirrors):
        settings: dict[str, Any] = {
            "redis_url": redis.url, "core_id": "c1", "served_model_name": ["chat", "best"], "heartbeat_timeout": 20.0,
        }  # fmt: skip
        async with start_core(**settings) as core:
            address = core.settings.listen
            async with at_work(core, incarnation="first") as (client, worker):
                assert list(client.welcome.served_names) == ["chat", "best"]
                await client.submit(1, PROMPT, max_tokens=1)
                await client.finished(1)
                await eventually(lambda: "c1" in mirrors.cores and mirrors.cores["c1"].keys == keys_of(PROMPT))
                # The load is of the latest heartbeat.
                await eventually(lambda: (found := fleet.cores()[address]) is not None and not found.load.running)
                record = fleet.cores()[address]
                assert record is not None
                assert (record.core_id, record.served_names, record.block_size) == ("c1", ("chat", "best"), 16)
                assert (record.incarnation, record.model_fingerprint) == ("first", "fake-model")
                assert record.state is CoreState.READY
                assert record.load.free_blocks == 1024
                worker.hold()
                await client.submit(2, PROMPT, max_tokens=9)
                await client.stub.Drain(pb.DrainRequest(reason="maintenance"))
                await eventually(lambda: _state(fleet, address) is CoreState.DRAINING)
                async with grpc.aio.insecure_channel(address) as channel:
                    health: Any = health_pb2_grpc.HealthStub(channel)
                    reply = await health.Check(health_pb2.HealthCheckRequest())
                    assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
                async with Client(address, "late") as late:
                    await late.wait_for(lambda: late.draining == "maintenance")
                worker.release()
                await client.finished(2)
                core.stop.set()
                await core.ended()
        await eventually(lambda: not fleet.cores())
        assert mirrors.forgotten == ["c1"]
        assert "without --model only front ends that are given the model use this core" in caplog.messages


def _state(fleet: RedisFleet, address: str) -> CoreState | None:
    record = fleet.cores().get(address)
    return record.state if record is not None else None


async def test_a_core_works_without_its_redis(start_core: StartCore, redis: RedisServer) -> None:
    await redis.stop()
    port = free_port()
    settings: dict[str, Any] = {"redis_url": redis.url, "metrics_port": port}
    async with start_core(**settings) as core, at_work(core) as (client, _), httpx.AsyncClient() as http:

        async def metrics() -> str:
            return (await http.get(f"http://127.0.0.1:{port}/metrics")).raise_for_status().text

        await client.submit(1, PROMPT, max_tokens=5)
        await client.finished(1)
        assert client.choices[1].tokens == expected(PROMPT, 5)
        await redis.start()
        async with fleet_of(redis) as (fleet, _):
            await eventually(lambda: core.settings.listen in fleet.cores())
            async with asyncio.timeout(TIMEOUT):
                while "\ntercet_registry_healthy 1" not in (text := await metrics()):
                    pass
            assert "\ntercet_registry_failures_total " in text
            assert "\ntercet_registry_failures_total 0" not in text
        await redis.stop()
        core.stop.set()
        await core.ended()


@pytest.mark.parametrize("listen", ["0.0.0.0:8100", "[::]:8100", "127.0.0.1:0", "nonsense"])
def test_an_address_that_stands_for_several_is_not_registered(listen: str) -> None:
    settings = parse(CoreSettings, [f"--listen={listen}"])
    with pytest.raises(ConfigurationError) as caught:
        advertised(settings)
    assert caught.value.param == "advertise"
    assert advertised(settings.model_copy(update={"advertise": "core-1:8100"})) == "core-1:8100"
    for wrong in ("core-1", "0.0.0.0:8100"):
        with pytest.raises(ConfigurationError, match=r"--advertise must be .* as front ends reach it, not"):
            advertised(settings.model_copy(update={"advertise": wrong}))


# -------------------------------------------------------------------------------------------- how it leaves


async def test_what_was_computed_is_delivered_before_the_rest_moves(start_core: StartCore) -> None:
    async with start_core(grace=0.3) as core, at_work(core) as (client, worker):
        worker.hold()
        await client.submit(1, PROMPT, max_tokens=30)
        for count in range(1, 6):
            await worker.wait_for_steps(count)
            worker.release(1)
        await client.wait_for(lambda: len(client.choices[1].tokens) == 5)
        core.stop.set()
        await client.finished(1)
        await core.ended()
        error = client.choices[1].error
        assert error is not None
        assert error.kind == pb.ERROR_KIND_UNAVAILABLE
        assert client.choices[1].tokens == expected(PROMPT, 5)
        assert client.choices[1].terminal_events == 1


async def test_sigterm_ends_the_process_in_order(run_dir: Path, redis: RedisServer) -> None:
    arguments = (
        f"--redis-url={redis.url}", "--core-id=c1", "--grace=20", "--heartbeat-timeout=20", "--heartbeat-interval=0.2",
    )  # fmt: skip
    async with core_process(run_dir, *arguments) as process, fleet_of(redis) as (fleet, _):
        await waits_for_its_worker(process)
        async with FakeWorker(run_dir / "worker.sock") as worker:
            address = f"unix:{run_dir}/core.sock"
            await eventually(lambda: _state(fleet, address) is CoreState.READY)
            async with Client(address) as client:
                worker.hold()
                await client.submit(1, PROMPT, max_tokens=9)
                await worker.wait_for_steps(1)
                process.send_signal(signal.SIGTERM)
                await client.wait_for(lambda: client.draining is not None)
                await eventually(lambda: _state(fleet, address) is CoreState.DRAINING)
                worker.release()
                await client.finished(1)
                assert client.choices[1].tokens == expected(PROMPT, 9)
                await asyncio.wait_for(process.communicate(), TIMEOUT)
                assert process.returncode == 0
                await eventually(lambda: not fleet.cores())
