"""Whose text is here: the models that were named at the start, and those that cores announce.

The former are loaded once and stay. The latter come and go (see `Announced`): a core writes down where its model is,
and the front end reads its tokenizer and template from there, if it can.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tercet_shared.errors import bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tercet_frontend.models.announced import Announced
    from tercet_frontend.models.interface import CoreModel
    from tercet_frontend.models.library import LoadedModel, TextLibrary
    from tercet_frontend.models.sources import NamedModel
    from tercet_frontend.tokenizing import ModelText
    from tercet_shared.registry.interface import Fleet


@dataclass(frozen=True, slots=True)
class _Entry:
    """A model that was named at the start.

    Attributes:
        names: under which clients ask for it.
        known_as: names by which a core that serves it may call it.
        model: its text.
    """

    names: tuple[str, ...]
    known_as: frozenset[str]
    model: LoadedModel


class ModelCatalog:
    """`ModelNames`, and the text of each of them. Building it reads nothing; `load` and `run` do.

    Where a single model was named and nothing is discovered, every core with its tokenizer serves it, whatever the core
    calls it. Otherwise names decide: those of the command line, that of the checkpoint, those that cores announce.

    Args:
        named: at the start.
        library: reads checkpoints.
        announced: those that cores announce; None takes no notice of them.
    """

    def __init__(self, named: Sequence[NamedModel], library: TextLibrary, announced: Announced | None = None) -> None:
        self._named = tuple(named)
        self._library = library
        self._announced = announced
        self._entries: list[_Entry] = []
        self._texts: dict[str, LoadedModel] = {}
        self._watchers: list[Callable[[], None]] = []
        self._only = len(named) == 1 and announced is None

    async def load(self) -> None:
        """Reads the models that were named at the start.

        Raises:
            CheckpointError: one of them cannot be read.
            ConfigurationError: the parsers that were asked for do not exist.
        """
        for named in self._named:
            model = await self._library.get(named.source, named.revision)
            names = named.names or (model.name,)
            self._entries.append(_Entry(names, frozenset((*names, model.name)), model))
            for name in names:
                self._texts.setdefault(name, model)
            self._changed()

    async def run(self, fleet: Fleet) -> None:
        """Follows what cores announce, until it is cancelled. Nothing that is wrong with a model ends it."""
        if self._announced is None:
            await asyncio.Event().wait()
            return
        taken = frozenset().union(*(entry.known_as for entry in self._entries))
        await self._announced.run(fleet, self._library, taken, self._changed)

    @property
    def names(self) -> list[str]:
        """Names of the models that were named at the start and are loaded, in the order of the command line."""
        return list(self._texts)

    def text(self, name: str) -> ModelText | None:
        """Returns the text of the model of that name, if it is here."""
        model = self._texts.get(name) or (self._announced.models.get(name) if self._announced is not None else None)
        return None if model is None else model.text

    def known(self, name: str) -> bool:
        """Returns whether there is or was a model of that name, whether or not it can be served now."""
        return name in self._texts or (self._announced is not None and self._announced.known(name))

    def missing(self) -> str | None:
        """Returns why there is no model at all, in one sentence; None where there is one."""
        if self._texts or (self._announced is not None and self._announced.models):
            return None
        if self._announced is None or len(self._entries) < len(self._named):
            return "The tokenizer is being loaded."
        return self._announced.missing()

    def names_of(self, core: CoreModel) -> tuple[str, ...]:
        """See `ModelNames`."""
        stated = core.served_names or (core.model_name,)
        found: dict[str, None] = {}
        for entry in self._entries:
            if entry.model.tokenizer_fingerprint == core.tokenizer_fingerprint and (
                self._only or not entry.known_as.isdisjoint(stated)
            ):
                found.update(dict.fromkeys(entry.names))
        if self._announced is not None:
            for name in stated:
                model = self._announced.models.get(name)
                if model is not None and model.tokenizer_fingerprint == core.tokenizer_fingerprint:
                    found.setdefault(name)
        return tuple(found)

    def refusal(self, core: CoreModel) -> str:
        """See `ModelNames`."""
        stated = core.served_names or (core.model_name,)
        shown = bounded(", ".join(stated[:3]), 200)
        here = self._only or any(self.text(name) is not None for name in stated)
        if here or any(not entry.known_as.isdisjoint(stated) for entry in self._entries):
            return f"A core serves {shown}, whose tokenizer differs from this front end's."
        return f"A core serves {shown}, whose tokenizer this front end does not have."

    def watch(self, changed: Callable[[], None]) -> None:
        """See `ModelNames`."""
        self._watchers.append(changed)

    def _changed(self) -> None:
        for changed in self._watchers:
            changed()
