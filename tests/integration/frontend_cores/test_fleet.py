"""Cores that come and go in the registry, models that a front end learns, and what cores have cached."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tercet_frontend.cores import CorePool, StreamOptions
from tercet_frontend.cores.interface import Finished, FinishReason, ServedModel
from tercet_frontend.routing import Router, routing_policy
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.errors import UnavailableError
from tercet_shared.hashing import BlockKey
from tercet_shared.registry.interface import BlockBatch, CoreLoad, CoreRecord, CoreState, RouteRecord
from tests.fakes.core import STOP, TIMEOUT, FakeCore
from tests.integration.frontend_cores.support import collect, request, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

    from tercet_frontend.cores.interface import GenerationRequest
    from tercet_frontend.cores.stream import CoreStream
    from tercet_frontend.models.interface import CoreModel

ENDED = Finished(FinishReason.STOP, None, 0)


class PlannedFleet:
    """A `Fleet` that a test changes."""

    def __init__(self) -> None:
        self.routes: list[tuple[str, RouteRecord]] = []
        self._cores: dict[str, CoreRecord | None] = {}
        self._changed: Callable[[], None] | None = None

    async def run(self) -> None:
        await asyncio.Event().wait()

    def cores(self) -> Mapping[str, CoreRecord | None]:
        return self._cores

    def watch(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def show(self, cores: Mapping[str, CoreRecord | None]) -> None:
        self._cores = dict(cores)
        assert self._changed is not None
        self._changed()

    def note_route(self, request_id: str, route: RouteRecord) -> None:
        self.routes.append((request_id, route))

    async def find_route(self, request_id: str) -> RouteRecord | None:
        raise AssertionError(request_id)

    @property
    def healthy(self) -> bool:
        return True


class Texts:
    """`ModelNames` of a front end that learns models: fingerprints of tokenizers, by name."""

    def __init__(self, **known: str) -> None:
        self._known = known
        self._changed: Callable[[], None] | None = None

    def names_of(self, core: CoreModel) -> tuple[str, ...]:
        names = tuple(core.served_names) or (core.model_name,)
        return tuple(name for name in names if self._known.get(name) == core.tokenizer_fingerprint)

    def refusal(self, core: CoreModel) -> str:
        return f"The tokenizer of {core.model_name} is not there."

    def watch(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def learn(self, **known: str) -> None:
        self._known |= known
        assert self._changed is not None
        self._changed()


class Blocks:
    """A `BlockSink` that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, BlockBatch]] = []
        self.forgotten: list[str] = []

    def blocks(self, core_id: str, incarnation: str, batch: BlockBatch) -> None:
        self.heard.append((core_id, incarnation, batch))

    def forget(self, core_id: str) -> None:
        self.forgotten.append(core_id)


def record(core: FakeCore, state: CoreState = CoreState.READY) -> CoreRecord:
    return CoreRecord(
        core_id=core.welcome.core_id, address=core.address, incarnation="1", served_names=("model",), source="",
        revision="", model_fingerprint="weights", tokenizer_fingerprint="tokenizer", block_size=16, state=state,
        load=CoreLoad(),
    )  # fmt: skip


@asynccontextmanager
async def pool_over(
    fleet: PlannedFleet, texts: Texts | None = None, sink: Blocks | None = None, **options: Any
) -> AsyncIterator[CorePool]:
    router: Router[CoreStream] = Router(routing_policy("least_loaded"))
    settings = {"heartbeat_timeout": 20.0, "backoff_first": 0.01, "backoff_limit": 0.1, "linger": 0.05} | options
    pool = CorePool(
        fleet,
        models=texts or Texts(model="tokenizer"),
        router=router,
        options=StreamOptions(**settings),
        frontend_id="frontend",
        sink=sink,
    )
    run = asyncio.create_task(pool.run())
    try:
        yield pool
    finally:
        pool.stop()
        async with asyncio.timeout(TIMEOUT):
            await run


async def goes_to(core: FakeCore, pool: CorePool, model: str = "model") -> None:
    generation = pool.submit(_for(model))
    (await core.next_request()).send(5, finish=STOP)
    assert await collect(generation) == ([5], ENDED)


def _for(model: str) -> GenerationRequest:
    return replace(request(), model=model)


async def test_cores_come_and_go(tmp_path: Path) -> None:
    fleet = PlannedFleet()
    async with FakeCore(core_id="a") as a, FakeCore(core_id="b") as b, pool_over(fleet) as pool:
        assert pool.not_ready_reason() == "No core is known yet."
        fleet.show({a.address: record(a)})
        await pool.wait_until_ready()
        await goes_to(a, pool)
        fleet.show({b.address: None})  # a has left, and nothing runs there
        await a.wait_for(lambda: a.connections[0].closed)
        assert [stream.address for stream in pool.streams] == [b.address]
        await pool.wait_until_ready()
        await goes_to(b, pool)
        fleet.show({a.address: record(a), b.address: None, "nonsense": None, f"unix:{tmp_path}/none": None})
        await a.connected(2)
        assert [stream.address for stream in pool.streams] == [b.address, a.address, f"unix:{tmp_path}/none"]
        fleet.show({})
        await a.kill()
        await b.kill()
        await until(pool, lambda: not pool.streams)
        with pytest.raises(UnavailableError, match="No core is known"):
            pool.submit(request())


async def test_a_core_that_leaves_the_registry_finishes_what_it_runs() -> None:
    fleet = PlannedFleet()
    async with FakeCore(core_id="a") as a, FakeCore(core_id="b") as b, pool_over(fleet) as pool:
        fleet.show({a.address: record(a)})
        await pool.wait_until_ready()
        generation, given_up = pool.submit(request(1)), pool.submit(request(2))
        received, _ = await a.next_requests(2)
        fleet.show({b.address: record(b)})
        (stream,) = [stream for stream in pool.streams if stream.address == a.address]
        await until(pool, lambda: pool._held[a.address].lingered)
        received.send(5)
        assert (await generation.next()).ids == [5]
        await until(pool, lambda: pool._held[b.address].names)
        for _ in range(3):
            await goes_to(b, pool)
        given_up.abort("over")
        assert stream in pool.streams
        received.send(6, finish=STOP)
        assert await collect(generation) == ([6], ENDED)
        await until(pool, lambda: stream not in pool.streams)
        await a.wait_for(lambda: a.connections[0].closed)


async def test_an_empty_registry_stops_nothing_at_once() -> None:
    fleet = PlannedFleet()
    async with FakeCore() as core, pool_over(fleet, linger=60.0) as pool:
        fleet.show({core.address: record(core)})
        await pool.wait_until_ready()
        generation = pool.submit(request(1))
        received = await core.next_request()
        fleet.show({})  # Redis was started again, and its cores have not registered so far
        await goes_to(core, pool)  # its stream is proof enough
        held = pool._held[core.address]
        pool._linger_over(held)  # Redis takes no more writes, so none of them registers
        assert held.departed is not None
        await goes_to(core, pool)
        fleet.show({core.address: record(core)})
        received.send(5, finish=STOP)
        assert await collect(generation) == ([5], ENDED)
        assert len(core.connections) == 1


async def test_a_core_that_left_and_dies_is_forgotten() -> None:
    fleet = PlannedFleet()
    async with FakeCore(core_id="a") as a, FakeCore(core_id="b") as b, pool_over(fleet, linger=60.0) as pool:
        fleet.show({a.address: record(a)})
        await pool.wait_until_ready()
        generation = pool.submit(request(1))
        (await a.next_request()).send(5)
        assert (await generation.next()).ids == [5]
        fleet.show({b.address: record(b)})
        await a.kill()
        again = await b.next_request()
        assert again.resumed_ids == [5]
        assert [stream.address for stream in pool.streams] == [b.address]
        again.send(6, finish=STOP)
        assert await collect(generation) == ([6], ENDED)


async def test_a_record_that_says_draining() -> None:
    fleet = PlannedFleet()
    async with FakeCore(core_id="a") as a, FakeCore(core_id="b") as b, pool_over(fleet) as pool:
        fleet.show({a.address: record(a), b.address: record(b)})
        await until(pool, lambda: len(pool._ready) == 2)
        fleet.show({a.address: record(a, CoreState.DRAINING), b.address: record(b)})
        for _ in range(3):
            await goes_to(b, pool)
        fleet.show({a.address: record(a, CoreState.DRAINING), b.address: record(b, CoreState.DRAINING)})
        with pytest.raises(UnavailableError, match="leaves the fleet"):
            pool.submit(request())
        fleet.show({a.address: record(a), b.address: record(b, CoreState.DRAINING)})
        await goes_to(a, pool)


async def test_another_core_under_the_same_address() -> None:
    fleet = PlannedFleet()
    core = FakeCore(core_id="first", incarnation="1")
    async with core, pool_over(fleet) as pool:
        fleet.show({core.address: record(core)})
        await pool.wait_until_ready()
        generation = pool.submit(request(1))
        (await core.next_request()).send(5)
        assert (await generation.next()).ids == [5]
        await core.kill()
        core.welcome.core_id, core.welcome.incarnation = "second", "2"
        await core.start()  # before the registry knows
        again = await core.next_request()
        assert (again.submit.attempt, again.resumed_ids) == (1, [5])
        again.send(6, finish=STOP)
        assert await collect(generation) == ([6], ENDED)
        assert [stream.core_id for stream in pool.streams] == ["second"]


async def test_a_core_that_lies_about_its_load_is_not_buried() -> None:
    fleet = PlannedFleet()
    async with FakeCore(core_id="a") as a, FakeCore(core_id="b") as b, pool_over(fleet) as pool:
        fleet.show({a.address: record(a), b.address: record(b)})
        await until(pool, lambda: len(pool._ready) == 2)
        generations = []
        for n in range(20):
            a.stats(running=0, waiting=0)  # though it has many
            generations.append(pool.submit(request(n)))
            await until_applied(pool, a)
        there, here = [stream.active for stream in pool.streams]
        assert there + here == 20
        assert abs(there - here) <= 2
        for generation in generations:
            generation.abort("over")


async def until_applied(pool: CorePool, core: FakeCore) -> None:
    """Returns when what ``core`` has sent so far is applied."""
    change = asyncio.create_task(pool.wait_for_change())
    await asyncio.sleep(0)  # it waits
    core.broadcast(pb.EngineFrame(welcome=core.welcome))  # the same once more
    async with asyncio.timeout(TIMEOUT):
        await change


async def test_several_models() -> None:
    fleet, texts = PlannedFleet(), Texts(small="tokenizer")
    async with (
        FakeCore(core_id="a", served_names=["small", "tiny"], max_model_len=100) as a,
        FakeCore(core_id="b", served_names=["small"], max_model_len=200) as b,
        FakeCore(core_id="c", model_name="large", tokenizer_fingerprint="other") as c,
        pool_over(fleet, texts) as pool,
    ):
        fleet.show({c.address: None})
        await until(pool, lambda: "large is not there" in (pool.not_ready_reason() or ""))
        fleet.show({core.address: None for core in (a, b, c)})
        await until(pool, lambda: len(pool._ready) == 2)
        assert pool.models() == [ServedModel("small", 100, 49_152)]
        with pytest.raises(UnavailableError, match="large"):
            pool.submit(_for("large"))
        texts.learn(large="tokenizer")  # another one than that core has
        assert [model.name for model in pool.models()] == ["small"]
        texts.learn(large="other", tiny="tokenizer")
        assert {model.name: model.max_model_len for model in pool.models()} == {
            "small": 100,
            "tiny": 100,
            "large": 2048,
        }
        await goes_to(c, pool, "large")
        await goes_to(a, pool, "tiny")
        moving = pool.submit(_for("large"))
        received = await c.next_request()
        received.send(5)
        assert (await moving.next()).ids == [5]
        received.connection.end(grpc.StatusCode.UNAVAILABLE)
        assert (await c.next_request()).resumed_ids == [5]  # no core of another model gets it
        moving.abort("over")


async def test_one_that_waits_goes_on_when_the_model_is_learnt() -> None:
    fleet, texts = PlannedFleet(), Texts(model="tokenizer")
    async with (
        FakeCore(core_id="a") as a,
        FakeCore(core_id="b", served_names=["next"]) as b,
        pool_over(fleet, texts) as pool,
    ):
        fleet.show({a.address: None, b.address: None})
        await until(pool, lambda: all(stream.info for stream in pool.streams))
        generation = pool.submit(request(1))
        await a.next_request()
        await a.kill()
        await until(pool, lambda: pool.migrating and not pool._ready)
        b.welcome.served_names[:] = ["model"]
        b.connections[0].send(pb.EngineFrame(welcome=b.welcome))
        (await b.next_request()).send(5, finish=STOP)
        assert await collect(generation) == ([5], ENDED)


async def test_routes_are_written_down() -> None:
    fleet = PlannedFleet()
    async with FakeCore(core_id="a") as a, pool_over(fleet) as pool:
        fleet.show({a.address: record(a)})
        await pool.wait_until_ready()
        first, second = (pool.submit(request(n, request_id="r")) for n in range(2))
        received = await a.next_requests(2)
        received[0].send(5, finish=STOP)
        await collect(first)
        received[1].reject(pb.ERROR_KIND_UNAVAILABLE, "Not yet.")
        (await a.next_request()).send(6)
        await second.next()
        second.abort("over")
    seen = [(request_id, route.core_id, route.attempt, route.state) for request_id, route in fleet.routes]
    assert seen == [
        ("r", "a", 0, "running"), ("r", "a", 0, "running"), ("r", "a", 1, "running"), ("r", "a", 1, "aborted"),
    ]  # fmt: skip
    assert {route.front_end for _, route in fleet.routes} == {"frontend"}


def _events(first: int, *changes: tuple[int, bytes], snapshot: bool = False) -> pb.EngineFrame:
    kinds = b"" if snapshot else bytes(kind for kind, _ in changes)
    keys = b"".join(key for _, key in changes)
    return pb.EngineFrame(block_events=pb.BlockEvents(first=first, changes=kinds, keys=keys, snapshot=snapshot))


def _key(number: int) -> BlockKey:
    return BlockKey(bytes([number]) * 16)


async def test_block_events_reach_the_sink() -> None:
    fleet, sink = PlannedFleet(), Blocks()
    async with FakeCore(core_id="a", incarnation="7") as core, pool_over(fleet, sink=sink) as pool:
        fleet.show({core.address: None})
        connection = await core.connected()
        assert connection.frames[0].hello.block_events
        await pool.wait_until_ready()
        connection.send(_events(4, (0, _key(1)), (0, _key(2)), snapshot=True))
        connection.send(_events(5, (0, _key(3)), (1, _key(1))))
        connection.send(_events(7, (0, _key(4)), (2, bytes(16)), (1, _key(5)), (2, bytes(16)), (0, _key(6))))
        connection.send(_events(12, (2, bytes(16))))
        await until_applied(pool, core)
        assert sink.heard == [
            ("a", "7", batch)
            for batch in (
                BlockBatch(4, (), [_key(1), _key(2)], snapshot=True),
                BlockBatch(5, [True, False], [_key(3), _key(1)]),
                BlockBatch(10, (), (), snapshot=True),
                BlockBatch(11, [True], [_key(6)]),
                BlockBatch(12, (), (), snapshot=True),
            )
        ]
        assert sink.forgotten == []
        await core.kill()
        await until(pool, lambda: sink.forgotten)
    assert sink.forgotten == ["a"]


@pytest.mark.parametrize(
    "damage",
    [
        {"changes": b"\0"},
        {"changes": b"\0\3"},
        {"keys": bytes(31)},
        {"keys": bytes(16)},
        {"snapshot": True},
    ],
)
async def test_malformed_block_events_end_the_stream(damage: dict[str, Any]) -> None:
    fleet, sink = PlannedFleet(), Blocks()
    async with FakeCore() as core, pool_over(fleet, sink=sink):
        fleet.show({core.address: None})
        connection = await core.connected()
        frame = _events(1, (0, _key(1)), (1, _key(2)))
        for name, value in damage.items():
            setattr(frame.block_events, name, value)
        connection.send(frame)
        await core.connected(2)
        assert sink.heard == []


async def test_a_core_of_the_first_version_is_not_asked_for_block_events() -> None:
    fleet, sink = PlannedFleet(), Blocks()
    async with FakeCore(only_version=1) as core, pool_over(fleet, sink=sink) as pool:
        fleet.show({core.address: None})
        await pool.wait_until_ready()
        assert not core.connections[1].frames[0].hello.block_events
        await goes_to(core, pool)


async def test_hundreds_of_cores_that_are_not_there(tmp_path: Path) -> None:
    fleet = PlannedFleet()
    async with FakeCore() as core, pool_over(fleet, backoff_first=1.0) as pool:
        fleet.show({f"unix:{tmp_path}/{n}": None for n in range(300)} | {core.address: None})
        await pool.wait_until_ready()
        await goes_to(core, pool)
        fleet.show({core.address: None})
        assert len(pool.streams) == 1
        await goes_to(core, pool)
