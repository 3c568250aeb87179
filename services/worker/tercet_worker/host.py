"""What this machine offers: processors and instruction sets. Memory: ``loading/memory.py``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tercet_shared.config import Dtype

_KERNELS = {"avx2", "fma", "f16c"}
"""What the processor must have for the compiled kernels to be as fast in bfloat16 as in float32."""
_PRODUCTS = {"avx512_bf16", "amx_bf16"}
"""Instructions that multiply bfloat16, one of which torch must have for that."""


_SMALL_WEIGHTS = 48 * 1024 * 1024
"""Bytes of weights below which a step is so short that what core and front end do for it takes as long."""


def default_threads(weight_bytes: int | None = None) -> int:
    """Returns how many threads compute: all of this process's processors, or all but one, which the others need.

    One is left to them if there are more than two, or if the model is so small that its steps wait for them: then a
    thread more, of which one is always displaced while the rest waits for it, makes everything slower.

    Args:
        weight_bytes: of the model; None where they are not known yet.
    """
    count = len(os.sched_getaffinity(0))
    small = weight_bytes is not None and weight_bytes < _SMALL_WEIGHTS
    return max(count - 1, 1) if count > 2 or small else count


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the instruction set flags of the first processor, as Linux spells them; empty where it states none."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, flags = line.partition(":")
                if name.strip() == "flags":
                    return frozenset(flags.split())
    except OSError:
        return frozenset()
    return frozenset()


def choose_dtype(wanted: Dtype, flags: frozenset[str], *, compiled: bool) -> torch.dtype:
    """Returns the dtype to compute in; ``auto`` takes bfloat16 where that is not slower: half as many bytes are read.

    Args:
        wanted: by the settings.
        flags: of the processor.
        compiled: whether there are compiled kernels. Where the processor has no products of bfloat16 they widen what
            they have read (``csrc/linear_wide.hpp``), while torch is slow.
    """
    if wanted == "auto":
        fast = flags >= _KERNELS if compiled else bool(flags & _PRODUCTS)
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32
