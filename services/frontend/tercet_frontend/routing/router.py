"""Where requests go: the cores that take them, what was placed on each, and the policy that chooses.

A member is in the router between `Router.join` and `Member.leave`. A placement is, once each and in this order, placed,
started (its first token came; may be left out) and ended; what its core's departure has overtaken is ignored.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, TypeVar

from tercet_frontend.routing.columns import CoreColumns, CoreFacts, Group, LoadReport

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tercet_frontend.cores.interface import GenerationRequest
    from tercet_frontend.routing.policy import RoutingPolicy
    from tercet_shared.registry.interface import BlockBatch

C = TypeVar("C")
"""Whatever the caller submits to."""


class Member(Generic[C]):
    """A core that takes requests; made by `Router.join`.

    Attributes:
        core: as given to `Router.join`.
        facts: as given to `Router.join`.
        names: under which its model may be asked for now.
        row: in the columns; None once it has left.
        unstarted: placements whose first token has not come, the oldest first.
    """

    __slots__ = ("_router", "core", "facts", "names", "row", "unstarted")

    def __init__(self, router: Router[C], core: C, facts: CoreFacts, names: frozenset[str], row: int) -> None:
        self._router = router
        self.core = core
        self.facts = facts
        self.names = names
        self.row: int | None = row
        self.unstarted: dict[Placement[C], None] = {}

    def report(self, report: LoadReport) -> None:
        """Takes what the core says of its load; any value is survived."""
        if self.row is not None:
            now = self._router.now()
            self._router.columns.report(self.row, report, now)
            for oldest in self.unstarted:
                oldest.look(self.row, now)  # who is late need not have answered to be known for it
                break

    def serve(self, names: Collection[str]) -> None:
        """From now on the core's model may be asked for under ``names``, which may be none."""
        self.names = frozenset(names)
        self._router.regroup()

    def leave(self) -> None:
        """The core takes no more requests; its placements count no more. Twice is as once."""
        row, self.row = self.row, None
        if row is not None:
            self._router.remove(self, row)


class Placement(Generic[C]):
    """One submission of a request to a core; made by `Router.place`.

    Attributes:
        tokens: of the prompt that the core was expected to compute.
    """

    __slots__ = ("_at", "_expected_ms", "_member", "_over", "_router", "_started", "tokens")

    def __init__(self, router: Router[C], member: Member[C], tokens: int, at: float, expected_ms: float) -> None:
        self._router = router
        self._member = member
        self._at = at
        self._expected_ms = expected_ms
        self._started = False
        self._over = False
        self.tokens = tokens
        member.unstarted[self] = None

    @property
    def core(self) -> C:
        """Where the request goes."""
        return self._member.core

    @property
    def core_id(self) -> str:
        """Its name."""
        return self._member.facts.core_id

    def started(self) -> None:
        """The first token has come. Twice is as once."""
        row = self._member.row
        if row is not None and not self._started:
            self.look(row, self._router.now())
        self._settle()

    def look(self, row: int, now: float) -> None:
        """Compares how long the first token has taken until ``now`` with what was expected."""
        self._router.columns.took(row, self._expected_ms, now - self._at, now)

    def ended(self, *, failed: bool = False) -> None:
        """The submission is over, however it ended; ``failed`` where that was the core's fault. Twice is as once."""
        self._settle()
        if self._over:
            return
        self._over = True
        row = self._member.row
        if row is not None:
            self._router.columns.ended(row)
            if failed:
                self._router.columns.failed(row, self._router.now())

    def _settle(self) -> None:
        """The core has nothing left to compute of the prompt."""
        if not self._started:
            self._started = True
            self._member.unstarted.pop(self, None)
            if self._member.row is not None:
                self._router.columns.started(self._member.row, self.tokens)


class Router(Generic[C]):
    """See the module. For one event loop; every method returns at once. A `BlockSink`.

    Args:
        policy: chooses.
        clock: seconds of a clock that never goes back.
    """

    def __init__(self, policy: RoutingPolicy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.columns = CoreColumns()
        self._policy = policy
        self._clock = clock
        self._members: dict[int, Member[C]] = {}  # by row
        self._groups: dict[str, Group] = {}  # by model, for the cores of now

    @property
    def wants_blocks(self) -> bool:
        """Whether `blocks` should be told what cores have cached."""
        return self._policy.sink is not None

    def now(self) -> float:
        """Returns the time in milliseconds."""
        return self._clock() * 1e3

    def join(self, core: C, facts: CoreFacts, names: Collection[str]) -> Member[C]:
        """Returns a new member, for a core that takes requests from now on and on which nothing was placed yet.

        ``names`` are those under which its model may be asked for.
        """
        row = self.columns.add(facts)
        member = self._members[row] = Member(self, core, facts, frozenset(names), row)
        self.regroup()
        return member

    def regroup(self) -> None:
        """See `Member.serve`, which is to be called instead."""
        self._groups.clear()

    def remove(self, member: Member[C], row: int) -> None:
        """See `Member.leave`, which is to be called instead."""
        if self._members.get(row) is member:
            del self._members[row]
            self.columns.remove(row)
            self.regroup()

    def place(self, request: GenerationRequest, model: str, avoid: Collection[str] = ()) -> Placement[C] | None:
        """Chooses a core that serves ``model`` for ``request``, which counts as placed there from now on.

        ``avoid`` are ids of cores that are out of the question. Returns None where no core is left.
        """
        group = self._group(model)
        if avoid:
            rows = [row for row in group.rows.tolist() if self._members[row].facts.core_id not in avoid]
            group = Group(model, rows, self.columns)
        if not len(group.rows):
            return None
        now = self.now()
        group.refresh(self.columns, now)
        choice = self._policy.choose(request, group, self.columns, now)
        expected_ms = self.columns.expected_ms(choice.row, choice.tokens, now)
        self.columns.placed(choice.row, choice.tokens, now)
        return Placement(self, self._members[choice.row], choice.tokens, now, expected_ms)

    def blocks(self, core_id: str, incarnation: str, batch: BlockBatch) -> None:
        """See `BlockSink`."""
        if self._policy.sink is not None:
            self._policy.sink.blocks(core_id, incarnation, batch)

    def forget(self, core_id: str) -> None:
        """See `BlockSink`."""
        if self._policy.sink is not None:
            self._policy.sink.forget(core_id)

    def _group(self, model: str) -> Group:
        group = self._groups.get(model)
        if group is None:
            rows = [row for row, member in self._members.items() if model in member.names]
            group = Group(model, rows, self.columns)
            if rows:
                self._groups[model] = group
        return group
