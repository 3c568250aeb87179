"""What attention on a GPU needs of FlashInfer, so that it can be had without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from tercet_worker.attention.interface import AttentionSpec


class Wrapper(Protocol):
    """What FlashInfer's wrappers have in common; ``plan`` differs in its first arguments."""

    def plan(self, *args: Any, **options: Any) -> None:
        """Divides the work of a step. Reads tensors of the host only."""
        ...

    def run(self, q: Tensor, paged_kv_cache: Tensor, **options: Any) -> Tensor:
        """Attends for one layer."""
        ...


class Wrappers(Protocol):
    """Makes FlashInfer's wrappers. They share the workspace for partial results, which counts during one call only."""

    def check(self, spec: AttentionSpec) -> None:
        """Raises ConfigurationError unless there are kernels for such a model."""
        ...

    def schedule(self) -> Tensor:
        """Returns memory for the schedule of the plan in force, for wrappers of which one is in use at a time."""
        ...

    def graph(self, buffers: tuple[Tensor, Tensor, Tensor], schedule: Tensor) -> Wrapper:
        """Returns one for graphs of rows of one token; its offsets, pages and last lengths are in ``buffers``."""
        ...

    def decode(self) -> Wrapper:
        """Returns one for rows of one token."""
        ...

    def prefill(self) -> Wrapper:
        """Returns one for rows of any length."""
        ...

    def cascade(self) -> Wrapper:
        """Returns one with two levels: what all rows share, and the rest."""
        ...
