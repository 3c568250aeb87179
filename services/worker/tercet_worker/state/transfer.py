"""What a step yields, on its way to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Arrival(Protocol):
    """Tensors that were sent."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """On the host, in their order. What is in them counts once `wait` has returned."""
        ...

    def wait(self) -> None:
        """Waits for these tensors alone. May be called on any thread."""
        ...


Transfer = Callable[["Sequence[torch.Tensor]"], Arrival]
"""Sends tensors to the host and returns at once."""
