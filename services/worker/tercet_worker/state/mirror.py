"""Small tools for columns that live on the host and on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

I64 = npt.NDArray[np.int64]


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns ``array`` on the device.

    On the CPU it shares memory, except with read-only arrays such as views of a frame. To a GPU it goes by pinned
    memory, which torch keeps until the copy is made: the host does not wait.
    """
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array)
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def ragged_index(counts: npt.NDArray[Any]) -> tuple[I64, I64]:
    """Returns (row, place in the row) of every element of runs of these lengths laid end to end.

    Both are int64 ``[sum of counts]``.
    """
    rows = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return rows, np.arange(len(rows)) - starts[rows]


class RaggedTable:
    """Up to ``width`` values per row, on the host. Memory is taken when it is first written to.

    Args:
        rows: number of rows.
        width: most values of a row.
        dtype: of the values.
    """

    def __init__(self, rows: int, width: int, dtype: type[np.generic] = np.int32) -> None:
        self.lengths: npt.NDArray[np.int32] = np.zeros(rows, np.int32)
        self._values: npt.NDArray[Any] = np.empty((rows, width), dtype)

    def put(self, index: npt.NDArray[Any], offsets: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """Replaces rows ``index [N]`` by the runs of ``values`` between ``offsets [N + 1]``."""
        if not len(values):
            self.lengths[index] = 0
            return
        counts = np.diff(offsets)
        self.lengths[index] = counts
        row, column = ragged_index(counts)
        self._values[index[row], column] = values

    def gather(self, index: npt.NDArray[Any]) -> tuple[I64, npt.NDArray[Any]]:
        """Returns the values of rows ``index [N]`` end to end, and for each which of the N it belongs to."""
        row, column = ragged_index(self.lengths[index])
        return row, self._values[index[row], column]

    def at(self, index: npt.NDArray[Any], column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns single values."""
        found: npt.NDArray[Any] = self._values[index, column]
        return found


class MirroredTable:
    """int32 rows on the host and the same on the device; on the CPU both are one memory.

    Args:
        rows: number of rows.
        columns: number of columns.
        device: where the second copy is.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.host: npt.NDArray[np.int32] = np.zeros((rows, columns), np.int32)
        self.device: torch.Tensor = to_device(self.host, device)
        self._shared = device.type == "cpu"

    def put(self, index: npt.NDArray[Any], rows: npt.NDArray[np.int32]) -> None:
        """Replaces rows ``index [N]`` by ``rows [N, columns]``: one copy to the device however many there are."""
        self.host[index] = rows
        if not self._shared:
            where = to_device(index.astype(np.int64), self.device.device)
            self.device.index_copy_(0, where, to_device(rows, self.device.device))
