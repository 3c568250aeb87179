"""Models of a front end without files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tercet_frontend.models import ServedModels

if TYPE_CHECKING:
    from tercet_frontend.cores.interface import Cores
    from tercet_frontend.tokenizing import ModelText


@dataclass
class OneText:
    """The same text for every name."""

    model: ModelText
    names: Sequence[str] = ()

    def text(self, _name: str) -> ModelText | None:
        return self.model

    def known(self, _name: str) -> bool:
        return False

    def missing(self) -> str | None:
        return None


def one_model(text: ModelText, cores: Cores) -> ServedModels:
    """Returns what requests work with where all cores serve one model."""
    return ServedModels(OneText(text), cores)
