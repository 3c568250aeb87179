"""The type check of one package does not see what that package must not import."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import typecheck

SETTINGS = '[tool.mypy]\npython_version = "3.11"\nstrict = true\n'


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("torch", "torch.zeros(1)"),
        ("tercet_worker", "tercet_worker.runner"),
        ("tercet_frontend", "tercet_frontend.app"),
    ],
)
def test_a_use_of_it_in_the_core_is_an_error(
    module: str, use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typecheck, "ROOT", tmp_path)  # its cache is apart from the real one
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    package = tmp_path / "tercet_core"
    package.mkdir()
    source = package / "__init__.py"
    source.write_text("import os\n\nVALUE = os.sep\n")
    assert typecheck.check("tercet_core", tmp_path, (tmp_path,)) == (0, "")
    source.write_text(f"import {module}\n\nVALUE = {use}\n")
    status, said = typecheck.check("tercet_core", tmp_path, (tmp_path,))
    assert status == 1
    assert f'Module has no attribute "{use.split(".")[1].removesuffix("(1)")}"' in said
