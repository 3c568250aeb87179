"""`make profile-worker`: every part of a step, with a floor where there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import worker_profile
from tests.bench.worker_profile import Case, main
from tests.fakes.checkpoints import write_tiny_llama


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_case_shows_its_parts(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_llama(tmp_path / "model", hidden=64, heads=4, kv_heads=2)
    cases = (Case("decode", 2, 1, 20, 5), Case("prefill", 1, 20, 0, 2))
    monkeypatch.setattr(worker_profile, "CASES", cases)
    main([str(model), f"--dtype={dtype}", "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["case"] for each in found] == ["decode", "prefill"]
    for each in found:
        assert min(each["read_gb_per_s"], each["matrix_gflop_per_s"]) > 0
        parts = {part["part"]: part for part in each["parts"]}
        assert {"embedding", "norm", "attention", "sampling", "host", "step"} <= parts.keys()
        assert all(0 <= part["min_ms"] <= parts["step"]["median_ms"] for name, part in parts.items() if name != "host")
        floors = {name for name, part in parts.items() if part["floor_ms"] is not None}
        assert floors == {"attention", "step", *(name for name in parts if name.startswith("linear "))}
