"""Who is next among the requests that wait: small policies, chosen by name."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Protocol

from tercet_core.scheduling.fair_share import FairShareQueue
from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tercet_core.scheduling.request import Request


class WaitingQueue(Protocol):
    """Requests that wait, new ones and preempted ones alike. Every method returns at once."""

    def push(self, request: Request) -> None:
        """Adds a request; one that was preempted takes the place that its first arrival gives it."""

    def peek(self) -> Request | None:
        """Returns the request that is next, or None when nobody waits."""

    def pop(self) -> Request:
        """Removes and returns the request that `peek` returns. Raises `IndexError` when nobody waits."""

    def discard(self, request: Request) -> bool:
        """Removes a request from wherever it stands; returns whether it was there."""

    def ended(self, request: Request, output_tokens: int) -> None:
        """Hears that a request that was popped has ended, and how much output it had; policies may count it."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


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


POLICIES: dict[str, Callable[[int], WaitingQueue]] = {
    "priority": lambda _: OrderedQueue(lambda request: (request.priority, request.arrival)),
    "fcfs": lambda _: OrderedQueue(lambda request: (request.arrival,)),
    "fair": FairShareQueue,
}
"""Policies by name, made from the number of slots.

``priority`` is the default; with equal priorities it is first come, first served. ``fair`` shares between tenants.
"""


def make_queue(policy: str, max_slots: int) -> WaitingQueue:
    """Returns an empty queue of the named policy. Raises `ConfigurationError` when there is none of that name."""
    try:
        return POLICIES[policy](max_slots)
    except KeyError:
        raise ConfigurationError(
            f"No scheduling policy is called {policy!r}; there are {', '.join(POLICIES)}."
        ) from None
