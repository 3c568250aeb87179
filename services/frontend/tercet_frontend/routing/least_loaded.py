"""Takes the core whose load is the smallest share of its slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tercet_frontend.routing.choice import Choice

if TYPE_CHECKING:
    from tercet_frontend.cores.interface import GenerationRequest
    from tercet_frontend.routing.columns import CoreColumns, Group

_FAILED_SHARE_MS = 1_000.0
"""A core that looks this much slower because it failed looks as if all its slots were taken."""


class LeastLoaded:
    """See the module; among equals, each in turn."""

    sink = None

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: GenerationRequest, group: Group, columns: CoreColumns, now: float) -> Choice:
        """See `RoutingPolicy.choose`."""
        rows, at = group.rows, group.at
        shares = columns.load[at] / columns.slots[at] + columns.shun_ms(at, now) / _FAILED_SHARE_MS
        equals = np.flatnonzero(shares == shares.min())
        self._turn += 1
        return Choice(int(rows[equals[self._turn % len(equals)]]), len(request.prompt_ids))
