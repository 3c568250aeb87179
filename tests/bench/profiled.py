"""Runs a module under cProfile from SIGUSR1 on, so that its start is not in the profile.

python -m tests.bench.profiled FILE MODULE [arguments]
"""

from __future__ import annotations

import cProfile
import runpy
import signal
import sys


def main() -> None:
    """Runs the module as a program; the profile is written when it ends."""
    path, module = sys.argv[1:3]
    profile = cProfile.Profile()
    signal.signal(signal.SIGUSR1, lambda *_: profile.enable())
    sys.argv[:] = sys.argv[2:]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        profile.disable()
        profile.dump_stats(path)


if __name__ == "__main__":
    main()
