"""Graphs: work that is recorded once on the device and replayed with one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]

_WARM_UPS = 2
"""Runs before a capture: what is compiled or set up at a first call must not be part of it."""


class Capturer(Protocol):
    """Makes graphs. Work that is captured reads and writes tensors that stay where they are."""

    def capture(self, work: Work) -> Work:
        """Runs ``work`` and returns what does the same again, at the same addresses."""
        ...


class CudaCapturer:
    """Implements `Capturer` with CUDA graphs, which all take their memory from one pool: no two of them run at once.

    Args:
        device: of all work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # of torch

    def capture(self, work: Work) -> Work:
        """See `Capturer`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile (a result that is waited for); only this one's calls are recorded.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        replay: Work = graph.replay
        return replay
