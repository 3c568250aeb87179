"""Responses in this process: gone when it ends, and unknown to other front ends."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tercet_frontend.conversations.interface import DEFAULT_TTL, MAX_RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_COUNT = 10_000
MAX_BYTES = 256 * 1024 * 1024


@dataclass(slots=True)
class _Shelf:
    """What one tenant has stored, oldest first."""

    records: OrderedDict[str, tuple[float, bytes]] = field(default_factory=OrderedDict)  # id: (expiry, record)
    size: int = 0  # bytes

    def remove(self, response_id: str) -> int:
        """Forgets a record that is there; returns its size."""
        _, record = self.records.pop(response_id)
        self.size -= len(record)
        return len(record)


class MemoryResponses:
    """`ResponseStore` in the process, bounded in count and bytes over all tenants.

    Where space is needed, whoever holds the most gives up their oldest record, so that no tenant displaces another's.

    Args:
        ttl: seconds that a record is kept.
        max_count: records.
        max_bytes: bytes of all records.
        max_record_bytes: bytes of one record.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        ttl: float = DEFAULT_TTL,
        max_count: int = MAX_COUNT,
        max_bytes: int = MAX_BYTES,
        max_record_bytes: int = MAX_RECORD_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl = ttl
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._max_record_bytes = min(max_record_bytes, max_bytes)
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}
        self._count = 0
        self._size = 0

    @property
    def count(self) -> int:
        """Records that are held, those included whose time is over but that nobody has asked for since."""
        return self._count

    @property
    def size(self) -> int:
        """Bytes of these records."""
        return self._size

    async def check(self) -> None:
        """See `ResponseStore`."""

    async def put(self, tenant: str, response_id: str, record: bytes) -> bool:
        """See `ResponseStore`."""
        if len(record) > self._max_record_bytes:
            return False
        shelf = self._shelves.setdefault(tenant, _Shelf())
        if response_id in shelf.records:
            self._remove(tenant, shelf, response_id)
            shelf = self._shelves.setdefault(tenant, shelf)
        shelf.records[response_id] = (self._clock() + self._ttl, record)
        shelf.size += len(record)
        self._count += 1
        self._size += len(record)
        self._make_room()
        return True

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """See `ResponseStore`."""
        self._expire(tenant)
        shelf = self._shelves.get(tenant)
        found = shelf.records.get(response_id) if shelf is not None else None
        return None if found is None else found[1]

    async def delete(self, tenant: str, response_id: str) -> bool:
        """See `ResponseStore`."""
        self._expire(tenant)
        shelf = self._shelves.get(tenant)
        if shelf is None or response_id not in shelf.records:
            return False
        self._remove(tenant, shelf, response_id)
        return True

    async def close(self) -> None:
        """See `ResponseStore`."""
        self._shelves.clear()
        self._count = self._size = 0

    def _make_room(self) -> None:
        if self._count <= self._max_count and self._size <= self._max_bytes:
            return
        for tenant in list(self._shelves):
            self._expire(tenant)
        while self._count > self._max_count or self._size > self._max_bytes:
            # By what is short: many small records and few large ones both count as much.
            weight = self._weight_by_count if self._count > self._max_count else self._weight_by_size
            tenant = max(self._shelves, key=weight)
            shelf = self._shelves[tenant]
            self._remove(tenant, shelf, next(iter(shelf.records)))

    def _weight_by_count(self, tenant: str) -> int:
        return len(self._shelves[tenant].records)

    def _weight_by_size(self, tenant: str) -> int:
        return self._shelves[tenant].size

    def _expire(self, tenant: str) -> None:
        # All records live equally long, so the oldest expire first.
        shelf = self._shelves.get(tenant)
        now = self._clock()
        while shelf is not None and shelf.records:
            response_id, (expiry, _) = next(iter(shelf.records.items()))
            if expiry > now:
                return
            self._remove(tenant, shelf, response_id)

    def _remove(self, tenant: str, shelf: _Shelf, response_id: str) -> None:
        self._size -= shelf.remove(response_id)
        self._count -= 1
        if not shelf.records:
            del self._shelves[tenant]
