"""What a routing policy answers."""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    """Where a request goes.

    Attributes:
        row: of the core, in the columns.
        tokens: of the prompt that the core will have to compute.
    """

    row: int
    tokens: int
