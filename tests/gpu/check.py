"""All checks of the CUDA worker, then its speed, as one table. Called by ``run.sh``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from tercet_worker.cuda.machine import open_machine
from tercet_worker.platforms.choice import why_no_gpu
from tests.gpu import kernels, model, speed


def main() -> int:
    """Returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--started", type=float, default=time.time(), help="when the script began, in Unix seconds")
    parser.add_argument("--budget", type=float, default=440.0, help="seconds after which nothing more is measured")
    options = parser.parse_args()
    if (missing := why_no_gpu(0)) is not None:
        print(f"The CUDA worker cannot be checked: {missing}")
        return 1
    torch.cuda.init()
    machine = open_machine(0, batch_invariant=False)
    rows, failed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for name, check in (*kernels.checks(machine), *model.checks(machine, Path(folder))):
            began = time.monotonic()
            try:
                check()
            except Exception:  # noqa: BLE001  # the table says which failed, and the others are still of interest
                failed += 1
                traceback.print_exc()
                rows.append((name, "WRONG"))
            else:
                rows.append((name, f"right ({time.monotonic() - began:.1f} s)"))
            print(*rows[-1], sep=": ", flush=True)
    torch.cuda.empty_cache()
    try:
        for row in speed.measure(machine, options.started + options.budget):
            rows.append(row)
            print(*row, sep=": ", flush=True)
    except Exception:  # noqa: BLE001  # as above
        failed += 1
        traceback.print_exc()
        rows.append(("speed", "WRONG"))
    count = torch.cuda.device_count()
    print(f"\n{count} x {machine.name}; torch {torch.__version__}; {time.strftime('%Y-%m-%d')}")
    print(f"{time.time() - options.started:.0f} s in all\n\n| what | result |\n|---|---|")
    for name, found in rows:
        print(f"| {name} | {found} |")
    sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # libraries of GPUs may take long to go
