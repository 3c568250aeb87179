"""Linear layers. This class alone knows how a weight lies in memory, so that a packed kernel can take it over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # the customary name

from tercet_worker.layers.parameters import Destination, Placement, into

if TYPE_CHECKING:
    from collections.abc import Sequence


class Linear:
    """``y = x Wᵀ + b``. Several projections of the same input are merged into one product.

    Args:
        in_features: columns of the weight.
        out_features: rows of each merged part, in the order of the output's columns.
        bias: whether there is a bias (for all parts or none).
        place: dtype and device.
    """

    def __init__(self, in_features: int, out_features: Sequence[int], *, bias: bool, place: Placement) -> None:
        self.out_features = tuple(out_features)
        self._weight = place.empty(sum(out_features), in_features)  # [out, in]
        self._bias = place.empty(sum(out_features)) if bias else None  # [out]

    def destinations(self, *names: str) -> dict[str, Destination]:
        """Returns where ``{name}.weight`` and ``{name}.bias`` of each part go; one name per part, in their order."""
        found: dict[str, Destination] = {}
        start = 0
        for name, size in zip(names, self.out_features, strict=True):
            found[f"{name}.weight"] = into(self._weight[start : start + size])
            if self._bias is not None:
                found[f"{name}.bias"] = into(self._bias[start : start + size])
            start += size
        return found

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``[T, sum of out]`` for ``x [T, in]``."""
        return F.linear(x, self._weight, self._bias)
