"""Chooses the attention backend of a CPU worker."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tercet_worker.attention.cpu import CpuAttention
from tercet_worker.attention.torch_fallback import TorchAttention
from tercet_worker.kernels.build import KernelBuildError
from tercet_worker.kernels.library import Isa, KernelLibrary, load_kernels

if TYPE_CHECKING:
    from pathlib import Path

    from tercet_worker.attention.interface import AttentionBackend, AttentionSpec

logger = logging.getLogger(__name__)


def load_kernels_or_warn(*, cache: Path | None = None) -> KernelLibrary | None:
    """Returns the compiled kernels, or None after one warning that says why there are none and what that means."""
    try:
        library = load_kernels(cache=cache)
    except KernelBuildError as error:
        logger.warning("%s; using the pure-torch fallback, which is right but slow", error.message)
        return None
    logger.info("CPU kernels: %s, instruction set %s", library.path, library.best_isa.name)
    return library


def cpu_attention(
    spec: AttentionSpec, library: KernelLibrary | None, *, threads: int, isa: Isa | None = None
) -> AttentionBackend:
    """Returns attention with the compiled kernels, or the fallback where ``library`` is None.

    Raises:
        ConfigurationError: the kernels are not made for this model, or ``isa`` is not available.
    """
    if library is None:
        return TorchAttention(spec)
    return CpuAttention(spec, library, threads=threads, isa=isa)
