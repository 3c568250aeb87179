"""Fair share between tenants: whoever has been served least is next, and nobody takes all slots.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each tenant's counter
grows with what it was served, a prompt token for 1 and an output token for 2. The tenant with the smallest counter goes
first. A tenant that was idle starts at the smallest counter of those that are active, so that idleness earns no credit.

A tenant that is alone may hold all but an eighth of the slots; the rest stay free for whoever comes next, because a
counter alone does not help a newcomer when every slot is taken for minutes.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tercet_core.scheduling.request import Request

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
RESERVED_SHARE = 8
"""One in so many slots is kept from a tenant that already holds the others."""


class _Tenant:
    """What is known of one tenant while it has requests."""

    __slots__ = ("counter", "holding", "waiting")

    def __init__(self, counter: int) -> None:
        self.counter = counter
        self.holding = 0  # requests that were admitted and have not ended
        self.waiting: list[tuple[tuple[int, int], int, Request]] = []  # a heap, removal is lazy


class FairShareQueue:
    """See `WaitingQueue` for its methods. Within a tenant, requests go by priority, then arrival."""

    def __init__(self, max_slots: int) -> None:
        self._limit = max(max_slots - max_slots // RESERVED_SHARE, 1)
        self._tenants: dict[str, _Tenant] = {}
        self._tickets: dict[Request, int] = {}
        self._admitted: set[Request] = set()
        self._next_ticket = 0

    def push(self, request: Request) -> None:  # noqa: D102  # see WaitingQueue
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            active = [other.counter for other in self._tenants.values()]
            tenant = self._tenants[request.tenant] = _Tenant(min(active, default=0))
        self._next_ticket += 1
        self._tickets[request] = self._next_ticket
        heapq.heappush(tenant.waiting, ((request.priority, request.arrival), self._next_ticket, request))

    def peek(self) -> Request | None:  # noqa: D102  # see WaitingQueue
        best: tuple[int, int, Request] | None = None
        for tenant in self._tenants.values():
            request = self._head(tenant)
            if request is None or (request.slot is None and tenant.holding >= self._limit):
                continue
            if best is None or (tenant.counter, request.arrival) < best[:2]:
                best = (tenant.counter, request.arrival, request)
        return best[2] if best is not None else None

    def pop(self) -> Request:  # noqa: D102  # see WaitingQueue
        request = self.peek()
        if request is None:
            raise IndexError("nobody waits")
        tenant = self._tenants[request.tenant]
        heapq.heappop(tenant.waiting)
        del self._tickets[request]
        if request not in self._admitted:
            self._admitted.add(request)
            tenant.holding += 1
            tenant.counter += PROMPT_WEIGHT * request.prompt_len
        return request

    def discard(self, request: Request) -> bool:  # noqa: D102  # see WaitingQueue
        if self._tickets.pop(request, None) is None:
            return False
        self._forget_idle(request.tenant)
        return True

    def ended(self, request: Request, output_tokens: int) -> None:  # noqa: D102  # see WaitingQueue
        if request not in self._admitted:
            return
        self._admitted.remove(request)
        tenant = self._tenants[request.tenant]
        tenant.holding -= 1
        tenant.counter += OUTPUT_WEIGHT * output_tokens
        self._forget_idle(request.tenant)

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._tickets))

    def _head(self, tenant: _Tenant) -> Request | None:
        while tenant.waiting:
            _, ticket, request = tenant.waiting[0]
            if self._tickets.get(request) == ticket:
                return request
            heapq.heappop(tenant.waiting)
        return None

    def _forget_idle(self, name: str) -> None:
        tenant = self._tenants[name]
        if tenant.holding == 0 and self._head(tenant) is None:
            del self._tenants[name]
