"""Which device a worker computes on."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from tercet_shared.errors import ConfigurationError
from tercet_worker.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from tercet_shared.config import WorkerSettings
    from tercet_worker.platforms.interface import Platform

_EXTRA = ("triton", "flashinfer")


def choose_platform(settings: WorkerSettings) -> Platform:
    """Returns the platform that the settings ask for; ``auto`` takes a GPU where there is one and all that it needs.

    Raises:
        ConfigurationError: it cannot be had.
    """
    if settings.device == "cpu":
        return CpuPlatform(settings)
    missing = why_no_gpu(settings.local_rank or 0)
    if missing is None:
        # Imported here: a worker without a GPU has neither Triton nor FlashInfer.
        from tercet_worker.cuda.machine import open_machine  # noqa: PLC0415
        from tercet_worker.platforms.cuda import CudaPlatform  # noqa: PLC0415

        machine = open_machine(settings.local_rank or 0, batch_invariant=settings.batch_invariant)
        return CudaPlatform(settings, machine)
    if settings.device == "cuda":
        raise ConfigurationError(f"--device cuda: {missing}", param="device")
    return CpuPlatform(settings)


def why_no_gpu(index: int) -> str | None:
    """Returns why this process cannot compute on the GPU with this number, in one sentence; None where it can."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA."
    if not torch.cuda.is_available():
        return "torch sees no GPU, or its driver does not work."
    if index >= torch.cuda.device_count():
        return f"there is no GPU {index}; torch sees {torch.cuda.device_count()}."
    absent = [name for name in _EXTRA if find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} are not installed (pip install 'tercet-worker[cuda]')."
    return None
