"""The C++ compiler of this machine and the flags that the kernels are built with."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

BASE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    # Results must not depend on how a loop was inlined or vectorized: fused multiply-add only where it is written.
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fno-math-errno",
    # KV memory is bytes that are read as pairs, halves and floats.
    "-fno-strict-aliasing",
)
SANITIZE_FLAGS = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
)

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")


@dataclass(frozen=True, slots=True)
class Variant:
    """An instruction set with source files of its own, ``*_<name>.cpp``."""

    name: str
    flags: tuple[str, ...]
    define: str
    """Macro that tells the other files that this variant is in the library."""


X86_VARIANTS = (
    Variant("avx2", _AVX2, "TERCET_HAVE_AVX2"),
    Variant("avx512", _AVX512, "TERCET_HAVE_AVX512"),
    Variant("avx512bf16", (*_AVX512, "-mavx512bf16"), "TERCET_HAVE_AVX512BF16"),
    Variant("amx", (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"), "TERCET_HAVE_AMX"),
)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler, known by its file, so that finding a cached build starts no process."""

    path: Path

    @property
    def identity(self) -> str:
        """Changes when the compiler is replaced."""
        real = self.path.resolve()
        status = real.stat()
        return f"{real}:{status.st_size}:{status.st_mtime_ns}"

    def accepts(self, flags: tuple[str, ...]) -> bool:
        """Whether the compiler knows all of ``flags``."""
        return self.run([*flags, "-fsyntax-only", "-x", "c++", os.devnull]).returncode == 0

    def run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        """Runs the compiler to its end; output is captured. Raises OSError when it cannot be started."""
        return subprocess.run([str(self.path), *arguments], capture_output=True, text=True, check=False)


def find_compiler() -> Compiler | None:
    """Returns ``$CXX``, else ``c++``, ``g++`` or ``clang++`` from the path; None when there is none."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        found = shutil.which(name)
        if found is not None:
            return Compiler(Path(found))
    return None


def machine_variants() -> tuple[Variant, ...]:
    """Returns the variants of this processor family; which of them can run is decided when the library is loaded."""
    return X86_VARIANTS if platform.machine().lower() in {"x86_64", "amd64"} else ()


def find_torch_openmp() -> Path | None:
    """Returns the OpenMP runtime that torch's wheel carries, without importing torch; None when it carries none.

    The kernels are linked against that very file name. A second runtime in the process would keep a thread pool of its
    own, and the two would fight for the cores between every two operators.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(spec.submodule_search_locations[0])
    for folder in (package / "lib", package.parent / "torch.libs"):
        found = sorted(folder.glob("libgomp*.so*"))
        if found:
            return found[0]
    return None
