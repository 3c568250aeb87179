"""`tercet serve`: from settings to an exit code.

Exit codes: 0 when it was asked to stop (SIGINT from Ctrl-C, SIGTERM, or SIGHUP from a closed terminal), 1 when a
service failed or the settings cannot work here (one sentence says why), 130 when a second Ctrl-C cut the stop short.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeAlias

from tercet_shared.errors import TercetError
from tercet_shared.lifecycle.listening import open_shared_listener
from tercet_shared.lifecycle.plan import plan_serve
from tercet_shared.lifecycle.readiness import check_port
from tercet_shared.lifecycle.rundir import RunDirectory, base_directory
from tercet_shared.lifecycle.supervisor import EXIT_FAILED, Outcome, StopRequest, Supervisor
from tercet_shared.lifecycle.terminal import Terminal
from tercet_shared.lifecycle.views import choose_view, name_width

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tercet_shared.config import ServeSettings
    from tercet_shared.lifecycle.plan import Plan


Planner: TypeAlias = "Callable[[ServeSettings, Path, Mapping[str, str]], Plan]"
"""Makes the plan of a run from the settings, the run directory and the environment."""


def run_serve(
    settings: ServeSettings, environ: Mapping[str, str] | None = None, *, planner: Planner = plan_serve
) -> int:
    """Runs all services on this machine until they are asked to stop, and returns the exit code.

    Args:
        settings: what the user asked for.
        environ: the environment; by default that of this process.
        planner: decides which processes those are.
    """
    terminal = Terminal(sys.stdout, sys.stderr, choose_view(sys.stderr, name_width(settings.frontends)))
    terminal.start()
    outcome = asyncio.run(_serve(settings, os.environ if environ is None else environ, terminal, planner))
    if outcome.message is not None:
        terminal.say(f"error: {outcome.message}")
    if not terminal.close():
        # A terminal that takes nothing must not hold up the exit; all that had to be cleaned up is.
        os._exit(outcome.code)
    return outcome.code


async def _serve(settings: ServeSettings, environ: Mapping[str, str], terminal: Terminal, planner: Planner) -> Outcome:
    with stop_on_signals() as stop:
        try:
            check_port(settings.host, settings.port)
            with RunDirectory(base_directory(settings.run_dir, environ)) as directory, _listener(settings) as listener:
                plan = planner(settings, directory.path, environ).holding(directory.lock)
                if listener is not None:
                    plan = plan.sharing(listener.fileno())
                return await Supervisor(plan, stop, terminal, grace_s=settings.grace).run()
        except TercetError as error:
            return Outcome(EXIT_FAILED, error.message)


def _listener(settings: ServeSettings) -> AbstractContextManager[socket.socket | None]:
    """Returns the socket that front ends share; None where there is one, which opens its own."""
    return nullcontext() if settings.frontends == 1 else open_shared_listener(settings.host, settings.port)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns signals into a `StopRequest`, on the running loop of the main thread.

    SIGINT, SIGTERM and SIGHUP ask; another SIGINT insists. A second SIGTERM does not: service managers and `timeout`
    send it to the whole process group and once more to the process. Where SIGHUP is ignored (nohup), it stays ignored.
    """
    stop = StopRequest()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if stop.asked.is_set():
            stop.insisted.set()
        stop.asked.set()

    handled = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handled.append(signal.SIGHUP)
    for number in handled:
        loop.add_signal_handler(number, interrupt if number == signal.SIGINT else stop.asked.set)
    try:
        yield stop
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
