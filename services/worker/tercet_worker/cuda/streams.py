"""Queues of the device, and how the host learns that something is done there without waiting for all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_worker.state.transfer import Arrival


class Event(Protocol):
    """A point in a queue."""

    def record(self) -> None:
        """Sets the point behind what was queued so far."""
        ...

    def synchronize(self) -> None:
        """Waits until the device is past it; at once where it was never set."""
        ...


class Streams(Protocol):
    """The queues of one device. Used by one thread, but for what `Arrival.wait` does."""

    def event(self) -> Event:
        """Returns an event of the queue that computes."""
        ...

    def pinned(self, count: int) -> torch.Tensor:
        """Returns int32 memory of the host that the device reads by itself."""
        ...

    def to_host(self, tensors: Sequence[torch.Tensor]) -> Arrival:
        """Copies tensors beside what is computed next; is a ``Transfer``."""
        ...


class CudaStreams:
    """Implements `Streams`.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # of torch

    def event(self) -> Event:
        """See `Streams`."""
        made: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
        return made

    def pinned(self, count: int) -> torch.Tensor:
        """See `Streams`."""
        return torch.empty(count, dtype=torch.int32, pin_memory=True)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> Arrival:
        """See `Streams`."""
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        hosts: list[torch.Tensor] = []
        with torch.cuda.stream(self._copies):
            for tensor in tensors:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._copies)  # its memory is not given to others before it was read
                hosts.append(host)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
            done.record(self._copies)
        return _Copied(hosts, done, self._device)


class _Copied:
    """Implements ``Arrival``."""

    def __init__(self, hosts: list[torch.Tensor], done: Event, device: torch.device) -> None:
        self.tensors = hosts
        self._done = done
        self._device = device

    def wait(self) -> None:
        # The thread that waits may not have chosen a GPU; CUDA would set up the first one for it, at a cost in memory.
        with torch.cuda.device(self._device):
            self._done.synchronize()
