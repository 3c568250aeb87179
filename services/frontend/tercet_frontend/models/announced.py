"""Models that cores announce: found in the registry, read from where the cores say they are, forgotten when unused."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, NamedTuple

from tercet_frontend.cores.backoff import Backoff
from tercet_shared.errors import TercetError, bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tercet_frontend.models.library import LoadedModel, TextLibrary
    from tercet_shared.registry.interface import CoreRecord, Fleet

logger = logging.getLogger(__name__)

LINGER = 600.0
"""Seconds for which a text is kept that no core announces: cores come back, and reading takes a while."""

_RETRY_FIRST, _RETRY_LIMIT = 2.0, 300.0


class Place(NamedTuple):
    """Where a core says that its model is."""

    source: str
    revision: str


class _Source:
    """One place. Loading, loaded, or failed and tried again at ``due``."""

    __slots__ = ("backoff", "due", "failure", "loading", "model", "seen")

    def __init__(self, seen: float) -> None:
        self.seen = seen
        self.model: LoadedModel | None = None
        self.loading = False
        self.due = -math.inf
        self.failure = ""
        self.backoff = Backoff(_RETRY_FIRST, _RETRY_LIMIT)


class Announced:
    """The models of the registry's records.

    A name belongs to the first place from which a text came whose tokenizer is that of a core of that name. A place
    that cannot be read is tried again, ever more rarely; meanwhile its names are not listed. Texts that no core
    announces stay for `LINGER` seconds, or until there is no room for another one.

    Args:
        most: places whose texts are kept at a time.
        linger: seconds, see `LINGER`.
    """

    def __init__(self, most: int, *, linger: float = LINGER) -> None:
        self._most = most
        self._linger = linger
        self._sources: dict[Place, _Source] = {}
        self._names: dict[str, Place] = {}
        self._wanted: dict[str, dict[Place, set[str]]] = {}
        self._models: dict[str, LoadedModel] = {}
        self._wake = asyncio.Event()
        self._full = False

    @property
    def models(self) -> Mapping[str, LoadedModel]:
        """By name: those whose text is here."""
        return self._models

    def known(self, name: str) -> bool:
        """Returns whether a core announces that name, or did lately."""
        return name in self._wanted or name in self._models

    def missing(self) -> str:
        """Returns why there is no model, in one sentence."""
        if not self._wanted:
            return "No core has announced a model yet."
        names = ", ".join(sorted(self._wanted)[:3])
        failures = [source.failure for source in self._sources.values() if source.failure]
        if failures and not any(source.loading for source in self._sources.values()):
            return f"The tokenizer of {bounded(names, 200)} cannot be loaded: {failures[0]}"
        return f"The tokenizer of {bounded(names, 200)} is being loaded."

    async def run(self, fleet: Fleet, library: TextLibrary, taken: frozenset[str], changed: Callable[[], None]) -> None:
        """Follows the records of ``fleet`` until it is cancelled.

        Args:
            fleet: the registry.
            library: reads texts.
            taken: names that are not to be looked for.
            changed: called whenever `models` differs.
        """
        clock = asyncio.get_running_loop().time
        fleet.watch(self._wake.set)
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                now = clock()
                self._read(fleet.cores(), taken, now)
                for place in self._due(now):
                    source = self._sources[place]
                    source.loading = True
                    group.create_task(self._load(place, source, library))
                if self._bind():
                    changed()
                await self._pause(clock())

    async def _load(self, place: Place, source: _Source, library: TextLibrary) -> None:
        try:
            source.model = await library.get(place.source, place.revision or None)
        except (TercetError, OSError, RuntimeError) as error:  # the last: a home directory that this machine lacks
            failure = bounded(str(error), 300)
            if failure != source.failure:  # once, not at every attempt
                logger.warning("a model that cores announce cannot be loaded: %s", failure)
            source.failure = failure
            source.due = asyncio.get_running_loop().time() + source.backoff.wait()
        else:
            source.failure = ""
            logger.info("the tokenizer of %s is loaded", bounded(place.source, 200))
        finally:
            source.loading = False
            self._wake.set()

    def _read(self, records: Mapping[str, CoreRecord | None], taken: frozenset[str], now: float) -> None:
        """Takes in who announces what, and forgets what nobody has announced for long."""
        self._wanted = {}
        for record in records.values():
            if record is None or not record.source:
                continue
            place = Place(record.source, record.revision)
            for name in record.served_names:
                if name not in taken:
                    fingerprints = self._wanted.setdefault(name, {}).setdefault(place, set())
                    fingerprints.add(record.tokenizer_fingerprint)
        announced = {place for places in self._wanted.values() for place in places}
        for place in announced:
            self._sources.setdefault(place, _Source(now)).seen = now
        for place, source in list(self._sources.items()):
            gone = place not in announced and (source.model is None or now - source.seen >= self._linger)
            if gone and not source.loading:
                del self._sources[place]

    def _due(self, now: float) -> list[Place]:
        """Returns the places to be read now, for which there is room."""
        due: list[Place] = []
        held = sum(source.model is not None or source.loading for source in self._sources.values())
        crowded = False
        for places in self._wanted.values():
            for place, fingerprints in places.items():
                source = self._sources[place]
                if source.model is not None and source.model.tokenizer_fingerprint not in fingerprints:
                    self._differs(place, source, now)
                if source.model is not None or source.loading or source.due > now or place in due:
                    continue
                if held >= self._most and not self._make_room(now):
                    crowded = True
                    continue
                held = min(held + 1, self._most)
                due.append(place)
        if crowded and not self._full:
            logger.warning("cores announce more than %d models; the others are not served", self._most)
        self._full = crowded
        return due

    def _differs(self, place: Place, source: _Source, now: float) -> None:
        source.model = None  # so that it is read anew, and not taken from the library
        source.due = now + source.backoff.wait()
        failure = f"The tokenizer of {bounded(place.source, 200)} is not the one that its cores have."
        if failure != source.failure:
            logger.warning("%s", failure)
        source.failure = failure

    def _make_room(self, now: float) -> bool:
        unused = [
            (source.seen, place)
            for place, source in self._sources.items()
            if source.model is not None and source.seen < now
        ]
        if not unused:
            return False
        del self._sources[min(unused)[1]]
        return True

    def _bind(self) -> bool:
        """Works out which name has which text; returns whether that has changed."""
        models: dict[str, LoadedModel] = {}
        names: dict[str, Place] = {}
        for name, places in self._wanted.items():
            last = self._names.get(name)
            # The one that it has is the first to be asked, so that cores elsewhere do not change it.
            for place in sorted(places, key=lambda place: place != last):
                model = self._sources[place].model
                if model is not None and model.tokenizer_fingerprint in places[place]:
                    models[name], names[name] = model, place
                    break
        for name, place in self._names.items():
            source = self._sources.get(place)
            if name not in self._wanted and source is not None and source.model is not None:
                models[name], names[name] = source.model, place
        changed = models != self._models
        self._models, self._names = models, names
        return changed

    async def _pause(self, now: float) -> None:
        """Returns when there may be something to do: news, another attempt, or a text that has lingered."""
        announced = {place for places in self._wanted.values() for place in places}
        times = [math.inf]
        for place, source in self._sources.items():
            if source.loading:
                continue
            if place not in announced:
                times.append(source.seen + self._linger)
            elif source.model is None and source.due > now:
                times.append(source.due)
        soonest = min(times)
        try:
            async with asyncio.timeout(None if soonest == math.inf else max(soonest - now, 0.0)):
                await self._wake.wait()
        except TimeoutError:
            pass
