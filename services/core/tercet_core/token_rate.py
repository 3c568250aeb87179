"""How long a token takes to compute, measured where it matters: in steps that compute prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tercet_shared.wire.step import StepPlan

_KEPT: Final = 0.9
"""What is left of the earlier steps' weight after each step: about the latest ten count."""


class TokenRate:
    """A moving average over steps, each weighed by its tokens."""

    def __init__(self) -> None:
        self._landed_at = 0.0
        self._seconds = 0.0
        self._tokens = 0.0

    @property
    def token_seconds(self) -> float:
        """Seconds per computed token; 0 before the first step with a prompt in it."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def landed(self, plan: StepPlan, sent_at: float, landed_at: float) -> None:
        """Takes note of a step, in the order of the plans; times in seconds of one clock.

        The worker computes one step after the other: a step that was sent while another ran begins when that ends.
        """
        begun, self._landed_at = max(sent_at, self._landed_at), landed_at
        tokens = int(plan.num_tokens.sum())
        if tokens > len(plan.slots):
            self._seconds = self._seconds * _KEPT + landed_at - begun
            self._tokens = self._tokens * _KEPT + tokens
