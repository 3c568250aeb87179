"""What the doctor reads: processors, memory, control groups, packages, ports, Redis, checkpoints."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import pytest

from tercet_shared.config import Dtype, Quantization
from tercet_shared.errors import CheckpointError
from tercet_shared.machine.memory import read_memory
from tercet_tools.doctor import bandwidth
from tercet_tools.doctor.model import read_model
from tercet_tools.doctor.network import port_problem, read_network, redis_problem
from tercet_tools.doctor.processor import read_processor
from tercet_tools.doctor.software import parse_gpus, read_kernels, read_packages
from tests.fakes.checkpoints import write_tiny_llama, write_tiny_llama_gguf
from tests.fakes.ports import free_port
from tests.unit.tools.doctor.trees import GIB, cpuinfo, machine, write

MIB = 1024 * 1024


def test_a_machine_without_limits(tmp_path: Path) -> None:
    root = machine(tmp_path)
    processor = read_processor(root, {0, 2})
    assert (processor.name, processor.online, processor.usable, processor.quota) == ("Fake CPU", 4, 2, None)
    assert processor.instruction_sets == ["AVX2", "FMA", "F16C", "AVX-512", "AVX-512 BF16"]
    assert processor.fast_bfloat16
    assert processor.effective == 2
    assert processor.load == 0.25
    memory = read_memory(root)
    assert (memory.total, memory.available, memory.limit) == (32 * GIB, 16 * GIB, None)
    assert (memory.swap, memory.transparent, memory.reserved_pages) == (2 * MIB, "madvise", (16, 2 * MIB))


def test_an_arm_processor_calls_its_flags_features(tmp_path: Path) -> None:
    text = "processor\t: 0\nBogoMIPS\t: 50\nFeatures\t: fp asimd bf16 sve\n"
    processor = read_processor(write(tmp_path, {"proc/cpuinfo": text}), {0})
    assert processor.instruction_sets == ["NEON", "BF16", "SVE"]
    assert processor.name == "unknown"


def test_limits_of_version_2_count_on_every_level(tmp_path: Path) -> None:
    root = write(
        machine(tmp_path),
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/container/memory.current": "1\n",
        },
    )
    assert read_processor(root, {0, 1, 2, 3}).quota == 1.5
    memory = read_memory(root)
    assert (memory.limit, memory.available) == (4 * GIB, 2 * GIB)


def test_limits_of_version_1(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/cpuinfo": cpuinfo("avx2"),
            "proc/meminfo": "MemTotal: 1024 kB\nMemAvailable: 1000 kB\n",
            "proc/self/cgroup": "4:memory:/jobs\n3:cpu,cpuacct:/jobs\n1:name=systemd:/\n",
            "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/jobs/memory.usage_in_bytes": "5\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{512 * 1024}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{112 * 1024}\n",
        },
    )
    assert read_processor(root, {0, 1}).quota == 0.5
    memory = read_memory(root)
    assert (memory.limit, memory.available, memory.transparent) == (512 * 1024, 400 * 1024, None)


def test_an_empty_tree_is_no_error(tmp_path: Path) -> None:
    assert read_processor(tmp_path, {0}).usable == 1
    assert read_memory(tmp_path).available == 0


def test_bandwidth_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_SECONDS", 0.01)
    speed = bandwidth.measure(2, 256 * MIB)
    assert speed is not None
    assert speed > 1e8
    assert bandwidth.measure(2, 8 * MIB) is None


def test_packages_are_read_without_importing_them() -> None:
    packages = read_packages()
    assert packages.services == ["tercet-frontend", "tercet-core", "tercet-worker"]
    assert packages.versions["torch"]
    assert packages.lacking == []


def test_compiler_and_cache_are_found_as_the_worker_finds_them(tmp_path: Path) -> None:
    compiler = tmp_path / "bin/my-c++"
    write(
        tmp_path,
        {"bin/my-c++": "#!/bin/sh\necho my compiler 1.2\necho more\n", "cache/kernels/a-b/tercet_kernels.so": ""},
    )
    compiler.chmod(0o755)
    environment = {"PATH": str(tmp_path / "bin"), "TERCET_CACHE": str(tmp_path / "cache"), "CXX": "my-c++"}
    kernels = read_kernels(environment)
    assert (kernels.compiler, kernels.compiler_version, kernels.built) == (str(compiler), "my compiler 1.2", 1)
    assert kernels.cache == tmp_path / "cache/kernels"
    del environment["CXX"]
    assert read_kernels(environment).compiler is None


def test_gpus_are_those_of_the_table() -> None:
    table = "NVIDIA H200, 143771, 140000, 570.1, 9.0\nNVIDIA-SMI has failed\nX, [N/A], [N/A], 1, 2\n"
    (gpu,) = parse_gpus(table)
    assert (gpu.name, gpu.memory, gpu.free, gpu.capability) == ("NVIDIA H200", 143_771 * MIB, 140_000 * MIB, "9.0")


def test_a_port_that_is_taken_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "in use" in port_problem("127.0.0.1", port)
    assert port_problem("127.0.0.1", 0) == ""
    assert "address" in port_problem("host.invalid", 0)


@contextmanager
def redis(*answers: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """A server that gives these answers to what it reads; yields its port and what it read."""
    read: list[bytes] = []
    with socket.create_server(("127.0.0.1", free_port())) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                for answer in answers:
                    read.append(connection.recv(1000))
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], read
        thread.join(60)


def test_redis_that_answers() -> None:
    with redis(b"+PONG\r\n") as (port, read):
        assert redis_problem(f"redis://127.0.0.1:{port}/0") == ""
    assert read == [b"*1\r\n$4\r\nPING\r\n"]


def test_redis_with_a_password_that_is_never_shown() -> None:
    with redis(b"+OK\r\n", b"+PONG\r\n") as (port, read):
        network = read_network("127.0.0.1", 0, f"redis://me:p%40ss@127.0.0.1:{port}/0")
    assert read[0] == b"*3\r\n$4\r\nAUTH\r\n$2\r\nme\r\n$4\r\np@ss\r\n"
    assert network.redis == f"redis://127.0.0.1:{port}/0"
    assert network.redis_problem == ""


def test_redis_that_refuses() -> None:
    with redis(b"-NOAUTH Authentication required.\r\n") as (port, _):
        assert redis_problem(f"redis://127.0.0.1:{port}") == "NOAUTH Authentication required."
    assert "refused" in redis_problem(f"redis://127.0.0.1:{port}")


@pytest.mark.parametrize("url", ["127.0.0.1", "http://a", "redis://", "redis://a:b"])
def test_what_is_no_redis_url(url: str) -> None:
    assert redis_problem(url).startswith("not ")


def test_a_model_s_numbers(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m", hidden=64, layers=2, heads=4, kv_heads=2, vocab=384, tied=False)
    model = read_model(
        str(path), revision=None, dtype="auto", quantization="auto", fast_bfloat16=False, compact_bfloat16=False
    )
    assert (model.name, model.architecture, model.form, model.context) == ("m", "LlamaForCausalLM", "float32", 2048)
    assert model.stored == {"F32": model.parameters * 4}
    assert list(model.forms) == ["int8", "bfloat16", "float32"]
    assert model.weights.nbytes == model.parameters * 4
    assert model.forms["bfloat16"].nbytes == model.parameters * 2
    assert model.weights.read_per_token == (model.parameters - 384 * 64) * 4
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert model.kv_tokens(model.weights.nbytes + 4 * 512 * 100) == (100, 400)
    assert model.kv_tokens(0) == (0, 0)
    assert model.decode_ceiling(1e9) == pytest.approx(1e9 / model.weights.read_per_token)


def test_a_tied_embedding_is_read_for_every_token(tmp_path: Path) -> None:
    path = str(write_tiny_llama(tmp_path / "m"))
    model = read_model(
        path, revision=None, dtype="auto", quantization="auto", fast_bfloat16=True, compact_bfloat16=False
    )
    assert model.form == "bfloat16"
    assert model.weights.read_per_token == model.weights.nbytes


@pytest.mark.parametrize("tied", [True, False])
def test_compact_weights_take_three_quarters_once_they_are_loaded(tmp_path: Path, tied: bool) -> None:
    path = str(write_tiny_llama(tmp_path / "m", tied=tied))
    compact, dense = (
        read_model(
            path, revision=None, dtype="auto", quantization="auto", fast_bfloat16=True, compact_bfloat16=wanted
        ).forms
        for wanted in (True, False)
    )
    assert compact["bfloat16"].nbytes == dense["bfloat16"].nbytes * 3 // 4
    assert compact["bfloat16"].read_per_token == dense["bfloat16"].read_per_token * 3 // 4
    assert compact["bfloat16"].loading == dense["bfloat16"].loading == dense["bfloat16"].nbytes
    assert compact["float32"] == dense["float32"]
    assert compact["int8"] == dense["int8"]


@pytest.mark.parametrize(
    ("flags", "compact"),
    [
        ("avx2 fma f16c", True),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16", True),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_tile amx_bf16", False),
        ("avx f16c", False),
    ],
)
def test_processors_that_read_compact_weights(tmp_path: Path, flags: str, compact: bool) -> None:
    assert read_processor(machine(tmp_path, flags)).compact_bfloat16 is compact


def test_quantized_weights_are_held_as_they_are_unless_told_otherwise(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    path = str(write_tiny_llama_gguf(tmp_path / "m.gguf", quantization=kind))

    def form(dtype: Dtype = "auto", quantization: Quantization = "auto") -> str:
        return read_model(
            path, revision=None, dtype=dtype, quantization=quantization, fast_bfloat16=True, compact_bfloat16=False
        ).form

    assert (form(), form("float32"), form(quantization="none"), form(quantization="int8")) == (
        "as stored", "float32", "bfloat16", "int8",
    )  # fmt: skip
    model = read_model(
        path, revision=None, dtype="auto", quantization="auto", fast_bfloat16=True, compact_bfloat16=False
    )
    assert model.weights.nbytes == model.stored["Q8_0"] + model.stored["F32"] // 2
    assert model.stored["Q8_0"] < model.weights.nbytes < model.forms["bfloat16"].nbytes


def test_a_hub_model_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError):
        read_model(
            "nobody/nothing",
            revision=None,
            dtype="auto",
            quantization="auto",
            fast_bfloat16=True,
            compact_bfloat16=False,
        )
