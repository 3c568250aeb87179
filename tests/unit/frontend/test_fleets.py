"""Cores that were named and cores that register, together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from tercet_frontend.fleets import JoinedFleet, UnregisteredSink, open_fleet
from tercet_shared.config import FrontendSettings, parse
from tercet_shared.registry.interface import BlockBatch, CoreRecord, RouteRecord
from tercet_shared.registry.redis import RedisFleet
from tercet_shared.registry.static import StaticFleet
from tests.unit.frontend.models.test_catalog import Fleet as Records
from tests.unit.frontend.models.test_catalog import record

if TYPE_CHECKING:
    from collections.abc import Callable

ROUTE = RouteRecord(core_id="c", front_end="f", attempt=0, traceparent="", state="running")


class Registry(Records):
    """A registry that keeps what it is told."""

    healthy = False

    def __init__(self) -> None:
        super().__init__()
        self.routes: dict[str, RouteRecord] = {}
        self.running = asyncio.Event()

    async def run(self) -> None:
        self.running.set()
        await asyncio.Event().wait()

    def note_route(self, request_id: str, route: RouteRecord) -> None:
        self.routes[request_id] = route

    async def find_route(self, request_id: str) -> RouteRecord | None:
        return self.routes.get(request_id)


@dataclass
class Sink:
    """Hears what cores have cached."""

    heard: list[str] = field(default_factory=list)

    def blocks(self, core_id: str, _incarnation: str, _batch: BlockBatch) -> None:
        self.heard.append(core_id)

    def forget(self, core_id: str) -> None:
        self.heard.append(f"not {core_id}")


async def test_both_kinds_of_cores_are_there() -> None:
    registry = Registry()
    fleet = JoinedFleet(StaticFleet(["named:1", "both:1"]), registry)
    changes: list[int] = []
    fleet.watch(lambda: changes.append(1))
    registered = replace(record(), address="both:1")
    registry.say(registered)
    assert changes == [1]
    expected: dict[str, CoreRecord | None] = {"named:1": None, "unix:/named": None, "both:1": registered}
    assert fleet.cores() == expected
    fleet.note_route("r", ROUTE)
    assert registry.routes == {"r": ROUTE}
    assert await fleet.find_route("r") == ROUTE
    assert not fleet.healthy
    run = asyncio.create_task(fleet.run())
    async with asyncio.timeout(60):
        await registry.running.wait()
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


def test_each_core_is_heard_one_way() -> None:
    registry, sink = Registry(), Sink()
    own = UnregisteredSink(sink, registry)
    batch = BlockBatch(first=0, stored=(), keys=(), snapshot=True)
    registered = record()

    def hear() -> list[str]:
        sink.heard.clear()
        for core_id in (registered.core_id, "another"):
            own.blocks(core_id, "1", batch)
            own.forget(core_id)
        return list(sink.heard)

    assert len(hear()) == 4
    registry.say(registered)
    assert hear() == ["another", "not another"]
    registry.say()
    assert len(hear()) == 4


@pytest.mark.parametrize(
    ("flags", "kind", "over_streams"),
    [
        (["--core=x:1"], StaticFleet, lambda given, sink: given is sink),
        (
            ["--core=x:1", "--redis-url=redis://r", "--no-discover-cores"],
            StaticFleet,
            lambda given, sink: given is sink,
        ),
        (["--redis-url=redis://r"], RedisFleet, lambda given, _sink: given is None),
        (["--core=x:1", "--redis-url=redis://r"], JoinedFleet, lambda given, _: isinstance(given, UnregisteredSink)),
    ],
)
async def test_what_the_settings_ask_for(flags: list[str], kind: type, over_streams: Callable[..., bool]) -> None:
    sink: Any = Sink()
    async with open_fleet(parse(FrontendSettings, flags), sink) as (fleet, given):
        assert type(fleet) is kind
        assert over_streams(given, sink)
    async with open_fleet(parse(FrontendSettings, flags), None) as (_, given):
        assert given is None
