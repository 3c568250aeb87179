"""A service's process has the interpreter's settings from the moment it says that it is ready."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tercet_shared.lifecycle.interpreter import SWITCH_S, THRESHOLDS

SERVICE = """
import gc, sys
from tercet_shared.config import CoreSettings
from tercet_shared.lifecycle.service import run_service

async def serve(settings, reporter, stop):
    print(gc.get_threshold() == {thresholds}, gc.get_freeze_count() > 0)
    reporter.progress("starting")
    reporter.ready(core="core-1")
    print(gc.get_threshold() == {thresholds}, gc.get_freeze_count() > 0, round(sys.getswitchinterval(), 6))

sys.exit(run_service(CoreSettings, serve))
"""


def test_it_is_set_when_the_service_is_ready(tmp_path: Path) -> None:
    program = tmp_path / "service.py"
    program.write_text(SERVICE.format(thresholds=THRESHOLDS))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["False False", f"True True {SWITCH_S}"]
    assert "core-1" in done.stderr
