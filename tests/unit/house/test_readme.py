"""The README names nothing that does not exist. That docs/settings.md is whole, another test says."""

from __future__ import annotations

import re
from pathlib import Path

from tercet_shared.config import ServeSettings

README = Path(__file__).parents[3] / "README.md"


def test_the_table_of_settings_names_flags_that_exist() -> None:
    settings = README.read_text().partition("## Settings")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in settings.splitlines() if line.startswith("| `--")]
    named = {flag for row in rows for flag in re.findall(r"--([a-z-]+)", row)}
    assert named
    assert named <= {name.replace("_", "-") for name in ServeSettings.model_fields}


def test_pages_that_are_linked_exist() -> None:
    pages = re.findall(r"\]\(([^)#:]+)[)#]", README.read_text())
    assert pages
    assert not [page for page in pages if not (README.parent / page).exists()]
