"""Small columns on their way from the host to the device, all of a step in one copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tercet_shared.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from tercet_worker.cuda.streams import Event, Streams

_ALIGNMENT = 16
"""Elements: columns begin at multiples of 64 bytes, so that kernels see the same alignment each time."""
_TURNS = 4
"""Buffers that are used in turn. One is written again when its copy is long over; else its event is waited for."""


class Staging:
    """Pinned buffers, and one on the device for each.

    Args:
        most: elements that are put at once, alignment included (see `room_for`).
        device: where the columns go.
        streams: its queues.
    """

    def __init__(self, most: int, device: torch.device, streams: Streams) -> None:
        self._most = most
        self._turn = 0
        self._hosts = [streams.pinned(most) for _ in range(_TURNS)]
        self._events: list[Event] = [streams.event() for _ in range(_TURNS)]
        self._devices = [torch.zeros(most, dtype=torch.int32, device=device) for _ in range(_TURNS)]

    def put(self, columns: Sequence[npt.NDArray[np.int32]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Copies int32 columns; returns them on the device and, pinned, on the host. They live for some steps."""
        self._turn = (self._turn + 1) % _TURNS
        host, device, event = self._hosts[self._turn], self._devices[self._turn], self._events[self._turn]
        event.synchronize()
        places: list[slice] = []
        end = 0
        for column in columns:
            places.append(slice(end, end + len(column)))
            end += -(-len(column) // _ALIGNMENT) * _ALIGNMENT
        if end > self._most:
            raise InternalError(f"{end} elements were to be staged where {self._most} have room")
        array = host.numpy()
        for column, place in zip(columns, places, strict=True):
            array[place] = column
        device[:end].copy_(host[:end], non_blocking=True)
        event.record()
        return [device[place] for place in places], [host[place] for place in places]


def room_for(*lengths: int) -> int:
    """Returns the elements that columns of these lengths take."""
    return sum(-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths)
