"""Linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F  # noqa: N812  # the customary name

from tercet_worker.layers.cut import Cut
from tercet_worker.layers.matrix import dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tercet_worker.layers.parameters import Destination, Placement


class Linear:
    """``y = x Wᵀ + b``. Several projections of the same input are merged into one product.

    A rank of several may hold some rows of each part (and compute some of the outputs), or some columns: then its
    product is partial, and the sum over all ranks is meant.

    Args:
        in_features: columns of the weight.
        out_features: rows of each merged part, in the order of the output's columns.
        bias: whether there is a bias (for all parts or none); of partial products one has it.
        place: dtype, device and layout.
        gated: whether the two parts are gate and input of a gated activation, and only used for that.
    """

    def __init__(
        self,
        in_features: int | Cut,
        out_features: Sequence[int | Cut],
        *,
        bias: bool,
        place: Placement,
        gated: bool = False,
    ) -> None:
        self._columns = _cut(in_features)
        self._rows = tuple(_cut(part) for part in out_features)
        self.matrix = place.linear(len(self._columns), [len(part) for part in self._rows], bias=bias, gated=gated)

    @property
    def partial(self) -> bool:
        """Whether the product is one of several that are to be added up."""
        return self._columns.partial

    def destinations(self, *names: str) -> dict[str, Destination]:
        """Returns where ``{name}.weight`` and ``{name}.bias`` of each part go; one name per part, in their order."""
        found: dict[str, Destination] = {}
        for part, (name, rows) in enumerate(zip(names, self._rows, strict=True)):
            found[f"{name}.weight"] = self.matrix.weight_destination(part).cut(rows, self._columns)
            bias = self.matrix.bias_destination(part)
            if bias is not None:
                found[f"{name}.bias"] = bias.cut(rows)
        return found

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``[T, sum of out]`` for ``x [T, in]``; for a dense matrix."""
        matrix = dense(self.matrix)
        return F.linear(x, matrix.weight, matrix.bias)


def _cut(features: int | Cut) -> Cut:
    return features if isinstance(features, Cut) else Cut.all(features)
