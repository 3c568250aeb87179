"""The core with the fewest requests for its size."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_frontend.cores.interface import GenerationRequest
    from tercet_frontend.routing.policy import C


class LeastLoaded:
    """Takes the core whose load is the smallest share of its slots; among equals, each in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: GenerationRequest, candidates: Sequence[C]) -> C:  # noqa: ARG002  # see RoutingPolicy
        """See `RoutingPolicy.choose`."""
        shares = [candidate.load / candidate.slots for candidate in candidates]
        least = min(shares)
        equals = [candidate for candidate, share in zip(candidates, shares, strict=True) if share == least]
        self._turn += 1
        return equals[self._turn % len(equals)]
