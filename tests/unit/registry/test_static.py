"""The registry of given addresses."""

from __future__ import annotations

from tercet_shared.registry.interface import Fleet, RouteRecord
from tercet_shared.registry.static import StaticFleet


async def test_addresses_are_known_and_nothing_else() -> None:
    fleet = StaticFleet(["b:1", "a:1", "b:1"], max_routes=2)
    as_any: Fleet = fleet
    assert as_any.healthy
    assert list(fleet.cores().items()) == [("b:1", None), ("a:1", None)]
    route = RouteRecord(core_id="a", front_end="f", attempt=0, traceparent="", state="running")
    for name in ("r1", "r2", "r1", "r3"):
        fleet.note_route(name, route)
    assert await fleet.find_route("r1") == route
    assert await fleet.find_route("r2") is None, "the one that was not written for the longest time goes"
