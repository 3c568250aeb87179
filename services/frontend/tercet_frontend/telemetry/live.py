"""What happens now: for a page that shows it.

    live = LiveStats(occupancy)          # made with the front end; requests record into it
    live.watch(pool)                     # when the cores are known
    live.snapshot()                      # whenever somebody looks: a few hundred microseconds

Rates are taken between snapshots: the first one has none.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tercet_frontend.telemetry.percentiles import WINDOW_S, Percentiles, RecentValues

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tercet_frontend.access.occupancy import Occupancy
    from tercet_frontend.cores.stream import CoreStream
    from tercet_frontend.telemetry.fleet import Pool

RATE_S: Final = 5.0
"""Seconds over which rates are taken, if there have been snapshots for so long."""

_APART_S: Final = 0.5
"""Least seconds between totals that are kept."""


@dataclass(frozen=True, slots=True)
class CoreNow:
    """One core, as it says itself; requests and tokens of all its front ends.

    Attributes:
        core_id: its name; empty before it was connected.
        address: of the core.
        model: that it serves.
        state: of the stream to it.
        running: requests in its steps.
        waiting: requests that wait.
        own: choices of this front end on it.
        kv_used: share of its KV blocks that requests hold.
        cached: share of prompt tokens that its prefix cache had, since its start.
        step_ms: duration of its latest step.
        output_tokens_per_s: of late.
        input_tokens_per_s: of late.
        preemptions: since its start.
    """

    core_id: str
    address: str
    model: str
    state: str
    running: int
    waiting: int
    own: int
    kv_used: float
    cached: float
    step_ms: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class LiveSnapshot:
    """The front end now, and over the last minute.

    Attributes:
        time: Unix seconds.
        running: requests of this front end that have their first token.
        waiting: those that have none yet.
        requests_per_s: that ended, of late.
        failed_per_s: those of them that failed or were aborted.
        output_tokens_per_s: of all cores, of late.
        input_tokens_per_s: of all cores, of late.
        time_to_first_token: seconds, of this front end's requests in the last minute.
        token_gap: seconds between tokens, of a part of its choices in the last minute.
        cores: each of them.
    """

    time: float
    running: int
    waiting: int
    requests_per_s: float
    failed_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    time_to_first_token: Percentiles
    token_gap: Percentiles
    cores: tuple[CoreNow, ...]


@dataclass(frozen=True, slots=True)
class _Totals:
    at: float
    requests: int
    failed: int
    cores: Mapping[str, tuple[int, int]]  # by id: output and input tokens


class LiveStats:
    """See the module. Memory is bounded whatever happens.

    Attributes:
        first_tokens: seconds until first tokens.
        gaps: seconds between tokens.

    Args:
        occupancy: of the front end.
        clock: seconds, monotonic.
    """

    def __init__(self, occupancy: Occupancy, clock: Callable[[], float] = time.monotonic) -> None:
        self.first_tokens = RecentValues(clock)
        self.gaps = RecentValues(clock)
        self._occupancy = occupancy
        self._clock = clock
        self._pool: Pool | None = None
        self._requests = 0
        self._failed = 0
        self._history: deque[_Totals] = deque(maxlen=int(WINDOW_S / _APART_S))

    def watch(self, pool: Pool) -> None:
        """Shows these cores from now on."""
        self._pool = pool

    def ended(self, *, failed: bool) -> None:
        """A request for a model is over."""
        self._requests += 1
        self._failed += failed

    def snapshot(self) -> LiveSnapshot:
        """Returns what is known now."""
        streams = [] if self._pool is None else list(self._pool.streams)
        now = _Totals(
            self._clock(),
            self._requests,
            self._failed,
            {s.core_id: (s.stats.output_tokens, s.stats.prompt_tokens) for s in streams if s.core_id},
        )
        before = self._before(now)
        cores = tuple(_core(stream, now, before) for stream in streams)
        return LiveSnapshot(
            time=time.time(),
            running=self._occupancy.running - self._occupancy.waiting,
            waiting=self._occupancy.waiting,
            requests_per_s=_rate(now.requests, before.requests, now.at - before.at),
            failed_per_s=_rate(now.failed, before.failed, now.at - before.at),
            output_tokens_per_s=sum(core.output_tokens_per_s for core in cores),
            input_tokens_per_s=sum(core.input_tokens_per_s for core in cores),
            time_to_first_token=self.first_tokens.percentiles(),
            token_gap=self.gaps.percentiles(),
            cores=cores,
        )

    def _before(self, now: _Totals) -> _Totals:
        """Returns the totals to compare with, and keeps ``now`` for later."""
        history = self._history
        while history and now.at - history[0].at > WINDOW_S:
            history.popleft()
        if not history or now.at - history[-1].at >= _APART_S:
            history.append(now)
        # The youngest that is old enough; else the oldest.
        return next((totals for totals in reversed(history) if now.at - totals.at >= RATE_S), history[0])


def _core(stream: CoreStream, now: _Totals, before: _Totals) -> CoreNow:
    stats, info = stream.stats, stream.info
    core_id = stream.core_id
    output, given = now.cores.get(core_id, (0, 0))
    # Of a core that is new, or has started again, nothing is known of before.
    old_output, old_given = before.cores.get(core_id, (output, given))
    seconds = now.at - before.at
    return CoreNow(
        core_id=core_id,
        address=stream.address,
        model="" if info is None else info.model_name,
        state=stream.state.value,
        running=stats.running,
        waiting=stats.waiting,
        own=stream.active,
        kv_used=1 - stats.free_blocks / stats.num_blocks if stats.num_blocks else 0.0,
        cached=stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
        step_ms=stats.step_ms,
        output_tokens_per_s=_rate(output, old_output, seconds),
        input_tokens_per_s=_rate(given, old_given, seconds),
        preemptions=stats.preemptions,
    )


def _rate(now: int, before: int, seconds: float) -> float:
    return max(now - before, 0) / seconds if seconds > 0 else 0.0
