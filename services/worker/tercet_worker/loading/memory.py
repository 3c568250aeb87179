"""Whether what is to be loaded fits into the memory that this process may still take."""

from __future__ import annotations

from pathlib import Path

from tercet_shared.errors import CheckpointError
from tercet_shared.machine.memory import read_memory

_GIB = 1024**3


def available_memory(root: Path = Path("/")) -> int:
    """Returns bytes that this process can still take before the kernel refuses, swaps or kills.

    Args:
        root: directory under which ``proc`` and ``sys`` are looked up.
    """
    return read_memory(root).available


def check_fits(needed: int, available: int, what: str) -> None:
    """Raises `CheckpointError` with one sentence unless ``needed`` bytes are available for ``what``."""
    if needed > available:
        raise CheckpointError(
            f"{what} needs {needed / _GIB:.1f} GiB of memory, and only {available / _GIB:.1f} GiB are available."
        )
