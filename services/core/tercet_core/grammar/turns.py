"""Whose grammar is tried out next, when more of them wait than can be tried at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

LARGE: Final = 16 << 10
"""Characters of a grammar that is large: it may take seconds, where others take milliseconds."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """One who waits."""

    tenant: str
    size: int
    order: int
    called: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Turns:
    """Places for which tenants wait. Used on one event loop.

    Tenants take turns, and of each the smallest grammar comes first. Neither large grammars nor the grammars of one
    tenant take all places: whoever asks for something else finds one. Requests without a key have no tenant and are
    not told apart.

    Args:
        places: that can be taken at once, two or more.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken: Counter[str] = Counter()  # by tenant
        self._large = 0  # places that large grammars have taken
        self._waiting: list[_Waiting] = []
        self._served: dict[str, int] = {}  # when each tenant that has or waits for a place had its last turn
        self._count = 0

    async def wait(self, tenant: str, size: int) -> None:
        """Waits for a place and takes it. Give it back with `leave`; cancelled, nothing is taken."""
        self._count += 1
        entry = _Waiting(tenant, size, self._count)
        self._waiting.append(entry)
        self._call()
        try:
            await entry.called
        except asyncio.CancelledError:
            if entry.called.done() and not entry.called.cancelled():
                self.leave(tenant, size)
            else:
                self._waiting.remove(entry)
            raise

    def leave(self, tenant: str, size: int) -> None:
        """Gives a place back."""
        self._taken[tenant] -= 1
        self._large -= size > LARGE
        if not self._taken[tenant]:
            del self._taken[tenant]
            if all(other.tenant != tenant for other in self._waiting):
                del self._served[tenant]
        self._call()

    def _call(self) -> None:
        """Gives free places to those whose turn it is."""
        while self._taken.total() < self._places:
            may = [entry for entry in self._waiting if self._may(entry)]
            if not may:
                return
            entry = min(may, key=self._rank)
            self._waiting.remove(entry)
            self._taken[entry.tenant] += 1
            self._large += entry.size > LARGE
            self._count += 1
            self._served[entry.tenant] = self._count
            entry.called.set_result(None)

    def _may(self, entry: _Waiting) -> bool:
        if entry.called.done():  # cancelled just now
            return False
        if entry.size > LARGE and self._large >= self._places - 1:
            return False
        return not entry.tenant or self._taken[entry.tenant] < self._places - 1

    def _rank(self, entry: _Waiting) -> tuple[int, int, int]:
        return self._served.get(entry.tenant, 0), entry.size, entry.order
