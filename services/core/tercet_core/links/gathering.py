"""The ranks of a group that have come so far."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from tercet_core.links.group import GroupLink, Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tercet_shared.ipc.link import CloseReason, FrameLink
    from tercet_shared.wire.step import WorkerHello

_OWN: Final = frozenset({"incarnation", "rank", "answers", "device", "pid"})
"""Fields of a hello in which ranks may differ."""
_PATIENCE_S: Final = 30.0
"""Seconds after the latest rank within which another one must come: they met before, so they come together."""


class Gathering:
    """The ranks of one group on their way to be a worker.

    Args:
        first: the hello of the first that came, with which all others must agree.
        spawn: runs a coroutine in a task that somebody awaits.
        on_dissolved: told the reason when all were sent away.
    """

    def __init__(
        self,
        first: WorkerHello,
        spawn: Callable[[Coroutine[None, None, None]], None],
        on_dissolved: Callable[[Gathering, str], None],
    ) -> None:
        self.group = first.group
        self._first = first
        self._ranks: dict[int, Rank] = {}
        self._spawn = spawn
        self._on_dissolved = on_dissolved
        self._over = False
        self._last_arrival = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return [number for number in range(self._first.ranks) if number not in self._ranks]

    @property
    def waits_s(self) -> float:
        """Seconds since a rank came."""
        return time.monotonic() - self._last_arrival

    def refusal(self, hello: WorkerHello) -> str | None:
        """Returns why a rank of this group cannot join it, or None."""
        for name in type(hello).__slots__:
            own, theirs = getattr(hello, name), getattr(self._first, name)
            if name not in _OWN and own != theirs:
                return f"rank {hello.rank} says {name} {own}, but rank {self._first.rank} of its group {theirs}"
        if hello.rank in self._ranks:
            return f"rank {hello.rank} of the group is here already"
        answering = next((number for number, rank in self._ranks.items() if rank.hello.answers), None)
        if hello.answers and answering is not None:
            return f"rank {hello.rank} wants to answer for its group, but rank {answering} does"
        return None

    def add(self, link: FrameLink, hello: WorkerHello) -> GroupLink | None:
        """Takes a rank that was not refused; returns the group when it was the last one, and ends the gathering."""
        rank = Rank(link, hello)
        self._ranks[hello.rank] = rank
        self._last_arrival = time.monotonic()
        self._stop_timer()
        if self.missing:
            self._timer = asyncio.get_running_loop().call_later(_PATIENCE_S, self._give_up)
            link.on_closed(lambda reason: self._left(rank, reason))
            return None
        if not any(each.hello.answers for each in self._ranks.values()):
            self.dissolve("no rank of the group says that it answers")
            return None
        self._over = True
        return GroupLink(self._ranks, self._spawn)

    def dissolve(self, reason: str) -> None:
        """Sends everybody away."""
        if self._over:
            return
        self._over = True
        self._stop_timer()
        for rank in self._ranks.values():
            self._spawn(rank.link.close(reason))
        self._on_dissolved(self, reason)

    def lack(self) -> str:
        """Says in words which ranks have not come."""
        missing = [str(number) for number in self.missing]
        names = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing[:-1])} and {missing[-1]}"
        return f"{names} of {self._first.ranks}"

    def _give_up(self) -> None:
        self.dissolve(f"{self.lack()} did not come within {_PATIENCE_S:g} s after the others")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _left(self, rank: Rank, reason: CloseReason) -> None:
        self.dissolve(f"{rank.name} left before all were here: {reason.text}")
