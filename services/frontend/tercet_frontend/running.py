"""Requests that generate now, so that another request can end them by their id."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class RunningRequests:
    """Those of this front end, by tenant and id. One id may stand for several: clients may use theirs again."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[str, str], list[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @contextmanager
    def track(self, tenant: str, ids: Sequence[str]) -> Iterator[asyncio.Future[None]]:
        """Yields what is done once `cancel` was called with any of ``ids``, which are known while this is open."""
        cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        keys = [(tenant, name) for name in dict.fromkeys(ids) if name]
        for key in keys:
            self._by_id.setdefault(key, []).append(cancelled)
        try:
            yield cancelled
        finally:
            for key in keys:
                others = self._by_id[key]
                others.remove(cancelled)
                if not others:
                    del self._by_id[key]

    def cancel(self, tenant: str, name: str) -> int:
        """Ends all requests of ``tenant`` that run under this id; returns at once, with their number."""
        found = self._by_id.get((tenant, name), [])
        for cancelled in found:
            if not cancelled.done():
                cancelled.set_result(None)
        return len(found)
