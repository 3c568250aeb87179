"""What clients may ask for now, and what a request for it works with: texts, cores and aliases put together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from tercet_frontend.admission import Serving
from tercet_frontend.models.aliases import Aliases
from tercet_shared.errors import ModelNotFoundError, UnavailableError, bounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_frontend.cores.interface import Cores, ServedModel
    from tercet_frontend.tokenizing import ModelText


class Texts(Protocol):
    """Texts of models, by their names; see `ModelCatalog`."""

    @property
    def names(self) -> Sequence[str]:
        """Those that are listed first, in this order; others follow by name."""

    def text(self, name: str) -> ModelText | None:
        """Returns the text of the model of that name, if it is here."""

    def known(self, name: str) -> bool:
        """Returns whether there is or was a model of that name, whether or not it can be served now."""

    def missing(self) -> str | None:
        """Returns why there is no model at all, in one sentence; None where there is one."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A name that can be asked for now.

    Attributes:
        model: under that name; of a split, the limits that any of its models keeps to.
        root: the model itself; of a split, its own name.
        parent: what an alias stands for, as the operator wrote it; None for models and splits.
    """

    model: ServedModel
    root: str
    parent: str | None = None


class ServedModels:
    """`Models` of `tercet_frontend.admission`.

    Args:
        texts: of the models.
        cores: run them.
        aliases: other names.
    """

    def __init__(self, texts: Texts, cores: Cores, aliases: Aliases | None = None) -> None:
        self._texts = texts
        self._cores = cores
        self._aliases = Aliases() if aliases is None else aliases

    def not_ready_reason(self) -> str | None:
        """See `Models`."""
        return self._texts.missing() or self._cores.not_ready_reason()

    def listed(self) -> list[ListedModel]:
        """See `Models`."""
        served = self._served()
        first = [name for name in self._texts.names if name in served]
        ordered = dict.fromkeys((*first, *sorted(served)))
        listed = [ListedModel(served[name], name) for name in ordered if name not in self._aliases]
        for name, targets in self._aliases.targets.items():
            behind = [served[target.model] for target in targets if target.model in served]
            if behind:
                least = replace(
                    behind[0],
                    name=name,
                    max_model_len=min(model.max_model_len for model in behind),
                    vocab_size=min(model.vocab_size for model in behind),
                )
                root = targets[0].model if len(targets) == 1 else name
                listed.append(ListedModel(least, root, self._aliases.parent(name)))
        return listed

    def serving(self, name: str, session: str = "") -> Serving:
        """See `Models`."""
        served = self._served()
        target: str | None = name
        if name in self._aliases:
            target = self._aliases.choose(name, served, session)
            if target is None:
                raise UnavailableError(f"No model behind {bounded(name, 100)!r} can be served now.", param="model")
        model = None if target is None else served.get(target)
        text = None if target is None else self._texts.text(target)
        if target is None or model is None or text is None:
            if self._texts.known(name):
                raise UnavailableError(f"The model {bounded(name, 100)!r} cannot be served now.", param="model")
            raise ModelNotFoundError(f"There is no model {bounded(name, 100)!r} here.", param="model")
        return Serving(text, self._cores, model if target == name else replace(model, name=name), target)

    def _served(self) -> dict[str, ServedModel]:
        return {model.name: model for model in self._cores.models() if self._texts.text(model.name) is not None}
