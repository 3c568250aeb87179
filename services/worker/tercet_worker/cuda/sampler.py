"""What the sampler does with our kernels.

FlashInfer's sampler is not used to draw: its random numbers depend on the row in which a request happens to be, and
every request has a seed here, those of clients who gave none as well, so that it can go on in another batch, worker or
core with the very next token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_worker.cuda.kernels.sampling import draw_, penalize_, scan
from tercet_worker.sampling import SamplerParts

if TYPE_CHECKING:
    import torch

    from tercet_worker.sampling import SamplingBatch
    from tercet_worker.sampling.changes import Penalties


def kernel_parts() -> SamplerParts:
    """Returns the parts."""
    return SamplerParts(scan, _draw, _penalize)


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
