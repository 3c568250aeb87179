"""What the worker makes of the machine and the settings: KV blocks, memory limits, dtype."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tercet_shared.errors import CheckpointError, ConfigurationError
from tercet_worker.host import choose_dtype, default_threads, processor_flags
from tercet_worker.kv_sizing import KvRequest, KvSize, size_kv_cache
from tercet_worker.loading import available_memory, check_fits

ASKED = KvRequest(
    bytes_per_block=1_000,
    block_size=16,
    slots=4,
    max_model_len=100,
    max_model_len_given=False,
    memory=None,
    num_blocks=None,
    available=10**9,
)


def test_by_default_the_cache_is_what_the_slots_can_use() -> None:
    assert size_kv_cache(ASKED) == KvSize(4 * 7, 100)


def test_by_default_the_cache_is_at_most_a_quarter_of_what_is_free() -> None:
    assert size_kv_cache(replace(ASKED, available=80_000)) == KvSize(20, 100)


def test_a_pool_smaller_than_the_context_shortens_it() -> None:
    assert size_kv_cache(replace(ASKED, available=16_000)) == KvSize(4, 64)
    assert size_kv_cache(replace(ASKED, available=16_000, max_model_len_given=True)) == KvSize(4, 64)
    assert size_kv_cache(replace(ASKED, memory=3_999)) == KvSize(3, 48)


def test_the_number_of_blocks_wins() -> None:
    assert size_kv_cache(replace(ASKED, num_blocks=50, memory=5_000)) == KvSize(50, 100)


def test_the_pool_has_two_blocks_where_one_would_do() -> None:
    assert size_kv_cache(replace(ASKED, slots=1, max_model_len=5)) == KvSize(2, 5)


@pytest.mark.parametrize("size", [{"num_blocks": 6}, {"memory": 6_000}])
def test_a_pool_and_a_length_that_contradict_each_other(size: dict[str, int]) -> None:
    with pytest.raises(
        ConfigurationError, match="holds 96 tokens, less than one request of the --max-model-len of 100"
    ):
        size_kv_cache(replace(ASKED, max_model_len_given=True, **size))


def test_a_pool_that_is_too_big_or_too_small() -> None:
    with pytest.raises(ConfigurationError, match=r"50 blocks needs 0\.0 MiB, and only 0\.0 MiB are available"):
        size_kv_cache(replace(ASKED, num_blocks=50, available=49_999))
    with pytest.raises(ConfigurationError, match="2 blocks needs"):
        size_kv_cache(replace(ASKED, memory=1_999))
    with pytest.raises(ConfigurationError, match="2 blocks needs"):
        size_kv_cache(replace(ASKED, available=1_999))


class Machine:
    """A fake ``/proc`` and ``/sys``."""

    def __init__(self, root: Path, available_kib: int) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {available_kib} kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, path: str, limit: str, usage: int, *, version: int = 2, inactive: int = 0) -> None:
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        stat = "inactive_file" if version == 2 else "total_inactive_file"
        self.write(f"{path}/{names[0]}", f"{limit}\n")
        self.write(f"{path}/{names[1]}", f"{usage}\n")
        self.write(f"{path}/memory.stat", f"anon 5\n{stat} {inactive}\n")


def test_available_memory_without_cgroups(tmp_path: Path) -> None:
    assert available_memory(Machine(tmp_path, 1_000).root) == 1_024_000


def test_any_group_above_the_process_may_be_the_limit(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1_000)
    machine.write("proc/self/cgroup", "0::/pod/box\n")
    machine.write("sys/fs/cgroup/cgroup.controllers", "memory\n")
    machine.group("sys/fs/cgroup/pod/box", "max", 50)
    machine.group("sys/fs/cgroup/pod", "90000", 70_000, inactive=5_000)
    assert available_memory(tmp_path) == 25_000


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1_000)
    machine.write("proc/self/cgroup", "0::/../host/only\n")
    machine.write("sys/fs/cgroup/cgroup.controllers", "memory\n")
    machine.group("sys/fs/cgroup", "30000", 10_000)
    assert available_memory(tmp_path) == 20_000


def test_version_1_groups(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1_000)
    machine.write("proc/self/cgroup", "5:cpu:/box\n4:memory:/box\n0::/x\n")
    machine.group("sys/fs/cgroup/memory/box", "40000", 39_000, version=1, inactive=500)
    machine.group("sys/fs/cgroup/memory", str(2**63 - 4096), 10, version=1)
    assert available_memory(tmp_path) == 1_500


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1_000)
    machine.write("proc/self/cgroup", "0::/\n")
    machine.write("sys/fs/cgroup/cgroup.controllers", "memory\n")
    machine.group("sys/fs/cgroup", "1000", 2_000)
    assert available_memory(tmp_path) == 0


def test_this_machine_has_memory() -> None:
    assert available_memory() > 0


def test_too_big_is_one_sentence() -> None:
    with pytest.raises(
        CheckpointError, match=r"^The model x needs 2\.0 GiB of memory, and only 1\.5 GiB are available\.$"
    ):
        check_fits(2 * 1024**3, 1536 * 1024**2, "The model x")
    check_fits(5, 5, "The model x")


def test_dtype_follows_the_processor() -> None:
    kernels = frozenset({"avx2", "fma", "f16c"})
    assert choose_dtype("auto", kernels, compiled=True) is torch.bfloat16
    assert choose_dtype("auto", kernels, compiled=False) is torch.float32, "torch would be slow"
    assert choose_dtype("auto", kernels | {"avx512_bf16"}, compiled=False) is torch.bfloat16
    assert choose_dtype("auto", frozenset({"avx", "f16c"}), compiled=True) is torch.float32
    assert choose_dtype("auto", frozenset(), compiled=True) is torch.float32
    assert choose_dtype("bfloat16", frozenset(), compiled=False) is torch.bfloat16
    assert choose_dtype("float32", kernels | {"amx_bf16"}, compiled=True) is torch.float32


def test_processor_flags(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nflags\t\t: fpu avx2\nprocessor: 1\nflags : other\n")
    assert processor_flags(file) == {"fpu", "avx2"}
    assert processor_flags(tmp_path / "missing") == frozenset()


def test_threads_leave_a_processor_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, expected, small in ((1, 1, 1), (2, 2, 1), (3, 2, 2), (16, 15, 15)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=count: set(range(n)))
        assert default_threads() == default_threads(2**30) == expected
        assert default_threads(2**20) == small
