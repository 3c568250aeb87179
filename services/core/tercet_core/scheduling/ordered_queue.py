"""The plain waiting queue, also what others are made of: a fixed order."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tercet_core.scheduling.request import Request


class OrderedQueue:
    """A heap over a fixed key; removal from the middle is lazy."""

    def __init__(self, key: Callable[[Request], tuple[int, ...]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[int, ...], int, Request]] = []
        self._tickets: dict[Request, int] = {}
        self._next_ticket = 0

    def push(self, request: Request) -> None:  # noqa: D102  # see WaitingQueue
        self._next_ticket += 1
        self._tickets[request] = self._next_ticket
        heapq.heappush(self._heap, (self._key(request), self._next_ticket, request))

    def peek(self) -> Request | None:  # noqa: D102  # see WaitingQueue
        while self._heap:
            _, ticket, request = self._heap[0]
            if self._tickets.get(request) == ticket:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:  # noqa: D102  # see WaitingQueue
        request = self.peek()
        if request is None:
            raise IndexError("nobody waits")
        heapq.heappop(self._heap)
        del self._tickets[request]
        return request

    def discard(self, request: Request) -> bool:  # noqa: D102  # see WaitingQueue
        found = self._tickets.pop(request, None) is not None
        if len(self._heap) > 2 * len(self._tickets) + 64:  # removed ones must not pile up behind a head that stays
            self._heap = [item for item in self._heap if self._tickets.get(item[2]) == item[1]]
            heapq.heapify(self._heap)
        return found

    def ended(self, request: Request, output_tokens: int) -> None:
        """Does nothing: the order does not depend on what was served."""

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._tickets))
