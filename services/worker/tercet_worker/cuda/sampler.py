"""What the sampler does with our kernels.

FlashInfer's sampler is not used to draw: its random numbers depend on the row in which a request happens to be, and
every request has a seed here, those of clients who gave none as well, so that it can go on in another batch, worker or
core with the very next token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tercet_worker.cuda.kernels.sampling import draw_, penalize_, scan
from tercet_worker.sampling import SamplerParts
from tercet_worker.sampling.noise import RowKeys

if TYPE_CHECKING:
    from tercet_worker.sampling import SamplingBatch
    from tercet_worker.sampling.changes import Penalties


def kernel_parts() -> SamplerParts:
    """Returns the parts."""
    return SamplerParts(scan, _draw, _penalize)


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Launches all kernels once, so that no request waits until they are compiled."""
    logits = torch.zeros((1, vocab_size), device=device)
    number, none = torch.ones(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    word = none.to(torch.int32)
    highest, tokens, _ = scan(logits)
    draw_(logits, highest, number, number, RowKeys(word, word), none, tokens)
    counts = torch.zeros_like(logits)
    penalize_(
        logits, counts, rows=none, owner=none, tokens=none, output=number, repetition=number, frequency=number,
        presence=number,
    )  # fmt: skip


def _draw(
    logits: torch.Tensor, highest: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor, tokens: torch.Tensor
) -> None:
    draw_(logits, highest, batch.temperature, batch.log_min_p, batch.keys, rows, tokens)


def _penalize(logits: torch.Tensor, penalties: Penalties, counts: torch.Tensor) -> None:
    offsets, most = penalties.offsets, len(counts)
    for first in range(0, len(offsets) - 1, most):
        last = min(first + most, len(offsets) - 1)
        part = slice(int(offsets[first]), int(offsets[last]))
        rows = slice(first, last)
        penalize_(
            logits,
            counts,
            rows=penalties.rows[rows],
            owner=penalties.owner[part] - first,
            tokens=penalties.tokens[part],
            output=penalties.output[part],
            repetition=penalties.repetition[rows].contiguous(),
            frequency=penalties.frequency[rows].contiguous(),
            presence=penalties.presence[rows].contiguous(),
        )
