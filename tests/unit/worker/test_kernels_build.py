"""The kernels are built once per content, by one process at a time, and their absence is said and survived."""

from __future__ import annotations

import ctypes
import logging
import mmap
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tercet_worker.attention.cpu import CpuAttention
from tercet_worker.attention.select import cpu_attention, load_kernels_or_warn
from tercet_worker.attention.torch_fallback import TorchAttention
from tercet_worker.kernels import build as build_module
from tercet_worker.kernels.arena import HUGE_PAGE, Arena
from tercet_worker.kernels.build import LIBRARY_NAME, SOURCES, KernelBuildError, build, main
from tercet_worker.kernels.library import Isa, KernelLibrary
from tests.unit.worker.attention_cases import make_spec

_FAKE_COMPILER = """#!/bin/sh
# Stands for a C++ compiler: notes that it ran and writes what it was asked for.
echo "$@" >> "{log}"
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then echo fake > "$2"; fi
    shift
done
{ending}
"""


class FakeCompiler:
    """A compiler that takes no time. ``CXX`` points to it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, ending: str = "") -> None:
        self.log = folder / "compiler.log"
        self.path = folder / "fake-c++"
        self.path.write_text(_FAKE_COMPILER.format(log=self.log, ending=ending))
        self.path.chmod(0o755)
        monkeypatch.setenv("CXX", str(self.path))

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def test_a_build_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = FakeCompiler(tmp_path, monkeypatch)
    cache = tmp_path / "cache"
    first = build(cache=cache)
    calls = compiler.calls()
    assert sum(" -c " in f" {call} " for call in calls) == len(list(SOURCES.glob("*.cpp")))
    assert build(cache=cache) == first
    assert compiler.calls() == calls
    assert [path.name for path in first.parent.iterdir()] == [LIBRARY_NAME]


def test_builders_at_the_same_time_share_one_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = FakeCompiler(tmp_path, monkeypatch)
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", f"from tercet_worker.kernels.build import main; main(['--cache', {str(cache)!r}])"]
    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(lambda _: subprocess.run(command, check=False).returncode, range(3)))
    assert outcomes == [0, 0, 0]
    assert sum("-shared" in call for call in compiler.calls()) == 1
    assert len(list(cache.glob(f"*/{LIBRARY_NAME}"))) == 1
    assert not list(cache.glob(".*"))


def test_sources_and_compiler_are_part_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    compiler = FakeCompiler(tmp_path, monkeypatch)
    names = {build(cache=cache).parent.name}
    compiler.path.write_text(compiler.path.read_text() + "# a newer version\n")
    names.add(build(cache=cache).parent.name)
    changed = tmp_path / "csrc"
    shutil.copytree(SOURCES, changed)
    (changed / "isa.cpp").write_text((changed / "isa.cpp").read_text() + "// changed\n")
    monkeypatch.setattr(build_module, "SOURCES", changed)
    names.add(build(cache=cache).parent.name)
    names.add(build(cache=cache, sanitize=True).parent.name)
    assert len(names) == 4


def test_a_prebuilt_library_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    FakeCompiler(tmp_path, monkeypatch)
    library = build(cache=cache)
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    assert build(cache=cache) == library


def test_without_a_compiler_the_fallback_is_used_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with caplog.at_level(logging.WARNING):
        library = load_kernels_or_warn(cache=tmp_path / "cache")
        assert main(["--cache", str(tmp_path / "cache")]) == 1
    assert library is None
    ours = [record for record in caplog.records if record.name.startswith("tercet_worker")]
    assert [record.levelname for record in ours] == ["WARNING", "WARNING"]
    assert all("no C++ compiler" in record.message and "pure-torch fallback" in record.message for record in ours)
    assert isinstance(cpu_attention(make_spec(torch.float32), library, threads=1), TorchAttention)


def test_a_failing_compiler_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCompiler(tmp_path, monkeypatch, ending='echo "out of cheese" >&2; exit 1')
    cache = tmp_path / "cache"
    with pytest.raises(KernelBuildError, match="out of cheese"):
        build(cache=cache)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCompiler(tmp_path, monkeypatch)
    (tmp_path / "file").touch()
    with pytest.raises(KernelBuildError, match="file/cache"):
        build(cache=tmp_path / "file" / "cache")


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCompiler(tmp_path, monkeypatch)
    monkeypatch.setenv("TERCET_CACHE", str(tmp_path / "elsewhere"))
    assert build().is_relative_to(tmp_path / "elsewhere" / "kernels")


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / LIBRARY_NAME
    path.write_text("not a library")
    with pytest.raises(KernelBuildError, match="cannot be loaded"):
        KernelLibrary(path)


def test_the_kernels_share_torchs_openmp(library: KernelLibrary) -> None:
    """Two runtimes would keep two pools of threads that fight for the same cores."""
    torch.ones(2**16).add_(1)
    assert library.path.exists()
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    runtimes = {path for path in loaded if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))}
    assert len(runtimes) == 1


def test_the_generic_kernels_are_always_there(library: KernelLibrary) -> None:
    assert Isa.GENERIC in library.isas()
    assert library.best_isa is max(library.isas())
    assert library.require(None) is library.best_isa
    backend = cpu_attention(make_spec(torch.float32), library, threads=1, isa=Isa.GENERIC)
    assert isinstance(backend, CpuAttention)
    assert backend.name == "cpu-generic"


def test_an_arena_is_aligned_and_outlives_its_owner() -> None:
    arena = Arena(3 * HUGE_PAGE + 5)
    memory = arena.memory
    del arena
    assert memory.data_ptr() % HUGE_PAGE == 0
    assert memory.numel() == 3 * HUGE_PAGE + 5
    assert not memory[:: 2**12].any()
    memory[-1] = 7
    assert memory[-1] == 7


def test_an_arena_gives_back_whole_huge_pages_behind_a_place() -> None:
    arena = Arena(3 * HUGE_PAGE + 5)
    arena.memory.fill_(7)
    arena.give_back(3 * HUGE_PAGE + 1)  # into the last page
    assert bool((arena.memory == 7).all())
    arena.give_back(HUGE_PAGE + 1)
    assert bool((arena.memory[: 2 * HUGE_PAGE] == 7).all())
    assert not arena.memory[2 * HUGE_PAGE :].any(), "it was not given back"
    arena.memory[-1] = 9
    assert arena.memory[-1] == 9
    arena.give_back(HUGE_PAGE)
    assert bool((arena.memory[:HUGE_PAGE] == 7).all())
    assert not arena.memory[HUGE_PAGE:].any()
    arena.give_back(0)
    assert not arena.memory.any()


def test_an_arena_keeps_what_is_locked() -> None:
    arena = Arena(2 * HUGE_PAGE)
    arena.memory.fill_(7)
    libc = ctypes.CDLL(None)
    if libc.mlock(ctypes.c_void_p(arena.memory.data_ptr() + HUGE_PAGE), ctypes.c_size_t(mmap.PAGESIZE)):
        pytest.skip("this process may lock no memory")
    arena.give_back(0)
    assert bool((arena.memory[HUGE_PAGE : HUGE_PAGE + mmap.PAGESIZE] == 7).all())
