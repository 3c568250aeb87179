"""What is kept of a response, and what keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import orjson

MAX_RECORD_BYTES = 8 * 1024 * 1024
"""Bytes of one record. A conversation fits a model's context, so only bodies that are mostly markup come near it."""

DEFAULT_TTL = 86_400.0
"""Seconds that a response is kept."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with all that is needed to answer what follows it, so that earlier ones may be deleted or expire.

    Attributes:
        response: the body as its client got it.
        input_items: items that its request brought.
        history: items of all turns before it, oldest first.
    """

    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    history: list[dict[str, Any]]

    def conversation(self) -> list[dict[str, Any]]:
        """Returns the items of all turns up to and with this response."""
        return [*self.history, *self.input_items, *self.response["output"]]

    def encode(self) -> bytes:
        """Returns the record."""
        return orjson.dumps([self.response, self.input_items, self.history])

    @classmethod
    def decode(cls, record: bytes) -> StoredResponse:
        """Returns what `encode` was called on."""
        return cls(*orjson.loads(record))


class ResponseStore(Protocol):
    """Keeps records by tenant and response id. What one tenant has stored no other can read or delete.

    Every method but `close` raises `UnavailableError` when the store cannot be reached in time; nothing is retried for
    long, and cancelling a call leaves the store usable.
    """

    async def check(self) -> None:
        """Returns when the store can be used."""

    async def put(self, tenant: str, response_id: str, record: bytes) -> bool:
        """Keeps ``record``, until its time is over or the space is needed. Returns False if it is too large."""

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """Returns the record, or None when there is none (any more)."""

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forgets the record; returns whether there was one."""

    async def close(self) -> None:
        """Lets go of connections. The store is not used afterwards."""
