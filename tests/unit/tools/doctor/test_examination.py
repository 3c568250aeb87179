"""What follows from the facts: findings, exit codes, reports."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tercet_shared.config import parse
from tercet_tools.doctor import command
from tercet_tools.doctor.examination import Examination, examine
from tercet_tools.doctor.report import as_json, as_text, size
from tercet_tools.doctor.settings import DoctorSettings
from tercet_tools.doctor.software import Gpu
from tests.fakes.checkpoints import write_tiny_llama
from tests.unit.tools.doctor.trees import GIB, machine


@pytest.fixture
def seen(tmp_path: Path) -> Examination:
    """A machine on which everything is fine, and a model."""
    model = write_tiny_llama(tmp_path / "model")
    settings = parse(DoctorSettings, ["--port=0", "--no-measure", str(model)])
    found = examine(settings, machine(tmp_path / "root"))
    return replace(
        found,
        bandwidth=10e9,
        gpus=[],
        processor=replace(found.processor, machine="x86_64", usable=4),
        kernels=replace(found.kernels, built=1),
        network=replace(found.network, files=(65_536, 65_536)),
    )


def changed(seen: Examination, part: str, **fields: Any) -> Examination:
    return replace(seen, **{part: replace(getattr(seen, part), **fields)})


def said(seen: Examination) -> list[tuple[str, str]]:
    return [(finding.level, f"{finding.text} {finding.advice}") for finding in seen.findings()]


def test_nothing_is_found_where_all_is_well(seen: Examination) -> None:
    assert seen.findings() == []
    assert "Nothing is missing." in as_text(seen)


@pytest.mark.parametrize(
    ("part", "fields", "level", "words"),
    [
        ("processor", {"flags": frozenset()}, "warning", "AVX2"),
        ("processor", {"flags": frozenset({"avx2", "fma"})}, "warning", "AVX2, FMA or F16C"),
        ("processor", {"flags": frozenset({"avx2", "fma", "f16c"})}, "warning", "bfloat16"),
        ("processor", {"quota": 2.5}, "warning", "--threads 2"),
        ("processor", {"load": 3.0}, "warning", "busy"),
        ("memory", {"transparent": "never"}, "warning", "echo madvise"),
        ("memory", {"transparent": None}, "warning", "2 MiB pages"),
        ("memory", {"available": 1000}, "missing", "GiB are available"),
        ("memory", {"available": 1_000_000}, "warning", "--kv-cache-memory"),
        ("kernels", {"built": 0, "compiler": None}, "warning", "Install g++"),
        ("kernels", {"built": 0, "compiler": "/usr/bin/c++"}, "warning", "tercet_worker.kernels.build"),
        ("network", {"files": (1024, 4096)}, "warning", "ulimit -n 4096"),
        ("network", {"files": (1024, -1)}, "warning", "ulimit -n 65536"),
        ("network", {"port_problem": "Address already in use"}, "warning", "--port"),
        ("network", {"redis": "redis://a", "redis_problem": "refused"}, "missing", "TERCET_REDIS_URL"),
        ("packages", {"versions": {"tercet-shared": "1", "tercet-core": None}}, "missing", "pip install tercet-core"),
        ("packages", {"lacking": ["tercet-core: msgpack"]}, "missing", "pip install msgpack"),
    ],
)  # fmt: skip
def test_each_trouble_is_one_finding_with_advice(
    seen: Examination, part: str, fields: dict[str, Any], level: str, words: str
) -> None:
    ill = changed(seen, part, **fields)
    ((found, text),) = said(ill)
    assert found == level
    assert words in text
    assert text.split()[0] in as_text(ill)
    assert as_json(ill)["findings"][0]["level"] == level


def test_one_service_alone_is_no_fault(seen: Examination) -> None:
    versions = {**seen.packages.versions, "tercet-worker": None}
    ((level, text),) = said(changed(changed(seen, "packages", versions=versions), "kernels", built=0))
    assert level == "warning"
    assert "tercet-worker" in text


def test_a_smaller_type_is_proposed_where_it_fits(seen: Examination) -> None:
    assert seen.model is not None
    tight = changed(changed(seen, "model", form="float32"), "memory", available=seen.model.forms["float32"].nbytes - 1)
    ((level, text),) = said(tight)
    assert level == "missing"
    assert "They fit as int8 or bfloat16" in text


def test_a_gpu_with_room_is_enough(seen: Examination) -> None:
    gpu = Gpu(name="G", memory=8 * GIB, free=8 * GIB, driver="1", capability="9.0")
    poor = replace(changed(seen, "memory", available=1000), gpus=[gpu])
    assert poor.findings() == []
    assert "G                     8.0 GiB of 8.0 GiB free" in as_text(poor)


def test_what_is_missing_stands_first(seen: Examination) -> None:
    ill = changed(changed(seen, "memory", transparent="never"), "network", redis="redis://a", redis_problem="refused")
    assert [level for level, _ in said(ill)] == ["missing", "warning"]


def test_the_model_s_estimate_is_called_one(seen: Examination) -> None:
    assert seen.model is not None
    text = as_text(seen)
    ceiling = seen.model.decode_ceiling(10e9, "bfloat16")
    assert f"{ceiling:.0f} bfloat16" in text
    assert "an estimate" in text
    values = as_json(seen)["model"]
    assert values["decode_ceiling_estimate"]["bfloat16"] == pytest.approx(ceiling, abs=0.1)
    forms = values["forms"]
    assert 3 * forms["float32"]["nbytes"] == 8 * forms["bfloat16"]["nbytes"], "twelve bits each"
    unmeasured = replace(seen, bandwidth=None)
    assert "an estimate" not in as_text(unmeasured)
    assert as_json(unmeasured)["model"]["decode_ceiling_estimate"] is None


def test_sizes_have_three_digits() -> None:
    assert [size(value) for value in (0, 999, 22.5 * 1024, 269e6, 3 * GIB, 10**18)] == [
        "0 B", "999 B", "22.5 KiB", "257 MiB", "3.0 GiB", "909495 TiB",
    ]  # fmt: skip


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_llama(tmp_path / "model")
    assert command.main(["--no-measure", "--port=0", "--json", str(model)]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["name"] == "model"
    assert command.main(["--no-measure", "--port=0", str(tmp_path / "none.gguf")]) == 1
    out = capsys.readouterr().out
    assert "✗ The model" in out
    assert "does not exist" in out
    assert command.main(["--port=many"]) == 2
    assert "--port" in capsys.readouterr().err


def test_no_service_and_no_torch_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from tercet_shared.cli import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'tercet_worker', 'tercet_core', 'tercet_frontend'} & set(sys.modules); sys.exit(code)"
    )
    model = write_tiny_llama(tmp_path / "model")
    flags = ["doctor", "--no-measure", "--port=0", str(model)]
    done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
