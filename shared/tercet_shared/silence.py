"""How both ends of a stream between a front end and a core notice that the other has fallen silent."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


async def until_silent(frames: Callable[[], int], *, timeout_s: float, interval_s: float) -> None:
    """Returns after silence.

    It counts intervals instead of looking at the clock: after a pause of this process itself, what the other end sent
    meanwhile is read before the next interval ends.

    Args:
        frames: returns how many frames have come so far.
        timeout_s: seconds without any that are too many.
        interval_s: seconds between two heartbeats of the other end.
    """
    allowed = max(math.ceil(timeout_s / interval_s), 1)
    silent, seen = 0, frames()
    while silent < allowed:
        await asyncio.sleep(timeout_s / allowed)
        now = frames()
        silent = silent + 1 if now == seen else 0
        seen = now
