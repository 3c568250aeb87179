"""Root-mean-square normalization (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # the customary name

from tercet_worker.layers.destination import into

if TYPE_CHECKING:
    from tercet_worker.layers.parameters import Destination, Placement


class RMSNorm:
    """``x / sqrt(mean(x²) + eps) · w``, from the float32 residual stream to the dtype of the model."""

    def __init__(self, size: int, eps: float, place: Placement) -> None:
        self.weight = torch.empty(size, dtype=torch.float32, device=place.device)  # [H]
        self._dtype = place.dtype
        self._shape = (size,)
        self.eps = eps

    def destinations(self, name: str) -> dict[str, Destination]:
        """Returns where ``{name}.weight`` goes."""
        return {f"{name}.weight": into(self.weight)}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``[T, H]`` in the model's dtype for ``x [T, H]`` in float32."""
        return F.rms_norm(x, self._shape, self.weight, self.eps).to(self._dtype)
