"""What the pool of cores asks of the models: which names does a core serve here?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class CoreModel(Protocol):
    """What a core says of its model when it is connected."""

    @property
    def model_name(self) -> str:
        """What its worker calls it."""

    @property
    def served_names(self) -> Sequence[str]:
        """Under which it wants to be asked for; empty: `model_name`."""

    @property
    def tokenizer_fingerprint(self) -> str:
        """Of its tokenizer."""


class ModelNames(Protocol):
    """The models that this front end has the text of, as the pool of cores sees them."""

    def names_of(self, core: CoreModel) -> tuple[str, ...]:
        """Returns the names that requests have in `GenerationRequest.model` which this core can serve.

        None of them where the front end does not have the model, or has it with another tokenizer; that may change,
        see `watch`.
        """

    def refusal(self, core: CoreModel) -> str:
        """Returns in one sentence why `names_of` has nothing for this core."""

    def watch(self, changed: Callable[[], None]) -> None:
        """Has ``changed`` called whenever `names_of` may answer differently."""
