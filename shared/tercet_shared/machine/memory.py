"""Memory: how much there is, how much may still be taken, and on what pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tercet_shared.machine.cgroup import UNLIMITED_V1, Group, groups

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory in bytes.

    Attributes:
        total: of the machine.
        available: what this process can still take before the kernel refuses, swaps or kills.
        limit: of the control groups; None where they set none.
        swap: of the machine.
        transparent: whether 2 MiB pages are given: ``always``, ``madvise`` (to those who ask, as Tercet does),
            ``never``; None where the kernel has none.
        reserved_pages: huge pages that are set aside (hugetlbfs), and their size in bytes.
    """

    total: int
    available: int
    limit: int | None
    swap: int
    transparent: str | None
    reserved_pages: tuple[int, int]


def read_memory(root: Path) -> Memory:
    """Returns what is under ``root``, the directory under which ``proc`` and ``sys`` are looked up."""
    fields = _meminfo(root)
    rooms = [_room(group) for group in groups(root, "memory")]
    limits = [room[0] for room in rooms if room is not None]
    free = [fields.get("MemAvailable", fields.get("MemFree", 0)), *(room[1] for room in rooms if room is not None)]
    return Memory(
        total=fields.get("MemTotal", 0),
        available=max(0, min(free)),
        limit=min(limits, default=None),
        swap=fields.get("SwapTotal", 0),
        transparent=_transparent(root),
        reserved_pages=(fields.get("HugePages_Total", 0), fields.get("Hugepagesize", 0)),
    )


def _meminfo(root: Path) -> dict[str, int]:
    """Returns the fields of ``/proc/meminfo``; those in kB as bytes."""
    fields: dict[str, int] = {}
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return fields
    for line in lines:
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if number.isdigit():
            fields[name] = int(number) * (1024 if unit == "kB" else 1)
    return fields


def _room(group: Group) -> tuple[int, int] | None:
    """Returns limit and room below it; None where there is no limit."""
    names = (
        ("memory.max", "memory.current", "inactive_file")
        if group.version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    limit, usage = group.number(names[0]), group.number(names[1])
    if limit is None or usage is None or limit >= UNLIMITED_V1:
        return None
    # File pages that nobody uses count as used, but the kernel gives them back before it refuses memory.
    statistics = (group.text("memory.stat") or "").splitlines()
    reclaimable = next((int(line.split()[1]) for line in statistics if line.startswith(f"{names[2]} ")), 0)
    return limit, limit - usage + reclaimable


def _transparent(root: Path) -> str | None:
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    _, found, rest = text.partition("[")
    return rest.partition("]")[0] if found else None
