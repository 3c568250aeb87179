"""How much memory this process may still take: what the machine has, and what the cgroups above it allow.

Sources: proc(5) for ``MemAvailable``; the kernel's ``cgroup-v2.rst`` and ``cgroup-v1/memory.rst``.
"""

from __future__ import annotations

from pathlib import Path

from tercet_shared.errors import CheckpointError

_GIB = 1024**3
_UNLIMITED_V1 = 1 << 60
"""cgroup v1 writes "no limit" as the largest page-aligned integer."""


def available_memory(root: Path = Path("/")) -> int:
    """Returns bytes that this process can still take before the kernel refuses, swaps or kills.

    Args:
        root: directory under which ``proc`` and ``sys`` are looked up.
    """
    free = [_mem_available(root / "proc/meminfo"), *_cgroup_headroom(root)]
    return max(0, min(free))


def check_fits(needed: int, available: int, what: str) -> None:
    """Raises `CheckpointError` with one sentence unless ``needed`` bytes are available for ``what``."""
    if needed > available:
        raise CheckpointError(
            f"{what} needs {needed / _GIB:.1f} GiB of memory, and only {available / _GIB:.1f} GiB are available."
        )


def _mem_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError(f"{meminfo} states no MemAvailable")


def _cgroup_headroom(root: Path) -> list[int]:
    """Returns the room in every memory cgroup from this process's own up to the root; a limit anywhere counts."""
    found: list[int] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    mount = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            names = ("memory.max", "memory.current", "inactive_file")
            base = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = mount / "memory"
        else:
            continue
        # Inside a container the path may name a group of the host that is not visible; its root then is the group.
        own = base / path.lstrip("/")
        for directory in (own, *own.parents):
            room = _room(directory, *names)
            if room is not None:
                found.append(room)
            if directory == base:
                break
    return found


def _room(directory: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    try:
        text = (directory / limit_name).read_text().strip()
        usage = int((directory / usage_name).read_text())
        statistics = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if text == "max" or int(text) >= _UNLIMITED_V1:
        return None
    # File pages that nobody uses count as used, but the kernel gives them back before it refuses memory.
    reclaimable = next((int(line.split()[1]) for line in statistics if line.startswith(f"{reclaimable_name} ")), 0)
    return int(text) - usage + reclaimable
