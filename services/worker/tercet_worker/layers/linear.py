"""Linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F  # noqa: N812  # the customary name

from tercet_worker.layers.matrix import dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tercet_worker.layers.parameters import Destination, Placement


class Linear:
    """``y = x Wᵀ + b``. Several projections of the same input are merged into one product.

    Args:
        in_features: columns of the weight.
        out_features: rows of each merged part, in the order of the output's columns.
        bias: whether there is a bias (for all parts or none).
        place: dtype, device and layout.
        gated: whether the two parts are gate and input of a gated activation, and only used for that.
    """

    def __init__(
        self, in_features: int, out_features: Sequence[int], *, bias: bool, place: Placement, gated: bool = False
    ) -> None:
        self.matrix = place.matrix(in_features, out_features, bias=bias, gated=gated)

    def destinations(self, *names: str) -> dict[str, Destination]:
        """Returns where ``{name}.weight`` and ``{name}.bias`` of each part go; one name per part, in their order."""
        found: dict[str, Destination] = {}
        for part, (name, _) in enumerate(zip(names, self.matrix.out_features, strict=True)):
            found[f"{name}.weight"] = self.matrix.weight_destination(part)
            bias = self.matrix.bias_destination(part)
            if bias is not None:
                found[f"{name}.bias"] = bias
        return found

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``[T, sum of out]`` for ``x [T, in]``; for a dense matrix."""
        matrix = dense(self.matrix)
        return F.linear(x, matrix.weight, matrix.bias)
