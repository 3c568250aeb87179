"""Choices between two cores: those whose core was lost wait here, each for its turn, until another one has them.

    on a core ──lost──▶ pause ──its turn──▶ on another core
                          ▲          │ none is ready
                          └── ready ─┴──▶ waiting ──too long──▶ failed

A choice does not come back at once: when a core dies, each of its choices waits a little, each another while, and is
then routed by itself, with those before it counted where they are.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tercet_frontend.cores.backoff import Backoff
from tercet_frontend.cores.journey import Journey, Loss
from tercet_shared.errors import InternalError, OverloadedError, TercetError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_frontend.cores.generation import StreamGeneration
    from tercet_frontend.cores.options import StreamOptions

logger = logging.getLogger(__name__)

MAX_MOVES = 64
"""Times that one request is moved, for whatever reason: each costs the computing of all its tokens."""


@dataclass(slots=True)
class MigrationCounters:
    """What happened to choices whose core was lost, since the start.

    Attributes:
        losses: by reason.
        moved: submitted to another core, or again to the same.
        resumed_tokens: output tokens that went along.
        completed: had all their tokens already, and ended.
        failed: ended with an error, those that are `poisoned` included.
        poisoned: were running on too many cores that were lost.
    """

    losses: Counter[Loss] = field(default_factory=Counter)
    moved: int = 0
    resumed_tokens: int = 0
    completed: int = 0
    failed: int = 0
    poisoned: int = 0


class Migrator:
    """See the module. It is the `GenerationLink` of the choices that it has.

    Args:
        options: how long, and how often.
        place: submits a choice to another core; returns False when none is ready for it. Raises `TercetError` when
            none will ever take it.
        rng: source of the jitter.
    """

    def __init__(
        self,
        options: StreamOptions,
        place: Callable[[StreamGeneration, Journey], bool],
        rng: random.Random | None = None,
    ) -> None:
        self.counters = MigrationCounters()
        self._options = options
        self._place = place
        self._rng = rng or random.Random()  # noqa: S311  # jitter, not a secret
        self._pausing: dict[StreamGeneration, asyncio.TimerHandle] = {}
        self._waiting: dict[StreamGeneration, asyncio.TimerHandle] = {}
        self._closed = False

    def __len__(self) -> int:
        """Returns how many choices have no core now."""
        return len(self._pausing) + len(self._waiting)

    def lost(self, generation: StreamGeneration, loss: Loss, *, address: str, model: str, reason: str) -> None:
        """Takes a choice that has lost its core.

        Args:
            generation: the choice.
            loss: how.
            address: of the core.
            model: fingerprint of the model there.
            reason: what is known of it, in one sentence.
        """
        counters = self.counters
        counters.losses[loss] += 1
        finished = generation.outcome()
        if finished is not None:
            counters.completed += 1
            generation.end(finished)
            return
        journey = generation.journey
        if journey is None:
            options = self._options
            backoff = Backoff(options.backoff_first, options.backoff_limit, self._rng)
            journey = generation.journey = Journey(backoff)
        now = asyncio.get_running_loop().time()
        received = len(generation.received)
        journey.lost(loss, address=address, model=model, received=received, now=now, reason=reason)
        generation.depart(self, failed=loss.may_be_its_fault)
        refusal = self._refusal(journey)
        if refusal is None:
            self._pause(generation, journey)
        else:
            self._fail(generation, refusal)

    def cores_changed(self) -> None:
        """A core may be ready that was not: those that wait for one try again, each at its turn."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        for generation, timer in waiting.items():
            timer.cancel()
            journey = _journey_of(generation)
            journey.backoff.reset()  # they waited for a core, not for their turn
            self._pause(generation, journey)

    def close(self) -> None:
        """Fails all choices that have no core, and from now on all that lose theirs: the front end is stopping."""
        self._closed = True
        for generation in [*self._pausing, *self._waiting]:
            self._forget(generation)
            self._fail(generation, UnavailableError("The front end is stopping."))

    def finish(self, generation: StreamGeneration, output_tokens: int) -> None:  # noqa: ARG002  # see GenerationLink
        """See `GenerationLink`: no core has to be told."""
        self._forget(generation)

    def abort(self, generation: StreamGeneration, reason: str) -> None:  # noqa: ARG002  # see GenerationLink
        """See `GenerationLink`: no core has to be told."""
        self._forget(generation)

    def _refusal(self, journey: Journey) -> TercetError | None:
        """Returns why a choice is not submitted again, or None."""
        if self._closed:
            return UnavailableError("The front end is stopping.")
        if journey.losses >= self._options.max_attempts:
            self.counters.poisoned += 1
            return InternalError(
                f"{_cores(journey.losses)} lost while running this request, so no other core is given it."
            )
        if journey.moves >= MAX_MOVES:
            return UnavailableError(f"The request was moved {journey.moves} times and is given up: {journey.reason}")
        return None

    def _pause(self, generation: StreamGeneration, journey: Journey) -> None:
        loop = asyncio.get_running_loop()
        self._pausing[generation] = loop.call_later(journey.backoff.wait(), self._try, generation, journey)

    def _try(self, generation: StreamGeneration, journey: Journey) -> None:
        del self._pausing[generation]
        loop = asyncio.get_running_loop()
        left = self._options.migration_timeout - journey.waited - (loop.time() - journey.since)
        queue_left = queue_time_left(generation, loop.time())
        if queue_left is not None:
            left = min(left, queue_left)
        if left <= 0:
            self._expire(generation, journey)
            return
        try:
            placed = self._place(generation, journey)
        except TercetError as error:
            self._fail(generation, error)
            return
        if placed:
            journey.placed(loop.time())
            self.counters.moved += 1
            self.counters.resumed_tokens += len(generation.received)
        else:
            self._waiting[generation] = loop.call_later(left, self._expire, generation, journey)

    def _expire(self, generation: StreamGeneration, journey: Journey) -> None:
        self._waiting.pop(generation, None)
        queue_left = queue_time_left(generation, asyncio.get_running_loop().time())
        if queue_left is not None and queue_left <= 0:
            error: TercetError = OverloadedError("The request has waited for its first step as long as it may.")
        else:
            error = UnavailableError(f"The core that ran this request is gone, and no other is ready: {journey.reason}")
        self._fail(generation, error)

    def _fail(self, generation: StreamGeneration, error: TercetError) -> None:
        self.counters.failed += 1
        if not self._closed:
            logger.warning("request %s is given up: %s", generation.request.request_id, error.message)
        generation.fail(error)

    def _forget(self, generation: StreamGeneration) -> None:
        timer = self._pausing.pop(generation, None) or self._waiting.pop(generation, None)
        if timer is not None:
            timer.cancel()


def queue_time_left(generation: StreamGeneration, now: float) -> float | None:
    """Returns the seconds that a choice may still wait for its first step, from its first submission on.

    None: it has begun, or may wait for ever.
    """
    limit = generation.request.queue_timeout
    if not limit or generation.received:
        return None
    return generation.submitted + limit - now


def _journey_of(generation: StreamGeneration) -> Journey:
    if generation.journey is None:
        raise AssertionError("a generation without a core has lost one")
    return generation.journey


def _cores(count: int) -> str:
    return "A core was" if count == 1 else f"{count} cores were"
