"""Loads the kernel library and says which instruction sets it can use here."""

from __future__ import annotations

import ctypes
import enum
from typing import TYPE_CHECKING

import torch  # noqa: F401  # loaded first, so that its OpenMP runtime is the one that the library finds

from tercet_shared.errors import ConfigurationError
from tercet_worker.kernels import attention_abi, decode_abi, step_abi
from tercet_worker.kernels.build import KernelBuildError, build

if TYPE_CHECKING:
    from pathlib import Path

ABI_VERSION = 9


class Isa(enum.IntEnum):
    """Instruction sets with kernels of their own; the values are those of ``csrc/isa.hpp``."""

    GENERIC = 0
    AVX2 = 1
    AVX512 = 2
    AVX512BF16 = 3
    AMX = 4


class KernelLibrary:
    """The loaded kernels. ``cdll`` releases the interpreter lock during calls.

    Raises:
        KernelBuildError: the file cannot be loaded or is of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.cdll = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelBuildError(f"the kernels at {path} cannot be loaded: {error}") from error
        version = int(self.cdll.tercet_abi_version())
        if version != ABI_VERSION:
            raise KernelBuildError(f"the kernels at {path} have interface version {version}, not {ABI_VERSION}")
        attention_abi.declare(self.cdll)
        step_abi.declare(self.cdll)
        decode_abi.declare(self.cdll)

    @property
    def best_isa(self) -> Isa:
        """The best instruction set of this processor that the library has kernels for."""
        return Isa(self.cdll.tercet_isa_best())

    def isas(self) -> tuple[Isa, ...]:
        """Returns all usable instruction sets, the most general first."""
        return tuple(isa for isa in Isa if self.cdll.tercet_isa_available(int(isa)))

    def require(self, isa: Isa | None) -> Isa:
        """Returns ``isa``, or the best one for None. Raises ConfigurationError where it cannot be used here."""
        if isa is None:
            return self.best_isa
        if isa not in self.isas():
            raise ConfigurationError(
                f"instruction set {isa.name} is not available on this machine or not in the kernel library"
            )
        return isa


def load_kernels(*, cache: Path | None = None) -> KernelLibrary:
    """Builds the kernels unless they are cached, and loads them. Raises KernelBuildError where that is not possible."""
    return KernelLibrary(build(cache=cache))
