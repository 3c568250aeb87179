"""The command: ``tercet doctor``."""

from __future__ import annotations

import json
import sys

from tercet_shared.config import parse
from tercet_shared.errors import ConfigurationError
from tercet_tools.doctor.examination import examine
from tercet_tools.doctor.report import as_json, as_text
from tercet_tools.doctor.settings import DoctorSettings


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    try:
        settings = parse(DoctorSettings, arguments)
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    seen = examine(settings)
    text = json.dumps(as_json(seen), indent=2) + "\n" if settings.as_json else as_text(seen)
    sys.stdout.write(text)
    return 1 if any(finding.level == "missing" for finding in seen.findings()) else 0
