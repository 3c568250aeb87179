"""What of a GPU's memory goes to whom. Pure: numbers in, numbers and sentences out.

::

    total ─┬─ not ours to take: 1 - --gpu-memory-utilization
           ├─ others: the driver, CUDA itself, other processes
           ├─ weights, and what a full step needs beside them (measured)
           ├─ graphs (estimated)
           └─ the KV cache: all that is left
"""

from __future__ import annotations

from dataclasses import dataclass

from tercet_shared.errors import ConfigurationError

_GIB = 1024**3
_PER_GRAPH = 4 * 1024 * 1024
"""Bytes that a captured graph takes beside the memory of its tensors, which all share."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes, after a step of the largest size was tried."""

    total: int  # of the GPU
    free: int  # as the driver says
    reserved: int  # that torch holds
    peak: int  # of tensors, at most at once


def for_kv(measured: Measured, utilization: float, graphs: int) -> int:
    """Returns the bytes that the KV cache may take.

    Args:
        measured: of the GPU.
        utilization: part of all memory that the worker may use.
        graphs: how many are to be captured.

    Raises:
        ConfigurationError: nothing is left.
    """
    others = measured.total - measured.free - measured.reserved
    left = int(measured.total * utilization) - others - measured.peak - graphs * _PER_GRAPH
    if left <= 0:
        raise ConfigurationError(
            f"The GPU has {measured.total / _GIB:.1f} GiB, of which {utilization:.0%} may be used; the model and one "
            f"step take {measured.peak / _GIB:.1f} GiB and others {others / _GIB:.1f} GiB, so nothing is left for the "
            "KV cache: lower --max-num-batched-tokens, or raise --gpu-memory-utilization.",
            param="gpu_memory_utilization",
        )
    return left


def exhausted(doing: str, free: int, total: int) -> ConfigurationError:
    """Returns what is said when the GPU has no memory for something."""
    return ConfigurationError(
        f"The GPU ran out of memory while {doing}: {free / _GIB:.1f} of {total / _GIB:.1f} GiB are free."
    )
