"""The main function of every service process: settings, logging, event loop, signals, exit code.

A service is one coroutine function ``serve(settings, reporter, stop)``. It runs until ``stop`` is set (SIGTERM or
SIGINT), then ends cleanly within its own grace, and returns. A `TercetError` that leaves it becomes one sentence for
the supervisor and exit code 1; anything else is a fault of ours and keeps its traceback in the log.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import uvloop

from tercet_shared.config import CoreSettings, FrontendSettings, WorkerSettings, parse
from tercet_shared.errors import ConfigurationError, TercetError
from tercet_shared.lifecycle.interpreter import Settling
from tercet_shared.lifecycle.report import LogReporter, PipeReporter, Reporter
from tercet_shared.telemetry.logs import configure_logging

S = TypeVar("S", FrontendSettings, CoreSettings, WorkerSettings)
Serve = Callable[[S, Reporter, asyncio.Event], Awaitable[None]]


def run_service(kind: type[S], serve: Serve[S], argv: list[str] | None = None) -> int:
    """Runs one service to its end and returns the process's exit code."""
    reporter: Reporter = LogReporter()
    try:
        settings = parse(kind, sys.argv[1:] if argv is None else argv)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  # before logging exists
        return 2
    name = str(kind.model_config.get("cli_prog_name")).replace(" ", "-")
    configure_logging(settings.log_level, settings.log_format, name)
    if settings.report_fd is not None:
        reporter = PipeReporter(settings.report_fd)
    try:
        uvloop.run(_until_stopped(settings, serve, Settling(reporter)))
    except TercetError as error:
        reporter.fatal(error.message)
        return 1
    except BaseExceptionGroup as group:
        known = _first_known(group)
        if known is None:
            logging.getLogger("tercet").exception("unexpected end of the service", exc_info=group)
            reporter.fatal(f"unexpected {type(group.exceptions[0]).__name__}: {group.exceptions[0]}")
            return 1
        reporter.fatal(known.message)
        return 1
    except Exception as error:  # the outermost frame: log all there is and tell the supervisor
        logging.getLogger("tercet").exception("unexpected end of the service")
        reporter.fatal(f"unexpected {type(error).__name__}: {error}")
        return 1
    return 0


async def _until_stopped(settings: S, serve: Serve[S], reporter: Reporter) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, reporter, stop)


def _first_known(group: BaseExceptionGroup[BaseException]) -> TercetError | None:
    for error in group.exceptions:
        if isinstance(error, TercetError):
            return error
        if isinstance(error, BaseExceptionGroup):
            inner = _first_known(error)
            if inner is not None:
                return inner
    return None
