"""Builds the kernels with the system's C++ compiler, once per content of sources, flags and compiler.

The result lies in ``${TERCET_CACHE:-~/.cache/tercet}/kernels/<sources>-<compiler>/``. It is built in a folder next to
it, which is renamed when complete: a reader sees a whole library or none. A file lock lets one process build while
others wait for the result.

``python -m tercet_worker.kernels.build`` builds ahead of time. Where a library for these very sources is in the cache,
no compiler is needed any more (an image can be built in a stage that has one).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tercet_shared.errors import TercetError
from tercet_worker.kernels.toolchain import (
    BASE_FLAGS,
    SANITIZE_FLAGS,
    X86_VARIANTS,
    Compiler,
    Variant,
    find_compiler,
    find_torch_openmp,
    machine_variants,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
LIBRARY_NAME = "tercet_kernels.so"


class KernelBuildError(TercetError):
    """The kernels cannot be built here: no compiler, or it failed."""


def default_cache() -> Path:
    """Returns ``$TERCET_CACHE/kernels``, else ``~/.cache/tercet/kernels``."""
    root = os.environ.get("TERCET_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "tercet") / "kernels"


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Everything that a build depends on, apart from the compiler."""

    flags: tuple[str, ...]
    variants: tuple[Variant, ...]
    openmp: Path | None
    sanitize: bool

    @classmethod
    def of(cls, *, sanitize: bool) -> _Recipe:
        # A sanitized library is loaded by test programs without torch, so it takes the compiler's own runtime.
        return cls(
            flags=(*BASE_FLAGS, *SANITIZE_FLAGS) if sanitize else BASE_FLAGS,
            variants=machine_variants(),
            openmp=None if sanitize else find_torch_openmp(),
            sanitize=sanitize,
        )

    def digest(self) -> str:
        content = hashlib.blake2b(digest_size=8)
        for part in (platform.machine(), self.flags, self.variants, self.openmp.name if self.openmp else None):
            content.update(f"{part!r}\0".encode())
        for path in sorted(SOURCES.iterdir()):
            if path.suffix in {".cpp", ".hpp"}:
                content.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return content.hexdigest()


def build(*, cache: Path | None = None, sanitize: bool = False) -> Path:
    """Returns the path of the kernel library, building it first when the cache has none.

    Args:
        cache: folder of the cache; ``default_cache()`` when None.
        sanitize: build with the address and undefined-behaviour sanitizers. Such a library can only be loaded into a
            process that has the address sanitizer's runtime preloaded.

    Raises:
        KernelBuildError: no compiler and nothing suitable cached, the compiler failed, or the cache cannot be written.
    """
    cache = default_cache() if cache is None else cache
    recipe = _Recipe.of(sanitize=sanitize)
    sources = recipe.digest()
    compiler = find_compiler()
    if compiler is None:
        prebuilt = sorted(cache.glob(f"{sources}-*/{LIBRARY_NAME}"))
        if prebuilt:
            return prebuilt[0]
        raise KernelBuildError(
            "no C++ compiler was found (CXX, c++, g++, clang++) and no prebuilt kernels are in the cache"
        )
    identity = hashlib.blake2b(compiler.identity.encode(), digest_size=8).hexdigest()
    folder = cache / f"{sources}-{identity}"
    library = folder / LIBRARY_NAME
    if library.exists():
        return library
    try:
        with _locked(cache, folder.name):
            if not library.exists():
                _build_into(folder, compiler, recipe)
    except OSError as error:
        raise KernelBuildError(f"the kernels cannot be built in {cache}: {error}") from error
    return library


@contextmanager
def _locked(cache: Path, name: str) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also by a crash
        yield


def _build_into(folder: Path, compiler: Compiler, recipe: _Recipe) -> None:
    started = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _compile(work, compiler, recipe)
        work.chmod(0o755)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    logger.info("built the CPU kernels in %.1f s: %s", time.monotonic() - started, folder)


def _compile(work: Path, compiler: Compiler, recipe: _Recipe) -> None:
    variants = [variant for variant in recipe.variants if compiler.accepts(variant.flags)]
    by_suffix = {variant.name: variant for variant in variants}
    all_suffixes = {variant.name for variant in X86_VARIANTS}
    defines = [f"-D{variant.define}" for variant in variants]
    commands: list[list[str]] = []
    objects: list[str] = []
    for source in sorted(SOURCES.glob("*.cpp")):
        suffix = source.stem.rpartition("_")[2]
        if suffix in all_suffixes and suffix not in by_suffix:
            continue  # another processor family, or a compiler that does not know the instruction set
        flags = by_suffix[suffix].flags if suffix in by_suffix else ()
        target = str(work / f"{source.stem}.o")
        objects.append(target)
        commands.append([*recipe.flags, *flags, *defines, "-c", str(source), "-o", target])

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        for outcome in pool.map(compiler.run, commands):
            if outcome.returncode != 0:
                raise KernelBuildError(f"{compiler.path} failed: {outcome.stderr.strip()}")

    link = ["-shared", *objects, "-o", str(work / LIBRARY_NAME)]
    shared = recipe.openmp is not None and compiler.run([*link, str(recipe.openmp)]).returncode == 0
    if not shared:  # torch has another runtime, or this compiler's code needs a newer one
        outcome = compiler.run([*link, *(SANITIZE_FLAGS if recipe.sanitize else ()), "-fopenmp"])
        if outcome.returncode != 0:
            raise KernelBuildError(f"{compiler.path} failed to link: {outcome.stderr.strip()}")
    for target in objects:
        Path(target).unlink()


def main(arguments: list[str] | None = None) -> int:
    """Builds the kernels and logs where they are; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tercet_worker.kernels.build", description="Build Tercet's CPU kernels."
    )
    parser.add_argument("--cache", type=Path, default=None, help="folder of the cache")
    parser.add_argument(
        "--sanitize",
        action="store_true",
        default=os.environ.get("TERCET_KERNEL_SANITIZE") == "1",
        help="build with the address and undefined-behaviour sanitizers",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        library = build(cache=options.cache, sanitize=options.sanitize)
    except KernelBuildError as error:
        logger.warning("%s; the slow pure-torch fallback will be used", error.message)
        return 1
    logger.info("CPU kernels: %s", library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
