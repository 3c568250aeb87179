"""The registry of a front end whose cores are given by address: all else it learns from their streams."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tercet_shared.registry.interface import CoreRecord, RouteRecord

MAX_ROUTES = 16_384
"""Routes that are kept; the oldest go first."""


class StaticFleet:
    """A `Fleet` that never changes.

    Args:
        addresses: of the cores, as ``host:port`` or ``unix:/path``; one that is given twice counts once.
        max_routes: routes that this process remembers.
    """

    def __init__(self, addresses: Iterable[str], *, max_routes: int = MAX_ROUTES) -> None:
        self._cores: dict[str, CoreRecord | None] = dict.fromkeys(addresses)
        self._routes: OrderedDict[str, RouteRecord] = OrderedDict()
        self._max_routes = max_routes

    async def run(self) -> None:
        """Has nothing to do until it is cancelled."""
        await asyncio.Event().wait()

    def cores(self) -> Mapping[str, CoreRecord | None]:
        """Returns the addresses, in their order."""
        return self._cores

    def watch(self, changed: Callable[[], None]) -> None:
        """Never calls ``changed``."""

    def note_route(self, request_id: str, route: RouteRecord) -> None:
        """Remembers the route in this process."""
        self._routes[request_id] = route
        self._routes.move_to_end(request_id)
        if len(self._routes) > self._max_routes:
            self._routes.popitem(last=False)

    async def find_route(self, request_id: str) -> RouteRecord | None:
        """Returns the route if this process wrote it down and still has it."""
        return self._routes.get(request_id)

    @property
    def healthy(self) -> bool:
        """Always: there is no server that could fail."""
        return True
