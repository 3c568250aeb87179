"""Finds the best logit of every row in one pass over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from tercet_worker.kernels.library import Isa, KernelLibrary


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
