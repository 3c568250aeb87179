"""Fake ``/proc`` and ``/sys`` trees."""

from __future__ import annotations

from pathlib import Path

GIB = 1024**3


def write(root: Path, files: dict[str, str]) -> Path:
    """Writes files under ``root`` and returns it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def cpuinfo(flags: str, count: int = 4) -> str:
    return "\n".join(f"processor\t: {n}\nmodel name\t: Fake CPU\nflags\t\t: fpu {flags}\n" for n in range(count))


def meminfo(total: int = 32 * GIB, available: int = 16 * GIB) -> str:
    return (
        f"MemTotal:       {total // 1024} kB\nMemFree:        1024 kB\nMemAvailable:   {available // 1024} kB\n"
        "SwapTotal:            2048 kB\nHugePages_Total:      16\nHugepagesize:       2048 kB\n"
    )


FLAGS = "avx2 fma f16c avx512f avx512_bf16"


def machine(root: Path, flags: str = FLAGS, pages: str = "always [madvise] never") -> Path:
    """Writes a machine without limits."""
    return write(
        root,
        {
            "proc/cpuinfo": cpuinfo(flags),
            "proc/meminfo": meminfo(),
            "proc/loadavg": "0.25 0.50 0.75 1/100 4242\n",
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
            "sys/kernel/mm/transparent_hugepage/enabled": f"{pages}\n",
        },
    )
