"""Token embedding and output head, which may share one matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # the customary name

from tercet_worker.layers.matrix import dense

if TYPE_CHECKING:
    from tercet_worker.layers.parameters import Destination, Placement

_REFINED = 8
"""Logits per row that are computed without rounding them to the model's dtype."""


class Embedding:
    """Rows of a matrix ``[V, H]`` by token id."""

    def __init__(self, vocab_size: int, hidden_size: int, place: Placement) -> None:
        self.matrix = place.matrix(hidden_size, (vocab_size,))

    def destinations(self, name: str) -> dict[str, Destination]:
        """Returns where ``{name}.weight`` goes."""
        return {f"{name}.weight": self.matrix.weight_destination(0)}

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns ``[T, H]`` for ids ``[T]``, int32 or int64; for a dense matrix."""
        return F.embedding(token_ids, dense(self.matrix).weight)


class Head:
    """From hidden states to logits: ``x Wᵀ``.

    Args:
        vocab_size: rows.
        hidden_size: columns.
        place: dtype, device and layout.
        tied: the embedding whose matrix is the head's too; None for a matrix of its own.
    """

    def __init__(self, vocab_size: int, hidden_size: int, place: Placement, *, tied: Embedding | None) -> None:
        self._own = tied is None
        self.matrix = place.matrix(hidden_size, (vocab_size,)) if tied is None else tied.matrix

    def destinations(self, name: str) -> dict[str, Destination]:
        """Returns where ``{name}.weight`` goes; nothing for a tied head."""
        return {f"{name}.weight": self.matrix.weight_destination(0)} if self._own else {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits ``[R, V]`` for ``x [R, H]``; for a dense matrix."""
        weight = dense(self.matrix).weight
        logits = F.linear(x, weight)
        if logits.dtype == torch.float32:
            return logits
        # A product that is rounded to 8 bits leaves the best tokens tied, or in the wrong order, as often as not. The
        # best few are what counts, so they are computed again without that rounding.
        best = logits.topk(min(_REFINED, logits.shape[1]), dim=1).indices  # [R, K]
        exact = torch.einsum("rh,rkh->rk", x.to(torch.float32), weight[best].to(torch.float32))
        return logits.to(torch.float32).scatter_(1, best, exact)
