"""The ``tercet`` command: runs all services on this machine, or one of them. Imports no service."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final, NoReturn

from tercet_shared.config import ServeSettings, parse
from tercet_shared.errors import ConfigurationError
from tercet_shared.output import flush, while_it_is_read

SERVICES: Final = {"frontend": "tercet_frontend", "core": "tercet_core", "worker": "tercet_worker"}
"""Sub-command and import name of each service; the wheel is called ``tercet-`` and the sub-command."""

TOOLS: Final = {
    "bench": "tercet_tools.bench.command",
    "chat": "tercet_tools.chat.command",
    "completion": "tercet_tools.completion.command",
    "doctor": "tercet_tools.doctor.command",
    "key": "tercet_tools.key.command",
}
"""Sub-command and module of each tool: ``main(arguments)`` runs it and returns the exit code."""

_HELP: Final = """\
usage: tercet serve MODEL [flags]
       tercet frontend | core | worker [flags]
       tercet doctor [MODEL] | chat | key new NAME | bench serve --url URL | completion SHELL [flags]
       tercet --version | --help

Serves large language models behind an OpenAI-style HTTP API.

commands:
  serve MODEL  run everything on this machine: a front end, a core and a worker
  frontend     run one front end: HTTP in, token streams out
  core         run one core: schedules requests onto its worker
  worker       run one worker: holds the model and computes
  chat         talk to a server from this terminal
  doctor       what this machine offers, and what a model would need and reach here
  key          make API keys
  bench serve  measure one server or several: latency and throughput under load
  completion   print what makes bash, zsh or fish complete this command

`tercet COMMAND --help` lists the command's flags. Every flag can also be given in the
environment: --max-num-seqs 64 is TERCET_MAX_NUM_SEQS=64. The flag wins.

MODEL is a directory with a Hugging Face checkpoint (config.json and safetensors), a GGUF file,
or a model id of the Hugging Face hub.

examples:
  tercet serve ./SmolLM2-135M-Instruct.Q4_1.gguf
  tercet serve HuggingFaceTB/SmolLM2-135M-Instruct --port 9000 --dtype float32
  TERCET_API_KEY=secret tercet serve ./checkpoint --host 0.0.0.0
  tercet doctor ./checkpoint
  tercet bench serve --url http://127.0.0.1:8000 --concurrency 1,16

the same in three shells:
  tercet core --listen 127.0.0.1:8100 --link run/worker.sock
  tercet worker --link run/worker.sock ./checkpoint
  tercet frontend --core 127.0.0.1:8100 ./checkpoint

exit codes of serve: 0 asked to stop, 1 a service failed (one sentence says why), 2 wrong
usage, 130 a second Ctrl-C cut the stop short.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code; `tercet frontend`, `core` and `worker` become that service."""
    arguments = sys.argv[1:] if argv is None else argv
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in ("-h", "--help", "help"):
        with while_it_is_read():
            print(_HELP, end="")
        return 0
    if command in ("-V", "--version"):
        with while_it_is_read():
            print(f"tercet {_version()}")
        return 0
    if command == "serve":
        return _serve(rest)
    if command in TOOLS:
        return _tool(command, rest)
    if command in SERVICES and _installed(command):
        _become(command, rest)
    if command in SERVICES:
        print(f"error: {_not_installed([command])}", file=sys.stderr)
        return 1
    if command:
        print(f"error: tercet has no command {command!r}; `tercet --help` lists them.", file=sys.stderr)
    else:
        print(_HELP, end="", file=sys.stderr)
    return 2


def _serve(arguments: list[str]) -> int:
    try:
        settings = parse(ServeSettings, arguments)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    missing = [name for name in SERVICES if not _installed(name)]
    if missing:
        print(f"error: {_not_installed(missing)}", file=sys.stderr)
        return 1
    # Only here: what shows progress and supervises is not needed to become a service.
    from tercet_shared.lifecycle.serve import run_serve  # noqa: PLC0415

    return run_serve(settings)


def _tool(name: str, arguments: list[str]) -> int:
    # Only here: no tool is needed to serve, and some need more than this package does.
    try:
        tool = importlib.import_module(TOOLS[name])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("tercet_"):
            raise
        print(
            f"error: `tercet {name}` needs the package {error.name}, which is not installed: "
            "`pip install 'tercet-shared[tools]'`.",
            file=sys.stderr,
        )
        return 1
    code = 1  # unless all of its output is read
    with while_it_is_read():
        found = int(tool.main(arguments))
        flush()
        code = found
    return code  # noqa: RET504  # the block may end early


def _become(name: str, arguments: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", SERVICES[name], *arguments])  # noqa: S606  # a program of ours


def _installed(name: str) -> bool:
    return importlib.util.find_spec(SERVICES[name]) is not None


def _not_installed(names: list[str]) -> str:
    wheels = " ".join(f"tercet-{name}" for name in names)
    what = " and ".join(f"the {name}" for name in names)
    return f"{what} is not installed in this environment: `pip install {wheels}` (from a checkout: `make`)."


def _version() -> str:
    try:
        return version("tercet-shared")
    except PackageNotFoundError:
        return "(not installed as a package)"


if __name__ == "__main__":
    sys.exit(main())
