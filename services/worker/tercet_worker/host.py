"""What this machine offers: processors and instruction sets. Memory: ``loading/memory.py``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tercet_shared.config import Dtype

_FAST_BFLOAT16 = {"avx512_bf16", "amx_bf16"}


def default_threads() -> int:
    """Returns how many threads compute: this process's processors, one left to the others if more than two."""
    count = len(os.sched_getaffinity(0))
    return count - 1 if count > 2 else count


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


def choose_dtype(wanted: Dtype, flags: frozenset[str]) -> torch.dtype:
    """Returns the dtype to compute in; ``auto`` takes bfloat16 where the processor has instructions for it."""
    if wanted == "auto":
        return torch.bfloat16 if flags & _FAST_BFLOAT16 else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32
