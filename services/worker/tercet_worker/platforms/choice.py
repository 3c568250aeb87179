"""Which device a worker computes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_worker.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from tercet_shared.config import WorkerSettings
    from tercet_worker.platforms.interface import Platform


def choose_platform(settings: WorkerSettings) -> Platform:
    """Returns the platform that the settings ask for."""
    return CpuPlatform(settings)
