"""Notices on the event loop that a step is not answered, though its worker shows signs of life: its device hangs.

The timer counts its own rounds instead of looking at a clock: after a pause of the whole process (a suspended machine,
SIGSTOP) one round has passed, and the worker is not blamed for the rest.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS: Final = 10
"""Rounds for which the same step must have been awaited."""


class StepTimer:
    """A context manager; it runs while the context is open.

    Args:
        timeout_s: seconds that one step may take.
        awaited: returns the id of the step whose result is awaited now, or None.
        on_overdue: called on the loop, at most once, with the step that took longer.
    """

    def __init__(self, timeout_s: float, awaited: Callable[[], int | None], on_overdue: Callable[[int], None]) -> None:
        self._interval_s = timeout_s / ROUNDS
        self._awaited = awaited
        self._on_overdue = on_overdue
        self._step: int | None = None
        self._rounds = 0
        self._handle: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._handle = asyncio.get_running_loop().call_later(self._interval_s, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _look(self) -> None:
        step = self._awaited()
        self._rounds = self._rounds + 1 if step == self._step else 0
        self._step = step
        if step is not None and self._rounds >= ROUNDS:
            self._on_overdue(step)
            return
        self._handle = asyncio.get_running_loop().call_later(self._interval_s, self._look)
