"""What is known of the cores that take requests: one NumPy column per figure, one row per core.

A decision over a thousand cores is a handful of vector operations; rows are written one at a time, when a core reports
or when a request is placed, begins or ends. What a core says of itself is believed within bounds only: its figures are
brought into range when they arrive, and what this front end has itself placed there counts whatever the core says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]
At = Rows | slice

DEFAULT_TOKEN_MS = 0.2
"""Milliseconds per prompt token where no core has said what they take it."""

ANSWER_TOKENS = 300
"""Length of an answer that is reckoned with: each other request that runs adds a token to each of its steps."""

SLOT_MS = 5_000.0
"""How long a request holds a slot; who waits for a slot waits this long, divided by the slots."""

SHUN_MS, SHUN_LIMIT_MS = 2_000.0, 30_000.0
"""By how much each failure makes a core look slower, and at most; it fades as time passes."""

PASSED_OVER_MS = 1_000.0
"""A core that looks slower by more, because it failed or was late, is passed over by policies that know no costs."""

LATE_MS = 500.0
"""A first token may be so late, and once more as late as it was expected, before its core is held to be slow."""

_FASTER, _SLOWER = 2.0, 64.0
"""By which factors a core may differ from the typical speed of its group and be believed; faster would attract."""

_LEAST_SHARE = 0.5
"""Of the tokens of requests whose first token has not come, so many are to be computed, whatever the core says."""

_MOST_REQUESTS, _MOST_TOKENS, _MOST_SLOTS = 1e6, 1e9, 4_096
_FRESH_MS = 1_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreFacts:
    """What does not change while a core stays connected, as its Welcome says.

    Attributes:
        core_id: its name.
        incarnation: of its KV state; with a new one all its cached prefixes are gone.
        model_fingerprint: as in `tercet_shared.hashing.root_key`.
        block_size: tokens per block of its KV cache.
        slots: requests that it can run at once.
    """

    core_id: str
    incarnation: str
    model_fingerprint: str
    block_size: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a core says of its load; any value is survived.

    Attributes:
        running: requests in slots, of all front ends.
        waiting: requests that have no slot yet.
        pending_tokens: prompt tokens of them that are not computed yet.
        token_ms: milliseconds per computed token; 0: not known.
    """

    running: float = 0
    waiting: float = 0
    pending_tokens: float = 0
    token_ms: float = 0.0


class Group:
    """The cores that serve one model now.

    Attributes:
        name: of the model.
        rows: int64[n], ascending.
        at: the same as an index: a slice where no row is left out, which needs no copying.
        kinds: model fingerprint, block size, and int64[m] which of ``rows`` have them.
    """

    __slots__ = ("_refresh_at", "at", "kinds", "name", "rows")

    def __init__(self, name: str, rows: Sequence[int], columns: CoreColumns) -> None:
        self.name = name
        self.rows = np.array(sorted(rows), np.int64)
        self.at: At = self.rows
        if len(rows) and self.rows[-1] - self.rows[0] == len(rows) - 1:
            self.at = slice(int(self.rows[0]), int(self.rows[-1]) + 1)
        of_row = columns.kind[self.rows]
        self.kinds = [(*columns.kinds[kind], np.flatnonzero(of_row == kind)) for kind in np.unique(of_row).tolist()]
        self._refresh_at = -math.inf

    def refresh(self, columns: CoreColumns, now: float) -> None:
        """Brings the speeds that are believed up to date, at most once per second."""
        if now >= self._refresh_at:
            self._refresh_at = now + _FRESH_MS
            columns.believe(self.rows)


class CoreColumns:
    """See the module. Rows of cores that left are used again. Times are in milliseconds of one clock.

    Attributes:
        facts: of each row; None where there is no core.
        load: float64[capacity] requests there: those of others at the latest report, and this front end's own now.
        slots: float64[capacity] at least 1.
        token_ms: float64[capacity] per prompt token, as far as it is believed; above 0.
        kinds: model fingerprints and block sizes that there have been.
        kind: int64[capacity] which of them a core has.
        ident: uint64[capacity] a hash of the core's name.
        version: changes whenever a core comes or goes.
    """

    def __init__(self) -> None:
        self.facts: list[CoreFacts | None] = []
        self.kinds: list[tuple[str, int]] = []
        self.version = 0
        self._free: list[int] = []
        self._shun_latest = -math.inf
        self._allocate(64)

    def add(self, facts: CoreFacts) -> int:
        """Returns the row of a new core, on which nothing runs."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.version += 1
        facts = self.facts[row] = replace(facts, block_size=max(facts.block_size, 1))
        kind = (facts.model_fingerprint, facts.block_size)
        if kind not in self.kinds:
            self.kinds.append(kind)
        self.kind[row] = self.kinds.index(kind)
        self.load[row] = self._others[row] = self._own[row] = 0.0
        self.slots[row] = min(max(facts.slots, 1), _MOST_SLOTS)
        self.token_ms[row] = self._typical_ms[row] = DEFAULT_TOKEN_MS
        self.ident[row] = int.from_bytes(blake2b(facts.core_id.encode(), digest_size=8).digest(), "little")
        self._said_token_ms[row] = self._busy_until[row] = self._unstarted[row] = self._shun_until[row] = 0.0
        self._settle(row)
        return row

    def remove(self, row: int) -> None:
        """The core is gone; the row may become another's."""
        self.version += 1
        self.facts[row] = None
        self._free.append(row)

    def report(self, row: int, report: LoadReport, now: float) -> None:
        """Takes what a core says of its load."""
        there = _within(report.running, _MOST_REQUESTS) + _within(report.waiting, _MOST_REQUESTS)
        self._others[row] = max(there - self._own.item(row), 0.0)
        said, typical = _within(report.token_ms, 1e6), self._typical_ms.item(row)
        self._said_token_ms[row] = said
        self.token_ms[row] = min(max(said, typical / _FASTER), typical * _SLOWER) if said else typical
        self._busy_until[row] = now + _within(report.pending_tokens, _MOST_TOKENS) * self.token_ms.item(row)
        self._settle(row)

    def placed(self, row: int, tokens: int, now: float) -> None:
        """A request with ``tokens`` tokens to compute goes to the core."""
        self._own[row] += 1.0
        self._unstarted[row] += tokens
        self._busy_until[row] = max(self._busy_until.item(row), now) + tokens * self.token_ms.item(row)
        self._settle(row)

    def started(self, row: int, tokens: int) -> None:
        """The ``tokens`` of a request that was placed need no computing any more."""
        self._unstarted[row] = max(self._unstarted.item(row) - tokens, 0.0)
        self._settle(row)

    def ended(self, row: int) -> None:
        """A request that was placed is over."""
        self._own[row] = max(self._own.item(row) - 1.0, 0.0)
        self._settle(row)

    def failed(self, row: int, now: float) -> None:
        """The core failed a request: for a while it looks slower, so that one which fails fast does not look idle."""
        self._shun(row, max(self._shun_until.item(row), now) + SHUN_MS, now)

    def expected_ms(self, row: int, tokens: int, now: float) -> float:
        """Returns how long a request with ``tokens`` tokens to compute is expected to take to its first token."""
        token_ms: float = self.token_ms.item(row)
        wait: float = max(self._busy_until.item(row) - now, self._least.item(row) * token_ms)
        wait += self._slot_ms.item(row)
        answering: float = self._answering.item(row)
        return wait + (answering + tokens) * token_ms

    def took(self, row: int, expected_ms: float, took_ms: float, now: float) -> None:
        """A request's first token came ``took_ms`` after it was placed, or has not come for so long.

        A core that was far slower than what it says of itself looks that much slower, for as long as it was late.
        """
        if took_ms > 2.0 * expected_ms + LATE_MS:
            self._shun(row, now + took_ms - expected_ms, now)

    def _shun(self, row: int, until: float, now: float) -> None:
        until = min(max(until, self._shun_until.item(row)), now + SHUN_LIMIT_MS)
        self._shun_until[row] = until
        self._shun_latest = max(self._shun_latest, until)

    def wait_ms(self, at: At, now: float) -> F64:
        """Returns what a new request is expected to wait for others, float64[n].

        The prompt tokens before it, as of the latest report and what was placed since, less what the time since has
        sufficed for; but never less than half of what this front end has placed there without having seen its first
        token, whatever the core says. Then the wait for a slot, and what the running requests will take of the
        answer's steps.
        """
        token_ms = self.token_ms[at]
        wait = self._busy_until[at] - now
        np.maximum(wait, self._least[at] * token_ms, out=wait)
        wait += self._answering[at] * token_ms
        wait += self._slot_ms[at]
        if now < self._shun_latest:
            wait += self.shun_ms(at, now)
        return wait

    def shun_ms(self, at: At, now: float) -> F64:
        """Returns by how much each core looks slower because it failed or was late, float64[n], 0 for most."""
        return np.maximum(self._shun_until[at] - now, 0.0)

    def believe(self, rows: Rows) -> None:
        """Sets `token_ms` of a group's rows: what they say where it is near what is typical among them."""
        said = self._said_token_ms[rows]
        # Who does not know counts too, so that a few who do cannot speak for all.
        typical = min(max(float(np.median(np.where(said > 0, said, DEFAULT_TOKEN_MS))), 1e-4), 1e4)
        self._typical_ms[rows] = typical
        self.token_ms[rows] = np.where(said > 0, np.clip(said, typical / _FASTER, typical * _SLOWER), typical)

    def _settle(self, row: int) -> None:
        """Works out what only changes with the row, so that a decision need not."""
        load, slots = self._others.item(row) + self._own.item(row), self.slots.item(row)
        self.load[row] = load
        self._answering[row] = min(load, slots) * ANSWER_TOKENS
        self._slot_ms[row] = max(load + 1.0 - slots, 0.0) * SLOT_MS / slots
        self._least[row] = self._unstarted.item(row) * _LEAST_SHARE

    def _allocate(self, capacity: int) -> None:
        self.load = np.zeros(capacity)
        self.slots = np.ones(capacity)
        self.token_ms = np.full(capacity, DEFAULT_TOKEN_MS)
        self.kind = np.zeros(capacity, np.int64)
        self.ident: U64 = np.zeros(capacity, np.uint64)
        self._others = np.zeros(capacity)
        self._own = np.zeros(capacity)
        self._unstarted = np.zeros(capacity)  # prompt tokens of own requests whose first token has not come
        self._said_token_ms = np.zeros(capacity)
        self._typical_ms = np.full(capacity, DEFAULT_TOKEN_MS)  # of its group
        self._busy_until = np.zeros(capacity)  # when the prompt tokens that are there now will be computed
        self._shun_until = np.zeros(capacity)
        self._answering = np.zeros(capacity)  # tokens of other answers, which share the steps of a new one
        self._slot_ms = np.zeros(capacity)  # to wait until a slot is free
        self._least = np.zeros(capacity)  # prompt tokens that are still to be computed, whatever the core says
        self._free += range(capacity - 1, len(self.facts) - 1, -1)
        self.facts += [None] * (capacity - len(self.facts))

    def _grow(self) -> None:
        columns = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        held = len(self.facts)
        self._allocate(2 * held)
        for name, column in columns.items():
            getattr(self, name)[:held] = column


def _within(value: float, most: float) -> float:
    """Returns ``value`` within 0 and ``most``; 0 where it is no number."""
    return min(max(value, 0.0), most) if value == value else 0.0  # noqa: PLR0124  # NaN is the one that differs
