"""From logits to tokens, in an order that is fixed here.

::

    raw logits → finite? → logit bias, allowed tokens, bad words → penalties → min-tokens mask → grammar mask
    → temperature → top-k → top-p → min-p → draw by Gumbel-max

(Tokens that may not be drawn are all taken out together, behind the penalties: an excluded token is excluded whatever
its logit is, and what of the exclusions holds where they would leave nothing is decided over all of them. See
`Restrictions`.)

Every step acts on each row by itself, and what is kept is defined without reference to how a sort breaks ties: tokens
are ordered by logit, then by lower id. So a row draws the same token alone and in any batch.

Legend: R rows, V vocabulary, K candidates in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tercet_worker.sampling.changes import GrammarSource, unpack
from tercet_worker.sampling.noise import RowKeys, gumbel
from tercet_worker.sampling.order import best_in_order
from tercet_worker.state.mirror import to_device

if TYPE_CHECKING:
    from tercet_worker.sampling.changes import Changes, Penalties
    from tercet_worker.sampling.params import SamplingBatch

_PIECE = 2 * 1024 * 1024
"""Logits that are processed at once where rows draw: bounds the working memory to a few times 8 MiB."""
_FEW, _SOME, _GROWTH = 256, 2048, 8
"""Candidates tried first without and at most with top-k, and the factor by which a row that needs more gets them."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was drawn."""

    token_ids: torch.Tensor  # int64 [R]; 0 where not finite
    finite: torch.Tensor  # bool [R]; whether the raw logits were


Scan = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""From float32 ``[R, V]`` to the highest (float32), the lowest id that has it (int64), and if all are finite (bool)."""


Draw = Callable[[torch.Tensor, torch.Tensor, "SamplingBatch", torch.Tensor, torch.Tensor], None]
"""Draws for some rows, from all tokens or from those that top-k and top-p leave: logits ``[R, V]``, their highest
``[R]``, parameters, rows, and tokens ``[R]``, of which those of the rows are written."""

Penalize = Callable[[torch.Tensor, "Penalties", torch.Tensor], None]
"""Does what ``Penalties.apply_`` does, with the same counts."""


@dataclass(frozen=True, slots=True)
class SamplerParts:
    """What a platform does in its own way; by torch where it is None."""

    scan: Scan | None = None
    draw: Draw | None = None
    penalize: Penalize | None = None
    truncated: Draw | None = None
    """Draws for rows with top-k or top-p."""


def best_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Is a `Scan`."""
    highest, tokens = logits.max(dim=1)  # the first of equals: the lowest id; NaN wins
    return highest, tokens, torch.isfinite(highest) & torch.isfinite(logits.amin(dim=1))


class Sampler:
    """Draws one token per row.

    Args:
        vocab_size: V.
        device: of the logits.
        scan: finds the best logit of every row; `best_of` by default.
        parts: other things that are done in the platform's way, and ``scan`` where that is None.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, scan: Scan | None = None, *, parts: SamplerParts | None = None
    ) -> None:
        self._parts = parts or SamplerParts()
        self._scan = scan or self._parts.scan or best_of
        self._vocab_size = vocab_size
        self._ids = torch.arange(vocab_size, dtype=torch.int32, device=device)  # [V]
        self._rows_at_once = max(1, _PIECE // vocab_size)
        self._counts: torch.Tensor | None = None  # float32 [rows at once, V] of zeros, once penalties were asked for
        # Asking the device how far it got costs a wait there; ordering everything does not.
        self._first_candidates = _FEW if device.type == "cpu" else vocab_size

    def __call__(self, logits: torch.Tensor, batch: SamplingBatch, grammar: GrammarSource | None = None) -> Sampled:
        """Returns a token per row of ``logits [R, V]``, float32 and contiguous; they are overwritten.

        Args:
            logits: raw.
            batch: the rows' parameters; made with ``gated`` where there is a grammar.
            grammar: gives the packed masks of all rows; asked when everything that needs no mask is done.
        """
        highest, tokens, finite = self._scan(logits)
        if batch.changes is not None:
            self._change_(logits, batch.changes, grammar)
            best = logits.index_select(0, batch.changes.rows).max(dim=1)
            highest.index_copy_(0, batch.changes.rows, best.values)
            tokens.index_copy_(0, batch.changes.rows, best.indices)
        if self._parts.draw is not None:
            self._parts.draw(logits, highest, batch, batch.plain_rows, tokens)
        else:
            for rows in _pieces(batch.plain_rows, self._rows_at_once):
                tokens.index_copy_(0, rows, self._draw_from_all(logits, highest, batch, rows))
        if self._parts.truncated is not None:
            self._parts.truncated(logits, highest, batch, batch.truncated_rows, tokens)
            return Sampled(tokens.masked_fill_(~finite, 0), finite)
        for rows in _pieces(batch.truncated_rows, self._rows_at_once):
            tokens.index_copy_(0, rows, self._draw_from_best(logits, highest, batch, rows))
        return Sampled(tokens.masked_fill_(~finite, 0), finite)

    def _change_(self, logits: torch.Tensor, changes: Changes, grammar: GrammarSource | None) -> None:
        if changes.bias is not None:
            changes.bias.apply_(logits)
        if changes.penalties is not None:
            if self._counts is None:
                self._counts = torch.zeros((self._rows_at_once, self._vocab_size), device=logits.device)
            if self._parts.penalize is not None:
                self._parts.penalize(logits, changes.penalties, self._counts)
            else:
                changes.penalties.apply_(logits, self._counts)
        if changes.restrictions is not None:
            forbidden = None
            if grammar is not None:
                words = to_device(grammar().view(np.uint8), logits.device)
                forbidden = unpack(words.view(len(logits), -1), self._vocab_size)
            changes.restrictions.apply_(logits, forbidden)

    def _draw_from_all(
        self, logits: torch.Tensor, highest: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor
    ) -> torch.Tensor:
        scaled = _scale(logits, highest, batch, rows)
        if batch.any_min_p:
            scaled.masked_fill_(scaled < batch.log_min_p[rows].unsqueeze(1), -torch.inf)
        return scaled.add_(gumbel(batch.keys.rows(rows), self._ids)).argmax(dim=1)

    def _draw_from_best(
        self, logits: torch.Tensor, highest: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor
    ) -> torch.Tensor:
        scaled = _scale(logits, highest, batch, rows)
        limits = _Truncation(
            top_k=batch.top_k[rows].unsqueeze(1),
            top_p=batch.top_p[rows].to(torch.float64).unsqueeze(1),
            log_min_p=batch.log_min_p[rows].unsqueeze(1),
            keys=batch.keys.rows(rows),
        )
        count = max(self._first_candidates, min(batch.largest_top_k, _SOME))
        tokens, enough = self._draw_from_candidates(scaled, limits, count)
        missing = torch.arange(len(rows), device=rows.device)
        while count < self._vocab_size:
            missing = missing[~enough]
            if not len(missing):
                break
            count *= _GROWTH
            tokens[missing], enough = self._draw_from_candidates(scaled[missing], limits.rows(missing), count)
        return tokens

    def _draw_from_candidates(
        self, scaled: torch.Tensor, limits: _Truncation, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws from at most ``count`` candidates; also says where no token beyond them would be kept."""
        count = min(count, self._vocab_size)
        ids, values = best_in_order(scaled, count, self._ids)  # [R, K] each
        rank = torch.arange(count, device=scaled.device)
        kept_by_k = (limits.top_k == 0) | (rank < limits.top_k)
        weights = torch.exp(values.to(torch.float64))
        if count < self._vocab_size:
            # Rows with top-k renormalize over what it kept, the others over everything.
            everything = torch.exp(scaled).sum(dim=1, keepdim=True, dtype=torch.float64)
            total = torch.where(limits.top_k > 0, (weights * kept_by_k).sum(dim=1, keepdim=True), everything)
        else:
            total = (weights * kept_by_k).sum(dim=1, keepdim=True)
        reached = weights.cumsum(dim=1)
        wanted = torch.where(limits.top_p < 1, limits.top_p * total, torch.inf)
        keep = kept_by_k & (reached - weights < wanted) & (values >= limits.log_min_p)
        keep[:, 0] = True
        scores = (values + gumbel(limits.keys, ids.to(torch.int32))).masked_fill_(~keep, -torch.inf)
        tokens = ids.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)
        has_k = (limits.top_k > 0) & (limits.top_k <= count)
        return tokens, (has_k | (reached[:, -1:] >= wanted)).squeeze(1)


@dataclass(frozen=True, slots=True)
class _Truncation:
    """Parameters of the rows that are drawn together, as columns ``[R, 1]``."""

    top_k: torch.Tensor
    top_p: torch.Tensor  # float64
    log_min_p: torch.Tensor
    keys: RowKeys

    def rows(self, index: torch.Tensor) -> _Truncation:
        return _Truncation(self.top_k[index], self.top_p[index], self.log_min_p[index], self.keys.rows(index))


def _pieces(rows: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Returns ``rows`` in pieces of at most ``size``; torch makes a piece of nothing, too."""
    return torch.split(rows, size) if len(rows) else ()


def _scale(logits: torch.Tensor, highest: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor) -> torch.Tensor:
    """Returns ``(logit - highest) / temperature`` as float32 ``[R, V]``.

    It is at most 0, so that no temperature overflows.
    """
    scaled = logits[rows]
    scaled -= highest[rows].unsqueeze(1)
    scaled /= batch.temperature[rows].unsqueeze(1)
    return scaled
