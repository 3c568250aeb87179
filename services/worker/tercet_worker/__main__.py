"""``python -m tercet_worker MODEL``: the worker as a process."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Runs the worker to its end, or starts the ranks that it is made of and watches them."""
    # Threads of OpenMP must sleep, not spin, while they wait for the next step: idle is idle. Its runtime reads this
    # when it is loaded, so it comes before anything that imports torch. A user's own setting stands.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("KMP_BLOCKTIME", "0")

    from tercet_shared.config import WorkerSettings  # noqa: PLC0415  # after the environment is set
    from tercet_shared.lifecycle.service import run_service  # noqa: PLC0415
    from tercet_worker.parallel.launch import launch, launches  # noqa: PLC0415

    if launches(sys.argv[1:]):
        sys.exit(run_service(WorkerSettings, launch))

    from tercet_worker.device_thread import end_process  # noqa: PLC0415
    from tercet_worker.worker import serve  # noqa: PLC0415  # imports torch

    end_process(run_service(WorkerSettings, serve))


if __name__ == "__main__":
    main()
