"""Notices from outside when the core does nothing: a thread that watches numbers, whatever the event loop does.

Two things are watched. The loop beats a counter; when it no longer does, it hangs, and nothing that runs on it can
help. The engine counts plans and results; when that count stands still although there is work, the engine or its
worker is stuck. An idle engine has no work and is left alone.

The thread counts its own rounds instead of looking at a clock: after a pause of the whole process (a suspended machine,
SIGSTOP) one round has passed, and nobody is blamed for the rest.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS: Final = 10
"""Rounds without a change after which something counts as hanging."""


class Watched(Protocol):
    """What is read from another thread; single numbers, each right at some moment."""

    @property
    def progress(self) -> int:
        """A number that changes with every plan and every result."""

    @property
    def busy(self) -> bool:
        """Whether there is something to compute and somebody to compute it."""


class Watchdog:
    """Watches one engine on the loop that `run` is called on.

    Args:
        engine: what is watched.
        timeout_s: seconds without progress after which it counts as stuck.
        on_stuck: called once, on the loop, with a sentence, when the engine is stuck.
        on_hang: called once, on the watchdog's thread, with a sentence, when the loop itself is.
    """

    def __init__(
        self, engine: Watched, timeout_s: float, *, on_stuck: Callable[[str], None], on_hang: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self._on_hang = on_hang
        self._beats = 0
        self._over = threading.Event()

    async def run(self) -> None:
        """Watches until it is cancelled."""
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._watch, args=(loop,), name="watchdog", daemon=True)
        thread.start()
        try:
            while True:
                self._beats += 1
                await asyncio.sleep(self._timeout_s / ROUNDS / 2)
        finally:
            self._over.set()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        beats, silent = self._beats, 0
        progress, still = self._engine.progress, 0
        told = False
        while not self._over.wait(self._timeout_s / ROUNDS):
            silent = silent + 1 if self._beats == beats else 0
            beats = self._beats
            if silent >= ROUNDS:
                self._on_hang(f"The event loop of the core has been stuck for {self._timeout_s:g} s.")
                return
            stuck = self._engine.busy and self._engine.progress == progress and not silent
            still = still + 1 if stuck else 0
            progress = self._engine.progress
            if still >= ROUNDS and not told:
                told = True
                text = f"The core has work, but no step was planned or applied for {self._timeout_s:g} s."
                with suppress(RuntimeError):  # the loop was closed meanwhile
                    loop.call_soon_threadsafe(self._on_stuck, text)
