"""The command: ``tercet bench serve``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import uvloop

from tercet_shared.config import parse
from tercet_shared.errors import ConfigurationError, TercetError
from tercet_tools.bench.plot import draw
from tercet_tools.bench.progress import Progress
from tercet_tools.bench.report import as_json, as_text, heading
from tercet_tools.bench.session import Session
from tercet_tools.bench.settings import BenchSettings

if TYPE_CHECKING:
    from tercet_tools.bench.session import Measurement

_USAGE = """\
usage: tercet bench serve --url URL [flags]

benches:
  serve  put load on servers with an OpenAI-style API; report latency and throughput

`tercet bench serve --help` lists the flags.
"""
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a measurement ended.

    Attributes:
        measurement: what there is of it.
        interrupted: whether it was cut short.
    """

    measurement: Measurement
    interrupted: bool


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    what, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if what in ("-h", "--help", "help"):
        sys.stdout.write(_USAGE)
        return 0
    if what != "serve":
        sys.stderr.write(_USAGE)
        return 2
    try:
        settings = parse(BenchSettings, rest)
        settings.check()
        return _serve(settings)
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except TercetError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _serve(settings: BenchSettings) -> int:
    for path, setting in _files(settings):
        _write(path, "", setting)  # before an hour of measuring, not after it
    # Where the JSON is the result, everything else makes room for it.
    out = sys.stderr if settings.json_file == "-" else sys.stdout
    outcome = uvloop.run(measure(settings, Progress(sys.stderr)))
    report(outcome, out)
    if outcome.interrupted:
        return _INTERRUPTED
    return 1 if outcome.measurement.hopeless else 0


async def measure(settings: BenchSettings, progress: Progress) -> Outcome:
    """Measures what checked ``settings`` say; SIGINT and SIGTERM end it, and leave what there is.

    Raises:
        ConfigurationError: a URL or the dataset is wrong.
        RequestFailedError: a server does not answer at all.
    """
    _allow_many_connections()
    session = Session(settings, progress)
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(session.run())
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        if not running.cancelled():  # this task was, not the one that measures
            running.cancel()
            raise
    finally:
        progress.end()
        for number in signals:
            loop.remove_signal_handler(number)
    return Outcome(session.measurement, interrupted=running.cancelled())


def report(outcome: Outcome, out: TextIO) -> None:
    """Writes the tables to ``out``, and the files that were asked for.

    Raises:
        ConfigurationError: a file cannot be written.
    """
    measurement = outcome.measurement
    settings = measurement.settings
    out.write(heading(measurement))
    for result in measurement.results:
        if any(run.begun for runs in result.runs for run in runs):
            out.write("\n" + as_text(result, measurement))
    if outcome.interrupted:
        out.write("\ninterrupted: the figures are of what was answered until then\n")
    out.flush()
    if settings.json_file is not None:
        text = json.dumps(as_json(measurement, interrupted=outcome.interrupted), indent=2) + "\n"
        if settings.json_file == "-":
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            _write(Path(settings.json_file), text, "json_file")
    if settings.plot_file is not None:
        _write(settings.plot_file, draw(measurement), "plot_file")


def _files(settings: BenchSettings) -> list[tuple[Path, str]]:
    """Returns the files that will be written, each with the setting that names it."""
    files: list[tuple[Path, str]] = []
    if settings.json_file not in (None, "-"):
        files.append((Path(str(settings.json_file)), "json_file"))
    if settings.plot_file is not None:
        files.append((settings.plot_file, "plot_file"))
    return files


def _write(path: Path, text: str, setting: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {os.strerror(error.errno or 0)}.", param=setting) from None


def _allow_many_connections() -> None:
    """Raises the limit of open files as far as the system lets us: every stream is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
