"""What the command line says of models: sources, with or without names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tercet_shared.errors import ConfigurationError, bounded

if TYPE_CHECKING:
    from collections.abc import Sequence

_PATH_BEGINS = ("/", ".", "~")


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that was named at the start.

    Attributes:
        source: directory, file or hub id.
        names: under which it is served; none: the name of its checkpoint.
        revision: branch, tag or commit of a hub model, or None.
    """

    source: str
    names: tuple[str, ...] = ()
    revision: str | None = None


def named_models(
    models: Sequence[str], *, served_names: Sequence[str] = (), revision: str | None = None
) -> list[NamedModel]:
    """Returns the models of the command line, in its order; a source that is given twice is one model with more names.

    Args:
        models: each ``SOURCE`` or ``NAME=SOURCE``; what exists on disk is a source whatever is in it.
        served_names: names of the only model.
        revision: of the only model.

    Raises:
        ConfigurationError: they do not go together, or a name is empty or given to two models.
    """
    if len(models) != 1:
        for given, flag in ((served_names, "served_model_name"), (revision, "revision")):
            if given:
                hint = "give several as NAME=SOURCE" if flag == "served_model_name" else "the hub's default is taken"
                raise ConfigurationError(f"--{flag.replace('_', '-')} is for one MODEL; {hint}.", param=flag)
    found: dict[str, tuple[str, ...]] = {}
    owners: dict[str, str] = {}
    for model in models:
        name, source = _parts(model)
        if name is not None and owners.setdefault(name, source) != source:
            raise ConfigurationError(f"Two models are named {bounded(name, 100)!r} (MODEL).", param="model")
        own = served_names if name is None else (name, *served_names)
        found[source] = tuple(dict.fromkeys((*found.get(source, ()), *own)))
    return [NamedModel(source, names, revision) for source, names in found.items()]


def _parts(model: str) -> tuple[str | None, str]:
    name, separator, source = model.partition("=")
    if not separator or model.startswith(_PATH_BEGINS) or Path(model).exists():
        return None, model
    if not name.strip() or not source.strip():
        raise ConfigurationError(f"{bounded(model, 200)!r} is no model: give SOURCE or NAME=SOURCE.", param="model")
    return name.strip(), source.strip()
