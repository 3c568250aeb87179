"""Eight-bit weights from floating-point ones: the nearest integer, with a scale per 32 weights of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tercet_worker.quantization.blocks import Blocks, WeightFormat

if TYPE_CHECKING:
    import numpy.typing as npt

_LARGEST = 127


def quantize_rows(rows: npt.NDArray[np.float32]) -> Blocks:
    """Returns float32 rows ``[N, K]``, K a multiple of 32, as `WeightFormat.EIGHT`.

    A weight errs by at most half the scale (1/254 of the largest magnitude of its block) and what float16 rounds
    of the scale.
    """
    block = WeightFormat.EIGHT.block
    blocks = rows.reshape(len(rows), -1, block)
    scales = (np.abs(blocks).max(axis=2) / _LARGEST).astype(np.float16)
    # Rounded down, a scale would make the largest weight 128.
    wide = np.maximum(scales.astype(np.float32), np.finfo(np.float32).tiny)[..., None]
    q = np.clip(np.rint(blocks / wide), -_LARGEST, _LARGEST).astype(np.int8)
    return Blocks(WeightFormat.EIGHT, q.view(np.uint8).reshape(rows.shape), scales, None)
