"""Measures a server over HTTP with `tercet bench serve`, and starts it first if need be.

    python tests/bench/serve.py (--serve MODEL | --url URL) [--peer URL [--peer-model NAME]] [flags]

With --serve MODEL it starts `tercet serve` on a free port, measures it, reports the resident memory of each of its
processes, and stops it. With --peer it measures a second server too, both in turn in every round, and adds the ratios,
in which a drift of the machine's speed cancels. Flags of `tercet bench serve` go there (three rounds unless they say
otherwise), all others to `tercet serve`. Tables go to standard error, one JSON object per load to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tercet_shared.config import parse as parse_settings
from tercet_shared.errors import TercetError
from tercet_tools.bench.command import Outcome, measure, report
from tercet_tools.bench.progress import Progress
from tercet_tools.bench.report import load_as_json
from tercet_tools.bench.settings import BenchSettings

_READY_S = 600.0
_BENCH_FLAGS = {"--json", "--plot", "--help", "--no-ignore-eos"} | {
    f"--{name.replace('_', '-')}" for name in BenchSettings.model_fields
}


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns what is for `tercet bench serve`, and what is for `tercet serve`."""
    bench: list[str] = []
    serve: list[str] = []
    part = serve
    for argument in arguments:
        if argument.startswith("--"):
            part = bench if argument.partition("=")[0] in _BENCH_FLAGS else serve
        part.append(argument)
    return bench, serve


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, with ``bench`` and ``flags`` for the two commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--serve", metavar="MODEL", help="start `tercet serve` with this model")
    which.add_argument("--url", help="a server that runs")
    parser.add_argument("--peer", help="a second server that runs")
    parser.add_argument("--model", help="name to ask for; by default the first that the server lists")
    parser.add_argument("--peer-model", help="the same for the peer")
    options, rest = parser.parse_known_args(argv)
    options.bench, options.flags = split(rest)
    if options.flags and options.serve is None:
        parser.error(f"unknown: {' '.join(options.flags)}")
    if options.peer and bool(options.model) != bool(options.peer_model):
        parser.error("--model and --peer-model go together")
    return options


def settings_of(options: argparse.Namespace, url: str) -> BenchSettings:
    """Returns what `tercet bench serve` is told. Raises ConfigurationError."""
    flags = [f"--url={url}", *([f"--url={options.peer}"] if options.peer else [])]
    flags += [f"--model={name}" for name in (options.model, options.peer_model) if name]
    settings = parse_settings(BenchSettings, ["--rounds=3", *flags, *options.bench])
    settings.check()
    return settings


@contextlib.asynccontextmanager
async def started(model: str, flags: list[str]) -> AsyncIterator[tuple[str, int]]:
    """Runs `tercet serve` on a free port; yields its URL and its process id once it is ready."""
    command = [sys.executable, "-m", "tercet_shared.cli", "serve", "--port=0", "--log-level=warning", *flags, model]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_READY_S):
            line = (await process.stdout.readline()).decode()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise SystemExit(await process.wait() or 1)  # it has said why
        yield found[0], process.pid
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def resident(supervisor: int) -> dict[str, float]:
    """Returns the resident memory of the supervisor and of its children, in MiB."""
    pids = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    result = {"supervisor": _rss(supervisor)}
    for pid in map(int, pids):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        module = next((word for word in command[1:] if "tercet_" in word), command[0])
        result[Path(module).stem.removeprefix("tercet_").rpartition(".")[2]] = _rss(pid)
    return result


def _rss(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def lines(outcome: Outcome) -> list[dict[str, Any]]:
    """Returns one object per load: ``server``, and with a peer ``peer`` and ``ratio`` (server by peer)."""
    found = []
    for result in outcome.measurement.results:
        values = load_as_json(result)
        servers, ratios = values.pop("servers"), values.pop("ratios", [])
        values |= dict(zip(("server", "peer"), servers, strict=False)) | dict(zip(("ratio",), ratios, strict=False))
        found.append(values)
    return found


async def main() -> int:
    """Measures what the command line asks for, and returns the exit code."""
    options = parse()
    async with contextlib.AsyncExitStack() as stack:
        url, supervisor = options.url, None
        if options.serve is not None:
            url, supervisor = await stack.enter_async_context(started(options.serve, options.flags))
        outcome = await measure(settings_of(options, url), Progress(sys.stderr))
        report(outcome, sys.stderr)
        memory = {} if supervisor is None else {"resident_mib": resident(supervisor)}
        for line in lines(outcome):
            print(json.dumps(line | memory), flush=True)
    return 130 if outcome.interrupted else int(outcome.measurement.hopeless)


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
    except TercetError as failure:
        sys.exit(f"error: {failure}")
