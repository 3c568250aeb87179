"""Takes the cores in turn, whatever their load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tercet_frontend.routing.choice import Choice
from tercet_frontend.routing.columns import PASSED_OVER_MS

if TYPE_CHECKING:
    from tercet_frontend.cores.interface import GenerationRequest
    from tercet_frontend.routing.columns import CoreColumns, Group


class RoundRobin:
    """See the module. Each model has its own turn; a core that has just failed is passed over while others have not."""

    sink = None

    def __init__(self) -> None:
        self._latest: dict[str, int] = {}  # row, by model

    def choose(self, request: GenerationRequest, group: Group, columns: CoreColumns, now: float) -> Choice:
        """See `RoutingPolicy.choose`."""
        rows = group.rows
        sound = rows[columns.shun_ms(group.at, now) <= PASSED_OVER_MS]
        if len(sound):
            rows = sound
        after = int(np.searchsorted(rows, self._latest.get(group.name, -1), side="right"))
        row = int(rows[after % len(rows)])
        self._latest[group.name] = row
        return Choice(row, len(request.prompt_ids))
