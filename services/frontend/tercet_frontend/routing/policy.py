"""The interface of routing policies, and their names.

A policy is asked once per submission and answers at once, from what it was given and what it remembers. To add one:
write a class with `RoutingPolicy.choose` in a file of its own and name it in `_POLICIES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from tercet_frontend.routing.least_loaded import LeastLoaded
from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tercet_frontend.cores.interface import GenerationRequest


class Candidate(Protocol):
    """A core that can take the request."""

    @property
    def core_id(self) -> str:
        """Its name, the same over restarts only if it was configured."""

    @property
    def incarnation(self) -> str:
        """Of its KV state: with a new one, all cached prefixes are gone."""

    @property
    def load(self) -> int:
        """Requests that it runs or that wait there, those just submitted included; as well as is known."""

    @property
    def slots(self) -> int:
        """Requests that it can run at once, at least 1."""


C = TypeVar("C", bound=Candidate)


class RoutingPolicy(Protocol):
    """Chooses a core for each request. Called from one event loop only; may keep state, must not block."""

    def choose(self, request: GenerationRequest, candidates: Sequence[C]) -> C:
        """Returns one of ``candidates`` (at least one; all are connected, compatible and not draining)."""


_POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = {
    "least_loaded": LeastLoaded,
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
