"""The README's table of settings is complete and names nothing that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

from tercet_shared.config import ServeSettings

README = Path(__file__).parents[3] / "README.md"
NOT_FOR_USERS = {"report_fd", "model"}


def test_the_table_of_settings_has_every_flag_and_no_other() -> None:
    settings = README.read_text().partition("## Settings")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in settings.splitlines() if line.startswith("| `--")]
    named = {flag for row in rows for flag in re.findall(r"--([a-z-]+)", row)} - {"no-prefix-caching"}
    exist = {name.replace("_", "-") for name in ServeSettings.model_fields if name not in NOT_FOR_USERS}
    assert named == exist
