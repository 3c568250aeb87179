"""Token embedding and output head, which may share one matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # the customary name

from tercet_worker.layers.cut import Cut
from tercet_worker.layers.matrix import dense

if TYPE_CHECKING:
    from tercet_worker.layers.parameters import Destination, Placement

_REFINED = 8
"""Logits per row that are computed without rounding them to the model's dtype."""


class Embedding:
    """Rows of a matrix ``[V, H]`` by token id.

    Args:
        vocab: rows; a rank of several may hold some of them, and the sum over all ranks is meant.
        hidden_size: columns.
        place: dtype, device and layout.
    """

    def __init__(self, vocab: int | Cut, hidden_size: int, place: Placement) -> None:
        self.vocab = vocab if isinstance(vocab, Cut) else Cut.all(vocab)
        self._columns = Cut.all(hidden_size)
        self.matrix = place.matrix(hidden_size, (len(self.vocab),))

    @property
    def partial(self) -> bool:
        """Whether other ranks hold the rest."""
        return self.vocab.partial

    def destinations(self, name: str) -> dict[str, Destination]:
        """Returns where ``{name}.weight`` goes."""
        return {f"{name}.weight": self.matrix.weight_destination(0).cut(self.vocab, self._columns)}

    def own(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the row of every token that this rank holds, 0 for others, and which those others are (bool)."""
        rows = token_ids - self.vocab.begin
        others = (rows < 0) | (rows >= len(self.vocab))
        return rows.masked_fill_(others, 0), others

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns ``[T, H]`` for ids ``[T]``, int32 or int64; zeros for tokens of other ranks; for a dense matrix."""
        weight = dense(self.matrix).weight
        if not self.partial:
            return F.embedding(token_ids, weight)
        rows, others = self.own(token_ids)
        return F.embedding(rows, weight).masked_fill_(others.unsqueeze(1), 0)


class Head:
    """From hidden states to logits: ``x Wᵀ``.

    Args:
        vocab: rows; a rank of several may hold some of them, and computes those logits.
        hidden_size: columns.
        place: dtype, device and layout.
        tied: the embedding whose matrix is the head's too; None for a matrix of its own.
    """

    def __init__(self, vocab: int | Cut, hidden_size: int, place: Placement, *, tied: Embedding | None) -> None:
        held = Embedding(vocab, hidden_size, place) if tied is None else tied
        self._own = held if tied is None else None
        self.matrix = held.matrix
        self.vocab = held.vocab

    @property
    def partial(self) -> bool:
        """Whether other ranks compute the rest."""
        return self.vocab.partial

    def destinations(self, name: str) -> dict[str, Destination]:
        """Returns where ``{name}.weight`` goes; nothing for a tied head."""
        return {} if self._own is None else self._own.destinations(name)

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
