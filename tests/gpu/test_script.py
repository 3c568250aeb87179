"""The check of the CUDA worker: run with the tests where there is a GPU; elsewhere it says that there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("run.sh")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(
        [str(SCRIPT), *arguments], capture_output=True, text=True, env=environment, timeout=600, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run()
    assert done.returncode == 3
    assert done.stdout.startswith("No GPU to check: this torch (")
    assert done.stdout.count("\n") == 1
    assert not done.stderr


GOES_ON = """
import threading, time
from tests.gpu.check import Table

def fails():
    raise ValueError("a | b\\nmore")

def hangs():
    table.watch()
    threading.Event().wait()

table = Table(time.time(), time.time())
table.check("first", fails)
table.check("second", lambda: None)
table.measure(iter([("third", "1 ms")]))
table.check("fourth", hangs)
"""


def test_what_fails_is_named_and_what_hangs_ends_in_time_with_a_table() -> None:
    pytest.importorskip("triton", reason="the checks import the kernels")
    done = subprocess.run(
        [sys.executable, "-c", GOES_ON], capture_output=True, text=True, timeout=120, check=False,
        cwd=SCRIPT.parents[2],
    )  # fmt: skip
    assert done.returncode == 1
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert rows[0] == "| first | WRONG: ValueError: a / b |"
    assert rows[1].startswith("| second | right (")
    assert rows[2:] == ["| third | 1 ms |", "| fourth | WRONG: did not end in time |"]
    assert "in fails" in done.stderr


LEAVES = """
import sys, tempfile, time
from pathlib import Path
import torch
from tests.gpu import check, kernels, model, speed

def illegal():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

asked = []
works = {"first": lambda: asked.append(1), "second": illegal, "third": lambda: asked.append(3)}
kernels.checks = lambda *_: works.items()
model.checks = lambda *_: []
speed.measure = lambda *_: []
torch.cuda.device_count = lambda: 1
state = Path(sys.argv[1])
lost = not state.exists()
torch.cuda.synchronize = lambda: illegal() if lost and table.wrong else None
table = check.Table(time.time(), time.time() + 300)
table.load(state)
check.run(table, None, None, Path("."), state)
print("asked", asked)
table.end()
"""


def test_a_gpu_that_is_lost_is_given_to_another_process(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the checks import the kernels")
    command = [sys.executable, "-c", LEAVES, str(tmp_path / "state")]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=SCRIPT.parents[2])
        for _ in range(2)
    )
    assert first.returncode == 75, first.stderr
    assert second.returncode == 1, second.stderr
    assert "asked [3]" in second.stdout
    rows = [line.split(" (")[0] for line in second.stdout.splitlines() if line.startswith("| ")][1:]
    assert rows == [
        "| first | right",
        "| second | WRONG: RuntimeError: CUDA error: an illegal memory access was encountered |",
        "| third | right",
    ]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CUDA worker is checked on a machine with an NVIDIA GPU")
def test_all_is_well_on_this_gpu() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
