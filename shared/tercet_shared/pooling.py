"""How the hidden states of a prompt become one vector."""

from __future__ import annotations

from enum import IntEnum


class Pooling(IntEnum):
    """Which hidden states (after the final norm, float32) make the vector; values as on every wire."""

    NONE = 0  # the request generates text
    LAST = 1  # the last token's
    MEAN = 2  # the mean over all tokens of the prompt
