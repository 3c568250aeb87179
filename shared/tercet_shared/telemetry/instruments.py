"""Instruments: what code records into, cheap enough for a hot path, and what collectors read.

They follow OpenTelemetry's data model (cumulative sums and histograms with explicit bounds, attributes, exemplars), but
not its SDK, in which one recording costs tens of microseconds: here it is one look-up and a few additions. Names are
OpenTelemetry's, as ``tercet.step.duration``; what they become elsewhere is decided in `exposition` and `points`.

Recording belongs to one thread at a time. Collecting may run on another: it reads single numbers, each right at some
moment.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from opentelemetry.trace import SpanContext

SECONDS: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Bounds of times inside the engine: from planning a step (0.1 ms) to a long answer."""

MAX_SERIES: Final = 1_000
"""Different label values of one instrument; what comes later is counted under `OTHER`."""

OTHER: Final = "other"

Labels: TypeAlias = tuple[str, ...]
"""Values of an instrument's labels, in the order of their names."""

Number: TypeAlias = "int | float"
Observed: TypeAlias = "Callable[[], Number | Iterable[tuple[Labels, Number]]]"
"""Returns the number now; where the instrument has labels, one for each of their values."""


class Kind(Enum):
    """What an instrument's numbers mean."""

    COUNTER = "counter"  # only grows
    GAUGE = "gauge"  # goes up and down
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Description:
    """What an instrument is.

    Attributes:
        name: with dots.
        kind: of its numbers.
        unit: in UCUM, as ``s``, ``By`` or ``{token}``.
        text: one sentence.
        labels: names of its labels, with dots.
    """

    name: str
    kind: Kind
    unit: str
    text: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One recording of a traced request."""

    value: float
    time_ns: int
    trace_id: int
    span_id: int


@dataclass(slots=True)
class Distribution:
    """What a histogram holds for one set of label values: one count more than there are bounds."""

    counts: list[int]
    sum: float = 0.0
    least: float = float("inf")
    most: float = 0.0
    exemplars: dict[int, Exemplar] = field(default_factory=dict)  # the latest of each bucket

    @property
    def count(self) -> int:
        """Recordings."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of one instrument.

    Attributes:
        description: of the instrument.
        numbers: of a counter or gauge, by label values.
        distributions: of a histogram, by label values.
        bounds: of a histogram; a value equal to a bound counts below it.
    """

    description: Description
    numbers: Sequence[tuple[Labels, Number]] = ()
    distributions: Sequence[tuple[Labels, Distribution]] = ()
    bounds: tuple[float, ...] = ()


class Counter:
    """A number that only grows, for each set of label values."""

    __slots__ = ("_limit", "_values", "description")

    def __init__(self, description: Description, limit: int = MAX_SERIES) -> None:
        self.description = description
        self._limit = limit
        self._values: dict[Labels, Number] = {} if description.labels else {(): 0}

    def add(self, amount: Number = 1, labels: Labels = ()) -> None:
        """Counts ``amount``, which is not negative."""
        values = self._values
        if labels not in values and len(values) >= self._limit:
            labels = (OTHER,) * len(labels)
        values[labels] = values.get(labels, 0) + amount

    def read(self) -> Reading:
        """Returns what was counted."""
        return Reading(self.description, list(self._values.items()))


class Histogram:
    """How values are distributed, for each set of label values."""

    __slots__ = ("_bounds", "_limit", "_series", "description")

    def __init__(self, description: Description, bounds: Sequence[float], limit: int = MAX_SERIES) -> None:
        self.description = description
        self._bounds = tuple(bounds)
        self._limit = limit
        self._series: dict[Labels, Distribution] = {}

    def record(self, value: float, labels: Labels = (), trace: SpanContext | None = None) -> None:
        """Records ``value``; ``trace`` names the span of the traced request that it belongs to."""
        series = self._series.get(labels)
        if series is None:
            series = self._new(labels)
        bucket = bisect_left(self._bounds, value)
        series.counts[bucket] += 1
        series.sum += value
        if value > series.most:  # noqa: PLR1730  # a call takes longer
            series.most = value
        if value < series.least:  # noqa: PLR1730
            series.least = value
        if trace is not None:
            series.exemplars[bucket] = Exemplar(value, time.time_ns(), trace.trace_id, trace.span_id)

    def read(self) -> Reading:
        """Returns what was recorded."""
        # Copies: the next recording must not change what is being written out.
        found = [
            (labels, Distribution([*one.counts], one.sum, one.least, one.most, {**one.exemplars}))
            for labels, one in list(self._series.items())
        ]
        return Reading(self.description, distributions=found, bounds=self._bounds)

    def _new(self, labels: Labels) -> Distribution:
        if len(self._series) >= self._limit:
            labels = (OTHER,) * len(labels)
        return self._series.setdefault(labels, Distribution([0] * (len(self._bounds) + 1)))


class _Observation:
    def __init__(self, description: Description, value: Observed) -> None:
        self.description = description
        self._value = value

    def read(self) -> Reading:
        value = self._value()
        numbers = [((), value)] if isinstance(value, int | float) else list(value)
        return Reading(self.description, numbers)


class Meter:
    """Makes instruments, and reads them all."""

    def __init__(self) -> None:
        self._instruments: dict[str, Counter | Histogram | _Observation] = {}

    def counter(self, name: str, unit: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        """Returns a new counter."""
        made = Counter(Description(name, Kind.COUNTER, unit, text, labels))
        self._add(made)
        return made

    def histogram(
        self, name: str, unit: str, text: str, bounds: Sequence[float], labels: tuple[str, ...] = ()
    ) -> Histogram:
        """Returns a new histogram with these upper bounds, ascending."""
        made = Histogram(Description(name, Kind.HISTOGRAM, unit, text, labels), bounds)
        self._add(made)
        return made

    def observe(
        self, kind: Kind, name: str, unit: str, text: str, value: Observed, labels: tuple[str, ...] = ()
    ) -> None:
        """Has ``value`` called whenever somebody collects: the hot path pays nothing for it."""
        self._add(_Observation(Description(name, kind, unit, text, labels), value))

    def descriptions(self) -> list[Description]:
        """Returns what every instrument is."""
        return [instrument.description for instrument in self._instruments.values()]

    def collect(self) -> list[Reading]:
        """Returns the state of every instrument."""
        return [instrument.read() for instrument in list(self._instruments.values())]

    def _add(self, instrument: Counter | Histogram | _Observation) -> None:
        name = instrument.description.name
        if name in self._instruments:
            raise ValueError(f"there is an instrument {name} already")
        self._instruments[name] = instrument
