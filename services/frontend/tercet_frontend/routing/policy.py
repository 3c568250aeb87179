"""The interface of routing policies, and their names.

`tercet_frontend.routing.router.Router` knows the cores, as columns, and what this front end has placed on each; a
policy only chooses a row of them. To add one: write a class with `RoutingPolicy`'s methods in a file of its own and
name it in `_POLICIES`.

For who holds the streams: one ``Router(routing_policy(name))`` for all models.

* A core is connected, compatible and not draining: ``member = router.join(stream, CoreFacts(...), names)``.
* With every Stats: ``member.report(LoadReport(...))``. When its names change: ``member.serve(names)``.
* It is lost, drains, or welcomes with another incarnation: ``member.leave()``.
* For a request: ``placement = router.place(request, model, avoid)``, None where no core is left; it is submitted on
  ``placement.core``. ``placement.started()`` with its first token; ``placement.ended()`` once it is over, in whatever
  way, with ``failed=True`` where that was the core's fault.

Nobody else needs to count load. A router is a `BlockSink` too; block events are worth asking for where
`Router.wants_blocks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tercet_frontend.routing.choice import Choice
from tercet_frontend.routing.least_loaded import LeastLoaded
from tercet_frontend.routing.prefix import Prefix
from tercet_frontend.routing.round_robin import RoundRobin
from tercet_frontend.routing.session import Session
from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tercet_frontend.cores.interface import GenerationRequest
    from tercet_frontend.routing.columns import CoreColumns, Group
    from tercet_shared.registry.interface import BlockSink

__all__ = ["Choice", "RoutingPolicy", "policy_names", "routing_policy"]


class RoutingPolicy(Protocol):
    """Chooses a core for each request. Called from one event loop only; may keep state, must not block."""

    @property
    def sink(self) -> BlockSink | None:
        """Who wants to know what cores have cached; None where the choice does not depend on it."""

    def choose(self, request: GenerationRequest, group: Group, columns: CoreColumns, now: float) -> Choice:
        """Returns one of ``group``'s rows, of which there is at least one; ``now`` is in milliseconds.

        The request counts as placed there: the caller brings the columns up to date.
        """


_POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = {
    "prefix": Prefix,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "session": Session,
}


def policy_names() -> list[str]:
    """Returns the names that `routing_policy` knows."""
    return sorted(_POLICIES)


def routing_policy(name: str) -> RoutingPolicy:
    """Returns a new policy.

    Raises:
        ConfigurationError: there is none of that name.
    """
    build = _POLICIES.get(name)
    if build is None:
        raise ConfigurationError(f"There is no routing policy {name!r}; there are {', '.join(policy_names())}.")
    return build()
