"""A process that holds sockets as a core does: ``claimant.py PATH …``. Prints its janitor's process id, then waits."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from tercet_shared.ipc.listener import LinkListener
from tercet_shared.lifecycle.janitor import Janitor

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
with ExitStack() as files:
    listeners = [LinkListener(Path(argument)) for argument in sys.argv[1:]]
    janitor = files.enter_context(Janitor.of_sockets((each.claim.path, each.claim.mark) for each in listeners))
    for each in listeners:
        files.enter_context(each)
    print(janitor.pid, flush=True)
    signal.sigwait({signal.SIGUSR1})
