"""All checks of the CUDA worker, then its speed, as one table. Called by ``run.sh``.

A kernel that reads or writes where it must not leaves a process that can do nothing more on the GPU. Then what was
found is kept in a file, and the process ends with `AGAIN`: the next one goes on behind the check that did it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tercet_worker.cuda.machine import open_machine
from tercet_worker.platforms.choice import why_no_gpu
from tercet_worker.platforms.cuda import Machine
from tests.gpu import kernels, model, speed

Row = tuple[str, str]
_REST_S = 15.0
"""Kept of the time for what is under way when it ends."""
_MEASURING_S = 100.0
"""Kept of the time for measuring; checks that have not begun by then are left out, and said to be."""
_LINE = 160
AGAIN = 75
"""Exit status of a process whose GPU is of no use any more."""


@dataclass
class Table:
    """What was found, printed as it comes and once more as a whole.

    Args:
        started: when the script began, in Unix seconds.
        deadline: when it must have ended.
    """

    started: float
    deadline: float
    rows: list[Row] = field(default_factory=list)
    wrong: int = 0
    _doing: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, found: str) -> None:
        """Adds a row."""
        self.rows.append((name, found))
        print(f"{name}: {found}", flush=True)

    def check(self, name: str, work: Callable[[], None]) -> None:
        """Does ``work`` and adds a row that says how it went. The other checks are still of interest where it fails."""
        self._doing, began = name, time.monotonic()
        try:
            work()
        except Exception as error:  # noqa: BLE001  # see above
            self.failed(name, error)
        else:
            self.add(name, f"right ({time.monotonic() - began:.1f} s)")
        self._doing = None

    def measure(self, rows: Iterator[Row]) -> None:
        """Adds rows as they are measured."""
        self._doing = "speed"
        try:
            for name, found in rows:
                self.add(name, found)
                self._doing = f"what follows {name!r}"
        except Exception as error:  # noqa: BLE001  # as above
            self.failed(self._doing, error)
        self._doing = None

    def failed(self, name: str, error: Exception) -> None:
        """Adds a row of what failed."""
        self.wrong += 1
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0][:_LINE]
        self.add(name, f"WRONG: {type(error).__name__}: {first}")

    def save(self, state: Path) -> None:
        """Keeps what was found for the next process."""
        state.write_text(json.dumps({"rows": self.rows, "wrong": self.wrong}))

    def load(self, state: Path) -> None:
        """Takes over what the process before has found."""
        if state.exists():
            held = json.loads(state.read_text())
            self.rows, self.wrong = [(name, found) for name, found in held["rows"]], held["wrong"]

    def watch(self) -> None:
        """Sees to it that the script ends in time, with a table, also where something never returns."""
        timer = threading.Timer(max(self.deadline - time.time(), 0.0), self._late)
        timer.daemon = True
        timer.start()

    def _late(self) -> None:
        self.wrong += 1
        self.rows.append((self._doing or "something between two checks", "WRONG: did not end in time"))
        self.end("the time is over")

    def end(self, why: str = "") -> None:
        """Prints the table and ends the process: libraries of GPUs may take long to go."""
        if not self._lock.acquire(blocking=False):
            return  # the other thread does
        print(f"\n{machine_line()}\n{time.time() - self.started:.0f} s in all{f': {why}' if why else ''}\n")
        print("| what | result |\n|---|---|")
        for name, found in self.rows:
            print(f"| {name} | {found.replace('|', '/')} |")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if self.wrong else 0)


def machine_line() -> str:
    """Returns what this was found on."""
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return f"{torch.cuda.device_count()} x {name}; torch {torch.__version__}; {time.strftime('%Y-%m-%d')}"


def run(table: Table, machine: Machine, invariant: Machine, folder: Path, state: Path) -> None:
    """Does everything that is not in the table yet, in the order of what the rest depends on."""
    checks = (*kernels.checks(machine, invariant), *model.checks(machine, invariant, folder, torch.cuda.device_count()))
    done = {name for name, _ in table.rows}
    for name, check in checks:
        if name in done:
            continue
        if time.time() > table.deadline - _REST_S - _MEASURING_S:
            table.wrong += 1
            table.add(name, "WRONG: not begun, for want of time")
            continue
        table.check(name, check)
        gc.collect()
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            table.save(state)
            os._exit(AGAIN)
    table.measure(speed.measure(machine, table.deadline - _REST_S))


def main() -> None:
    """Ends the process with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--started", type=float, default=time.time(), help="when the script began, in Unix seconds")
    parser.add_argument(
        "--budget", type=float, default=465.0, help="seconds after which it ends, whatever is under way"
    )
    parser.add_argument("--state", type=Path, required=True, help="file for a process that goes on after this one")
    options = parser.parse_args()
    table = Table(options.started, options.started + options.budget)
    table.load(options.state)
    table.watch()
    if (missing := why_no_gpu(0)) is not None:
        table.failed("start", RuntimeError(f"The CUDA worker cannot be checked: {missing}"))
        table.end()
    print(machine_line(), flush=True)
    try:
        machine, invariant = (open_machine(0, batch_invariant=invariant) for invariant in (False, True))
    except Exception as error:  # noqa: BLE001  # nothing else can be checked; the table says why
        table.failed("start", error)
        table.end()
    with tempfile.TemporaryDirectory() as folder:
        run(table, machine, invariant, Path(folder), options.state)
        table.end()


if __name__ == "__main__":
    main()
