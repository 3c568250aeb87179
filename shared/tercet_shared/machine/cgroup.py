"""The control groups of this process, from its own up to the root: a limit anywhere counts.

Sources: the kernel's ``cgroup-v2.rst`` and ``cgroup-v1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNLIMITED_V1 = 1 << 60
"""Version 1 writes "no limit" of memory as the largest integer that is whole pages."""


@dataclass(frozen=True, slots=True)
class Group:
    """A directory of a control group file system.

    Attributes:
        path: the directory.
        version: 1 or 2.
    """

    path: Path
    version: int

    def text(self, name: str) -> str | None:
        """Returns what a file says; None where there is none."""
        try:
            return (self.path / name).read_text().strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """Returns the number in a file; None where there is none, or the word "max"."""
        text = self.text(name)
        return int(text) if text is not None and text.lstrip("-").isdigit() else None


def groups(root: Path, controller: str) -> Iterator[Group]:
    """Yields the groups of ``controller`` that this process is in, its own first.

    Args:
        root: directory under which ``proc`` and ``sys`` are looked up.
        controller: ``cpu`` or ``memory``.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            version, base = 2, mount if (mount / "cgroup.controllers").exists() else mount / "unified"
        elif controller in controllers.split(","):
            version, base = 1, mount / controllers if (mount / controllers).exists() else mount / controller
        else:
            continue
        # Inside a container the path may name a group of the host that is not visible; its root then is the group.
        own = base / path.lstrip("/")
        for directory in (own, *own.parents):
            if directory.is_dir():
                yield Group(directory, version)
            if directory == base:
                break
