"""Finds the request that makes steps fail, so that it ends alone and the others go on.

A step fails as a whole, and what it wrote cannot be trusted. So everything is computed again from known tokens, in
trials: the requests of the failed step go in halves, one half at a time, while all others wait. A half whose requests
each yield a token or end is cleared and goes on; one whose step fails is split again, and those that were cleared
wait for a while. A request whose step fails although nobody else is in it is the culprit. With n suspects one culprit
costs about log2(n) repetitions, and a fault that does not come again costs two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tercet_core.scheduling.request import Request
    from tercet_core.scheduling.scheduler import Scheduler


class Isolation:
    """The trials of one scheduler. Inactive until a step fails."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pending: list[list[Request]] = []  # groups to try, the next one last
        self._trial: dict[Request, int] = {}  # requests on trial, with the tokens that they knew when it began
        self._cleared: set[Request] = set()

    def failed(self) -> Request | None:
        """Takes note that the oldest step in flight failed; all steps in flight are forgotten.

        Returns:
            the request that is to end for it, if it is known by now.
        """
        owners = self._scheduler.suspects()
        accused = [request for request in owners if not self._passed(request)] or owners
        untried = [request for request in self._trial if request not in accused and not self._passed(request)]
        self._cleared.difference_update(accused)
        self._scheduler.restart()
        self._scheduler.set_aside()
        self._push(untried)
        alone = len(owners) == 1
        if not alone:
            middle = (len(accused) + 1) // 2
            self._push(accused[middle:])
            self._push(accused[:middle])
        self._next()
        return owners[0] if alone else None

    def advance(self) -> bool:
        """Lets a group that has passed make way for the next one; returns whether that was so."""
        if not self._trial or not all(self._passed(request) for request in self._trial):
            return False
        self._cleared.update(self._trial)
        self._next()
        return True

    def joined(self) -> None:
        """Takes note that a request was queued: it waits until the trials are over."""
        if self._trial:
            self._scheduler.set_aside()
            self._scheduler.bring_back(self._trial)

    def give_up(self) -> None:
        """Ends all trials, because there is another worker."""
        self._pending.clear()
        self._trial = {}
        self._cleared.clear()
        self._scheduler.bring_back()

    def _push(self, group: Iterable[Request]) -> None:
        if members := list(group):
            self._pending.append(members)

    def _next(self) -> None:
        table = self._scheduler.table
        self._trial = {}
        while self._pending and not self._trial:
            group = self._pending.pop()
            self._trial = {request: int(table.known[request.slot]) for request in group if request.slot is not None}
        if self._trial:
            self._scheduler.bring_back(self._trial)
        else:
            self._cleared.clear()
            self._scheduler.bring_back()

    def _passed(self, request: Request) -> bool:
        """Returns whether a request has ended, was cleared, or has yielded a token since its trial began."""
        if request.slot is None or request in self._cleared:
            return True
        known = self._trial.get(request)
        return known is not None and int(self._scheduler.table.known[request.slot]) > known
