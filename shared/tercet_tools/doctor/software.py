"""What is installed: services and their packages, a compiler, kernels that were built, GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Final

SERVICES: Final = ("tercet-frontend", "tercet-core", "tercet-worker")
PACKAGES: Final = (
    "tercet-shared", *SERVICES, "torch", "numpy", "grpcio", "protobuf", "tokenizers", "fastapi", "uvicorn", "uvloop",
)  # fmt: skip
"""Whose versions are shown."""

_REQUIREMENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TIMEOUT: Final = 10.0
_GPU_QUERY: Final = "name,memory.total,memory.free,driver_version,compute_cap"
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Packages:
    """Python packages.

    Attributes:
        versions: by name; None where it is not installed.
        lacking: requirements of installed Tercet packages that are not installed, as ``package: requirement``.
    """

    versions: dict[str, str | None]
    lacking: list[str]

    @property
    def services(self) -> list[str]:
        """The services that are installed."""
        return [name for name in SERVICES if self.versions.get(name) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The worker's own kernels.

    Attributes:
        compiler: path of the C++ compiler; None where there is none.
        compiler_version: its first line.
        cache: where built kernels lie.
        built: how many builds lie there.
    """

    compiler: str | None
    compiler_version: str
    cache: Path
    built: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU, as NVIDIA's tool describes it; memory in bytes."""

    name: str
    memory: int
    free: int
    driver: str
    capability: str


def read_packages() -> Packages:
    """Returns what is installed in this environment. Nothing is imported."""
    versions = {name: _version(name) for name in PACKAGES}
    lacking = [
        f"{owner}: {requirement}"
        for owner in ("tercet-shared", *SERVICES)
        if versions[owner] is not None
        for requirement in _requirements(owner)
        if _version(requirement) is None
    ]
    return Packages(versions=versions, lacking=lacking)


def _requirements(name: str) -> list[str]:
    """Returns the names of what a package requires here, its extras left out."""
    found = []
    for text in distribution(name).requires or []:
        required, _, marker = text.partition(";")
        if "extra ==" not in marker and (match := _REQUIREMENT.match(required.strip())):
            found.append(match[0])
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def read_kernels(environment: dict[str, str] | None = None) -> Kernels:
    """Returns compiler and cache, found as the worker finds them: ``CXX``, ``TERCET_CACHE``."""
    values = dict(os.environ) if environment is None else environment
    named = values.get("CXX")
    candidates = [named] if named else ["c++", "g++", "clang++"]
    compiler = next((path for name in candidates if (path := shutil.which(name, path=values.get("PATH")))), None)
    root = Path(values["TERCET_CACHE"]) if values.get("TERCET_CACHE") else Path.home() / ".cache/tercet"
    cache = root / "kernels"
    return Kernels(
        compiler=compiler,
        compiler_version=_first_line([compiler, "--version"]) if compiler else "",
        cache=cache,
        built=sum(1 for _ in cache.glob("*/tercet_kernels.so")),
    )


def read_gpus() -> list[Gpu]:
    """Returns the GPUs that ``nvidia-smi`` lists; none where it is not there or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    output = _output([tool, f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"])
    return parse_gpus(output)


def parse_gpus(output: str) -> list[Gpu]:
    """Returns the GPUs of the tool's table; lines of another form are left out."""
    found = []
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5 and fields[1].isdigit() and fields[2].isdigit():
            name, memory, free, driver, capability = fields
            found.append(
                Gpu(name=name, memory=int(memory) * _MIB, free=int(free) * _MIB, driver=driver, capability=capability)
            )
    return found


def _first_line(command: list[str]) -> str:
    return _output(command).partition("\n")[0].strip()


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
