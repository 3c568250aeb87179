"""Which processes `tercet serve` runs, with which arguments and environment. Pure: nothing is started here."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tercet_shared.config import CoreSettings, FrontendSettings, ServeSettings, WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ENGINE_SOCKET = "engine.sock"
"""gRPC socket of the core, in the run directory."""

LINK_SOCKET = "link.sock"
"""Socket of the link between core and worker, in the run directory."""

_ENV_PREFIX = "TERCET_"
_API_KEY = "TERCET_API_KEY"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a child that was ready and died is started again.

    Attributes:
        most: restarts within ``window_s`` seconds; one death more is a failure.
        window_s: seconds.
        delay_s: seconds before the first restart of a window; it doubles with each further one.
    """

    most: int = 3
    window_s: float = 60.0
    delay_s: float = 0.1


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process.

    Attributes:
        name: what people call it, as in "the worker was killed".
        argv: the whole command line; the supervisor adds ``--report-fd=N``.
        env: the whole environment.
        restart: what happens when it dies after it was ready; None: its death is a failure.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    restart: RestartPolicy | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What the supervisor runs.

    Attributes:
        children: in the order in which they are started, and stopped.
        frontend: the child that serves HTTP; its ``ready`` report carries ``port``.
        host: address that it listens on.
        model: what the user named; said where nothing better is known.
        api_key: a key that the front end accepts, or None where it asks for none.
    """

    children: tuple[ChildSpec, ...]
    frontend: str
    host: str
    model: str
    api_key: str | None = None


def plan_serve(settings: ServeSettings, run_dir: Path, environ: Mapping[str, str]) -> Plan:
    """Returns the plan for one front end, one core and one worker on this machine.

    Args:
        settings: what the user asked for.
        run_dir: private directory for the two sockets.
        environ: the supervisor's environment. The children get it without the variables that ``settings`` already
            took into account: a flag that the user gave must not lose against such a variable.
    """
    engine = f"unix:{run_dir / ENGINE_SOCKET}"
    link = run_dir / LINK_SOCKET
    env = _without_settings(environ)
    # Command lines are readable by everybody on the machine, environments are not: keys travel there.
    secrets = {_API_KEY: json.dumps(settings.api_key)} if settings.api_key else {}
    frontend = settings.narrow(FrontendSettings, core=[engine], api_key=[], report_fd=None)
    core = settings.narrow(CoreSettings, listen=engine, link=link, report_fd=None)
    worker = settings.narrow(WorkerSettings, link=link, report_fd=None)
    return Plan(
        children=(
            ChildSpec("front end", _python("tercet_frontend", frontend.arguments()), {**env, **secrets}),
            ChildSpec("core", _python("tercet_core", core.arguments()), env),
            ChildSpec("worker", _python("tercet_worker", worker.arguments()), env, RestartPolicy()),
        ),
        frontend="front end",
        host=settings.host,
        model=settings.model,
        api_key=settings.api_key[0] if settings.api_key else None,
    )


def _python(module: str, arguments: list[str]) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    # What only one service knows (TERCET_WORKER_TIMEOUT, …) reaches it through the environment as before.
    decided = {_ENV_PREFIX + name.upper() for name in (*ServeSettings.model_fields, "listen", "link", "core")}
    return {name: value for name, value in environ.items() if name.upper() not in decided}


def socket_paths(run_dir: Path) -> tuple[bytes, ...]:
    """Returns the paths of the sockets that a plan puts into ``run_dir``, as the kernel sees them."""
    return tuple(os.fsencode(run_dir / name) for name in (ENGINE_SOCKET, LINK_SOCKET))
