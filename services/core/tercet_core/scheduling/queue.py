"""Who is next among the requests that wait: small policies, chosen by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tercet_core.scheduling.fair_share import FairShareQueue
from tercet_core.scheduling.ordered_queue import OrderedQueue
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
