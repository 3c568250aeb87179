"""Other names for models, and names whose requests are divided among models.

A name leads to models with weights. They are worked out once, at the start: an alias may lead to a split and a split to
aliases, and whatever the way, all that is left of it is `Aliases.targets`.

The choice. Requests of one session go to one model: each model gets a number from the session, the split and its own
name, and the smallest number per weight wins (weighted rendezvous hashing). So each gets its share of the sessions, and
when a model comes or goes, no session moves that was not its own. Requests without a session are drawn.
"""

from __future__ import annotations

import math
import random
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from tercet_shared.errors import ConfigurationError, bounded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_TARGETS = 64
"""Models of one split."""

MAX_WEIGHT = 1e9

_ALIAS, _SPLIT = "model_alias", "model_split"
_FLAGS = {_ALIAS: "--model-alias", _SPLIT: "--model-split"}
_FORMS = {_ALIAS: "NAME=MODEL", _SPLIT: "NAME=MODEL:WEIGHT,MODEL:WEIGHT"}


class Target(NamedTuple):
    """A model behind a name.

    Attributes:
        model: its own name.
        weight: its share of the requests, of all of them together 1.
    """

    model: str
    weight: float


_Ways = dict[str, tuple[str, tuple[Target, ...]]]
"""By name: the setting that it comes from, and where it leads."""


class Aliases:
    """What stands for what. Immutable.

    Args:
        aliases: each ``NAME=MODEL``.
        splits: each ``NAME=MODEL:WEIGHT,MODEL:WEIGHT``.
        models: names of models that are known at the start; no alias may have one of them.
        complete: whether there are no other models, so that a target must be one of them.
        draw: returns a number from 0 to 1, for requests without a session.

    Raises:
        ConfigurationError: one of them is not of that form, a name is given twice, leads to itself or to nothing.
    """

    def __init__(
        self,
        aliases: Sequence[str] = (),
        splits: Sequence[str] = (),
        *,
        models: Iterable[str] = (),
        complete: bool = False,
        draw: random.Random | None = None,
    ) -> None:
        self._draw = random.Random() if draw is None else draw  # noqa: S311  # shares of requests, no secrets
        known = frozenset(models)
        ways: _Ways = {}
        for param, given in ((_ALIAS, aliases), (_SPLIT, splits)):
            for text in given:
                name, targets = _parsed(text, param)
                if name in ways:
                    raise _wrong(param, f"the name {bounded(name, 100)!r} is given twice")
                if name in known:
                    raise _wrong(param, f"{bounded(name, 100)!r} is the name of a model")
                ways[name] = param, targets
        self._parents = {name: way[0].model for name, (param, way) in ways.items() if param == _ALIAS}
        self._targets = {name: _resolved(name, ways, known if complete else None) for name in ways}

    def __contains__(self, name: str) -> bool:
        return name in self._targets

    @property
    def targets(self) -> Mapping[str, Sequence[Target]]:
        """The models behind each name."""
        return self._targets

    def parent(self, name: str) -> str | None:
        """Returns what an alias stands for, as it was given; None for a split, and for what is neither."""
        return self._parents.get(name)

    def choose(self, name: str, served: Iterable[str], session: str = "") -> str | None:
        """Returns the model of a request for ``name``, which is an alias or a split.

        Args:
            name: as the client asked.
            served: models that can be served now; others do not count.
            session: whose request it is; empty for none.

        Returns:
            The model's own name; None where none of them is served.
        """
        able = set(served)
        candidates = [target for target in self._targets[name] if target.model in able]
        if len(candidates) < 2:
            return candidates[0].model if candidates else None
        if not session:
            weights = [target.weight for target in candidates]
            return self._draw.choices(candidates, weights)[0].model
        return min(candidates, key=lambda target: _distance(session, name, target)).model


def _distance(session: str, name: str, target: Target) -> float:
    digest = blake2b(digest_size=8)
    for part in (name, target.model, session):
        encoded = part.encode(errors="replace")
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    drawn = (int.from_bytes(digest.digest(), "little") + 1) / (2**64 + 1)
    return -math.log(drawn) / target.weight


def _resolved(name: str, ways: _Ways, known: frozenset[str] | None) -> list[Target]:
    """Returns the models behind ``name``, each once."""
    shares: dict[str, float] = {}

    def follow(step: str, share: float, passed: tuple[str, ...]) -> None:
        param, targets = ways[step]
        for target in targets:
            if target.model in passed:
                raise _wrong(param, f"{' → '.join((*passed, target.model))} leads in a circle")
            if target.model in ways:
                follow(target.model, share * target.weight, (*passed, target.model))
                continue
            if known is not None and target.model not in known:
                raise _wrong(
                    param, f"{bounded(step, 100)!r} leads to {bounded(target.model, 100)!r}, which is no model here"
                )
            shares[target.model] = shares.get(target.model, 0.0) + share * target.weight
        if len(shares) > MAX_TARGETS:
            raise _wrong(param, f"{bounded(name, 100)!r} leads to more than {MAX_TARGETS} models")

    follow(name, 1.0, (name,))
    return [Target(model, share) for model, share in shares.items()]


def _parsed(text: str, param: str) -> tuple[str, tuple[Target, ...]]:
    name, _, rest = (part.strip() for part in text.partition("="))
    parts = [part.strip() for part in rest.split(",")] if param == _SPLIT else [rest]
    if not name or not all(parts):
        raise _wrong(param, f"{bounded(text, 200)!r} is not of the form {_FORMS[param]}")
    if param == _ALIAS:
        return name, (Target(rest, 1.0),)
    weights: dict[str, float] = {}
    for part in parts:
        model, _, weight = part.rpartition(":")  # hub ids and files may have colons of their own
        if not model or model in weights:
            what = f"{bounded(model, 100)!r} is given twice" if model else f"{bounded(part, 200)!r} has no weight"
            raise _wrong(param, f"{bounded(name, 100)!r}: {what}; the form is {_FORMS[param]}")
        weights[model] = _weight(weight, name)
    total = sum(weights.values())
    if not total:
        raise _wrong(param, f"{bounded(name, 100)!r}: all weights are 0")
    return name, tuple(Target(model, weight / total) for model, weight in weights.items() if weight)


def _weight(text: str, name: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 <= weight <= MAX_WEIGHT:
        raise _wrong(_SPLIT, f"{bounded(name, 100)!r}: {bounded(text, 50)!r} is no weight, which is a number from 0 on")
    return weight


def _wrong(param: str, what: str) -> ConfigurationError:
    return ConfigurationError(f"{_FLAGS[param]}: {what}.", param=param)
