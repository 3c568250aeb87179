"""How many tokens of a stream travel together.

One, as long as a front end writes them with ease. Every event costs it and its client a system call or two, whether it
carries one token or three; where a thousand streams want more events than that, tokens that would wait for their turn
anyway go along with the next one.
"""

from __future__ import annotations

_WINDOW = 0.25
"""Seconds over which tokens are counted."""


class Pace:
    """Counts the tokens of all streams of a front end, and says how many steps' tokens an event should carry.

    Args:
        most: events per second above which tokens go together; 0 never lets them.
    """

    def __init__(self, most: float = 0.0) -> None:
        self.steps = 1
        """Steps whose tokens go together now."""
        self._most = most
        self._tokens = 0
        self._since = -_WINDOW

    def count(self, tokens: int, now: float) -> None:
        """Takes note of ``tokens`` that came at ``now``, in seconds of any clock that only rises."""
        if not self._most:
            return
        elapsed = now - self._since
        if elapsed >= _WINDOW:
            # A window that is much too long was one without traffic: it says nothing about what comes.
            rate = self._tokens / elapsed if elapsed < 2 * _WINDOW else 0.0
            self.steps = max(1, round(rate / self._most))
            self._tokens = 0
            self._since = now
        self._tokens += tokens
