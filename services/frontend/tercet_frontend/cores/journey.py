"""What is kept of the cores that a request has lost."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tercet_frontend.cores.backoff import Backoff


class Loss(Enum):
    """Why a core does not go on with a request that another one may run."""

    BROKEN = "broken"
    """The stream ended, or what came on it was malformed, without a word before."""
    SILENT = "silent"
    """Nothing has come on the stream for too long."""
    DRAINED = "drained"
    """The core had said that it drains, and then gave the request up or ended the stream; or the front end has left."""
    UNSENT = "unsent"
    """The stream ended before the request was written to it."""
    REJECTED = "rejected"
    """The core did not take the request: it drains, or has no worker."""
    ENDED = "ended"
    """The core gave the request up without having said that it drains: workers died of it, or it is stuck."""

    STALLED = "stalled"
    """The core's worker died, there has been no other for too long, and another core has the same model."""
    RENEWED = "renewed"
    """The same, but the worker had said that it goes."""

    @property
    def may_be_its_fault(self) -> bool:
        """Whether the request may be what killed the core, or its worker."""
        return self in {Loss.BROKEN, Loss.SILENT, Loss.ENDED, Loss.STALLED}


class Journey:
    """One request's way from core to core.

    Attributes:
        backoff: waits before it is submitted again.
        avoid: address of the core that it lost last.
        model: fingerprint of the model there.
        losses: cores that were lost in a way that may be the request's fault.
        moves: all of them.
        waited: seconds without a core since a token came.
        since: when it lost its core.
        reason: what was said when it did, in one sentence.
    """

    __slots__ = ("_progress", "avoid", "backoff", "losses", "model", "moves", "reason", "since", "waited")

    def __init__(self, backoff: Backoff) -> None:
        self.backoff = backoff
        self.avoid = ""
        self.model = ""
        self.losses = 0
        self.moves = 0
        self.waited = 0.0
        self.since = 0.0
        self.reason = ""
        self._progress = 0

    def lost(self, loss: Loss, *, address: str, model: str, received: int, now: float, reason: str) -> None:
        """Notes a loss, after ``received`` output tokens in all."""
        self.avoid, self.model, self.since, self.reason = address, model, now, reason
        self.losses += loss.may_be_its_fault
        self.moves += 1
        if received > self._progress:
            self._progress = received
            self.waited = 0.0
            self.backoff.reset()

    def placed(self, now: float) -> None:
        """Notes that it has a core again."""
        self.waited += now - self.since
