"""Kernels over rows of logits: the best of each, and tokens drawn from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tercet_shared.errors import InternalError
from tercet_worker.kernels.step_abi import Draw

if TYPE_CHECKING:
    from torch import Tensor

    from tercet_worker.kernels.library import Isa, KernelLibrary
    from tercet_worker.sampling import SamplingBatch

_DRAW = np.dtype(Draw)


class LogitScan:
    """Calls the kernel; takes what ``sampling.sampler.scan`` takes, and returns the same for rows that are finite.

    Args:
        library: the loaded kernels.
        threads: to use for many rows.
        isa: instruction set to use; the best one for None.

    Raises:
        ConfigurationError: ``isa`` is not available.
    """

    def __init__(self, library: KernelLibrary, *, threads: int, isa: Isa | None = None) -> None:
        self._isa = int(library.require(isa))
        self._threads = threads
        self._scan: Any = library.cdll.tercet_logits_scan

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns highest (float32), the lowest id that has it (int64), and whether all are finite (bool), ``[R]``.

        ``logits [R, V]`` are float32 and contiguous.
        """
        rows, size = logits.shape
        highest = torch.empty(rows, dtype=torch.float32)
        places = torch.empty(rows, dtype=torch.int64)
        finite = torch.empty(rows, dtype=torch.bool)
        self._scan(
            self._isa,
            self._threads,
            logits.data_ptr(),
            rows,
            size,
            highest.data_ptr(),
            places.data_ptr(),
            finite.data_ptr(),
        )
        return highest, places, finite


class LogitDraw:
    """Calls the kernel; is a ``sampling.sampler.Draw``, for rows with top-k and top-p as well as for others.

    Tokens are those of ``sampling.sampler`` but for rounding: sums and logarithms differ in the last bits.

    Args:
        library: the loaded kernels.
        threads: to use for many rows.
        isa: instruction set to use; the best one for None.

    Raises:
        ConfigurationError: ``isa`` is not available.
    """

    def __init__(self, library: KernelLibrary, *, threads: int, isa: Isa | None = None) -> None:
        self._isa = int(library.require(isa))
        self._threads = threads
        self._draw: Any = library.cdll.tercet_logits_draw

    def __call__(self, logits: Tensor, highest: Tensor, batch: SamplingBatch, rows: Tensor, tokens: Tensor) -> None:
        """See ``sampling.sampler.Draw``. ``logits [R, V]`` are float32 and contiguous.

        Raises:
            InternalError: there is no memory for the candidates of top-k and top-p.
        """
        if not len(rows):
            return
        size, index = logits.shape[1], rows.numpy()
        draws = np.empty(len(index), _DRAW)
        draws["logits"] = logits.data_ptr() + 4 * size * index
        for name, column in (
            ("highest", highest),
            ("temperature", batch.temperature),
            ("top_p", batch.top_p),
            ("log_min_p", batch.log_min_p),
            ("top_k", batch.top_k),
        ):
            draws[name] = column.numpy()[index]
        draws["key_a"] = batch.keys.a.numpy().view(np.uint32)[index]
        draws["key_b"] = batch.keys.b.numpy().view(np.uint32)[index]
        if not self._draw(self._isa, self._threads, draws.ctypes.data, len(index), size):
            raise InternalError("there is no memory to draw tokens with top-k or top-p")
        tokens.numpy()[index] = draws["token"]
