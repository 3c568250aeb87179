"""How often one child is started again: a bounded number of times within a window, with growing delays."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tercet_shared.lifecycle.plan import RestartPolicy


class Restarts:
    """The restarts of one child under its policy."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._times: deque[float] = deque()  # of the latest restarts, within the window
        self.used = False
        """Whether there was one at all."""
        self.spent = ""
        """A sentence once there were too many."""

    def next_delay_s(self, now: float) -> float | None:
        """Counts a restart and returns the seconds to wait before it, or None when there were too many lately.

        Args:
            now: seconds on any clock that does not go back.
        """
        policy = self._policy
        while self._times and self._times[0] <= now - policy.window_s:
            self._times.popleft()
        if len(self._times) >= policy.most:
            self.spent = f"It had been started again {policy.most} times within {policy.window_s:g} s."
            return None
        self._times.append(now)
        self.used = True
        return float(policy.delay_s * 2 ** (len(self._times) - 1))
