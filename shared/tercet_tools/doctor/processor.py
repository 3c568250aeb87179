"""What computes here: the processor's instruction sets, and how much of it this process may use."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tercet_shared.machine.cgroup import groups

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet
    from pathlib import Path

INSTRUCTION_SETS: Final = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_fp16": "AVX-512 FP16",
    "avx_vnni": "AVX VNNI",
    "amx_tile": "AMX",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX INT8",
    "asimd": "NEON",
    "bf16": "BF16",
    "i8mm": "I8MM",
    "sve": "SVE",
}
"""Flags that matter to kernels, as Linux spells them, and as people do."""

_KERNELS: Final = {"avx2", "fma", "f16c"}
_PRODUCTS: Final = {"avx512_bf16", "amx_bf16"}
_AMX: Final = {"amx_tile", "amx_bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """The processor.

    Attributes:
        name: as it calls itself.
        machine: family, such as x86_64.
        flags: all of them, as Linux spells them.
        online: processors of the machine.
        usable: those on which this process may run.
        quota: processors' worth of time that the control groups allow; None where they set no limit.
        load: processes that ran or wanted to, over the last minute.
    """

    name: str
    machine: str
    flags: frozenset[str]
    online: int
    usable: int
    quota: float | None
    load: float

    @property
    def instruction_sets(self) -> list[str]:
        """Those that matter, as people spell them."""
        return [name for flag, name in INSTRUCTION_SETS.items() if flag in self.flags]

    @property
    def fast_bfloat16(self) -> bool:
        """Whether the worker computes in bfloat16 by itself."""
        return self.flags >= _KERNELS

    @property
    def bfloat16_products(self) -> bool:
        """Whether it has instructions that multiply bfloat16."""
        return bool(self.flags & _PRODUCTS)

    @property
    def compact_bfloat16(self) -> bool:
        """Whether the worker makes dense bfloat16 weights compact: from AVX2 on; AMX takes its place."""
        return self.flags >= _KERNELS and not self.flags >= _AMX

    @property
    def effective(self) -> float:
        """Processors' worth of time that this process can have."""
        return min(self.usable, self.quota) if self.quota is not None else self.usable


def read_processor(root: Path, affinity: AbstractSet[int] | None = None) -> Processor:
    """Returns what is under ``root``.

    Args:
        root: directory under which ``proc`` and ``sys`` are looked up.
        affinity: processors on which this process may run; asked of the system when None.
    """
    fields = _cpuinfo(root)
    usable = len(os.sched_getaffinity(0) if affinity is None else affinity)
    return Processor(
        name=fields.get("model name") or fields.get("Processor") or "unknown",
        machine=platform.machine(),
        flags=frozenset((fields.get("flags") or fields.get("Features") or "").split()),
        online=int(fields.get("count", "0")) or usable,
        usable=usable,
        quota=_quota(root),
        load=_load(root),
    )


def _cpuinfo(root: Path) -> dict[str, str]:
    """Returns the fields of the first processor, and ``count``."""
    try:
        lines = (root / "proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    fields: dict[str, str] = {}
    count = 0
    for line in lines:
        name, _, value = line.partition(":")
        count += name.strip() == "processor"
        fields.setdefault(name.strip(), value.strip())
    return fields | {"count": str(count)}


def _quota(root: Path) -> float | None:
    found = []
    for group in groups(root, "cpu"):
        if group.version == 2:
            quota, _, period = (group.text("cpu.max") or "max").partition(" ")
        else:
            quota, period = group.text("cpu.cfs_quota_us") or "-1", group.text("cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _load(root: Path) -> float:
    try:
        return float((root / "proc/loadavg").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
