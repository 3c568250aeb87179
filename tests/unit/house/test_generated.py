"""The committed gRPC code is what the proto files generate."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools import generate_proto


def test_the_committed_code_matches_the_proto_files() -> None:
    assert generate_proto.differences() == []


def test_a_changed_proto_or_a_leftover_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, target = tmp_path / "proto", tmp_path / "shared"
    shutil.copytree(generate_proto.SOURCES, sources)
    shutil.copytree(generate_proto.TARGET / "tercet_proto", target / "tercet_proto")
    monkeypatch.setattr(generate_proto, "SOURCES", sources)
    monkeypatch.setattr(generate_proto, "TARGET", target)
    assert generate_proto.differences() == []
    (target / "tercet_proto/v1/old_pb2.py").touch()
    proto = sources / "tercet_proto/v1/engine.proto"
    proto.write_text(proto.read_text().replace("message Hello {", "message Hello {\n  string extra = 99;"))
    changed = generate_proto.differences()
    assert "tercet_proto/v1/old_pb2.py" in changed
    assert "tercet_proto/v1/engine_pb2.py" in changed
