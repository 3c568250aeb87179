"""The kernels of a program under the address and undefined-behaviour sanitizers: only when asked for, it takes long."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tercet_worker.kernels.build import build
from tercet_worker.kernels.toolchain import find_compiler


@pytest.mark.skipif(os.environ.get("TERCET_KERNEL_SANITIZE") != "1", reason="TERCET_KERNEL_SANITIZE=1 is not set")
@pytest.mark.timeout(900)
def test_the_program_touches_nothing_that_it_should_not() -> None:
    compiler = find_compiler()
    assert compiler is not None
    library = build(sanitize=True)
    runtime = compiler.run(["-print-file-name=libasan.so"]).stdout.strip()
    finished = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("program_sanitized.py")), str(library)],
        env={**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert finished.stdout.endswith(" runs\n")
