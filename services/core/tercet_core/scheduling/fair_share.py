"""Fair share between tenants: whoever has been served least is next, and nobody takes all slots.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each tenant's counter
grows with what it was served, a prompt token for 1 and an output token for 2. The tenant with the smallest counter goes
first. A tenant that was idle starts at the smallest counter of those that are active, so that idleness earns no credit.

A tenant that is alone may hold all but an eighth of the slots; the rest stay free for whoever comes next, because a
counter alone does not help a newcomer when every slot is taken for minutes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_core.scheduling.ordered_queue import OrderedQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tercet_core.scheduling.request import Request

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
RESERVED_SHARE = 8
"""One in so many slots is kept from a tenant that already holds the others."""


class _Tenant:
    """What is known of one tenant while it has requests."""

    __slots__ = ("counter", "fresh", "holding", "resuming")

    def __init__(self, counter: int) -> None:
        self.counter = counter
        self.holding = 0  # requests that were admitted and have not ended
        self.fresh = OrderedQueue(_rank)  # those that wait and were never admitted
        self.resuming = OrderedQueue(_rank)  # those that wait and hold a slot


class FairShareQueue:
    """See `WaitingQueue` for its methods. Within a tenant, requests go by priority, then arrival."""

    def __init__(self, max_slots: int) -> None:
        self._limit = max(max_slots - max_slots // RESERVED_SHARE, 1)
        self._tenants: dict[str, _Tenant] = {}
        self._lines: dict[Request, OrderedQueue] = {}  # where each waits
        self._admitted: set[Request] = set()

    def push(self, request: Request) -> None:  # noqa: D102  # see WaitingQueue
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            active = [other.counter for other in self._tenants.values()]
            tenant = self._tenants[request.tenant] = _Tenant(min(active, default=0))
        line = tenant.resuming if request in self._admitted else tenant.fresh
        line.push(request)
        self._lines[request] = line

    def peek(self) -> Request | None:  # noqa: D102  # see WaitingQueue
        best: tuple[int, int, Request] | None = None
        for tenant in self._tenants.values():
            request = self._head(tenant)
            if request is not None and (best is None or (tenant.counter, request.arrival) < best[:2]):
                best = (tenant.counter, request.arrival, request)
        return best[2] if best is not None else None

    def pop(self) -> Request:  # noqa: D102  # see WaitingQueue
        request = self.peek()
        if request is None:
            raise IndexError("nobody waits")
        self._lines.pop(request).pop()
        if request not in self._admitted:
            tenant = self._tenants[request.tenant]
            self._admitted.add(request)
            tenant.holding += 1
            tenant.counter += PROMPT_WEIGHT * request.prompt_len
        return request

    def discard(self, request: Request) -> bool:  # noqa: D102  # see WaitingQueue
        line = self._lines.pop(request, None)
        if line is None:
            return False
        line.discard(request)
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
        return len(self._lines)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._lines))

    def _head(self, tenant: _Tenant) -> Request | None:
        """Returns who is next of a tenant. One that has all the slots it may have gets no further one.

        What holds a slot does not wait behind those that would need one: after a restart nobody runs, and if all that
        may run stood behind them, nobody ever would.
        """
        resuming = tenant.resuming.peek()
        if tenant.holding >= self._limit:
            return resuming
        fresh = tenant.fresh.peek()
        if resuming is None or (fresh is not None and _rank(fresh) < _rank(resuming)):
            return fresh
        return resuming

    def _forget_idle(self, name: str) -> None:
        tenant = self._tenants[name]
        if not (tenant.holding or tenant.fresh or tenant.resuming):
            del self._tenants[name]


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival
