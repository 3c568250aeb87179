"""Which processes `tercet serve` runs, with which arguments and environment. Pure: nothing is started here."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tercet_shared.config import MAX_FRONTENDS, CoreSettings, FrontendSettings, ServeSettings, WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ENGINE_SOCKET = "engine.sock"
"""gRPC socket of the core, in the run directory."""

LINK_SOCKET = "link.sock"
"""Socket of the link between core and worker, in the run directory."""

FRONT_END = "front end"
"""Role of the processes that serve HTTP, and the name of the only one."""

_ENV_PREFIX = "TERCET_"
_API_KEY = "TERCET_API_KEY"
_REDIS_URL = "TERCET_REDIS_URL"
_NOT_FOR_USERS = (
    "listen", "link", "core", "listen_fd", "process_socket", "accept_when_ready",
    "core_address", "nodes", "node_rank", "rendezvous", "local_rank", "rendezvous_fd",
)  # fmt: skip
"""Settings of single services that the plan decides."""


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
        holds: descriptors that it inherits and keeps open to its end, without knowing them.
        role: what it is, where several are the same; they are stopped together. Its name by default.
        again: arguments that come behind the others when it is started again.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    restart: RestartPolicy | None = None
    holds: tuple[int, ...] = ()
    role: str = ""
    again: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.role:
            object.__setattr__(self, "role", self.name)

    def restarted(self) -> ChildSpec:
        """Returns what is started when it has died."""
        return replace(self, argv=(*self.argv, *self.again), again=())


@dataclass(frozen=True, slots=True)
class Plan:
    """What the supervisor runs.

    Attributes:
        children: in the order in which they are started, and stopped.
        frontend: role of the children that serve HTTP; their ``ready`` reports carry ``port``.
        host: address that it listens on.
        model: what the user named; said where nothing better is known.
        api_key: a key that the front end accepts, or None where none is known here.
        needs_key: whether the front end asks for one.
        tls: whether it speaks HTTPS.
    """

    children: tuple[ChildSpec, ...]
    frontend: str
    host: str
    model: str
    api_key: str | None = None
    needs_key: bool = False
    tls: bool = False

    def holding(self, descriptor: int) -> Plan:
        """Returns the same plan, with children that all hold ``descriptor``."""
        children = (replace(child, holds=(*child.holds, descriptor)) for child in self.children)
        return replace(self, children=tuple(children))

    def sharing(self, listener: int) -> Plan:
        """Returns the same plan, with front ends that all serve on the socket ``listener`` and inherit it."""
        children = (
            replace(child, holds=(*child.holds, listener), argv=(*child.argv, f"--listen-fd={listener}"))
            if child.role == self.frontend
            else child
            for child in self.children
        )
        return replace(self, children=tuple(children))


def plan_serve(settings: ServeSettings, run_dir: Path, environ: Mapping[str, str]) -> Plan:
    """Returns the plan for the front ends, one core and one worker on this machine.

    Where there are several front ends, the caller opens the socket that they share, and names it with `Plan.sharing`.

    Args:
        settings: what the user asked for.
        run_dir: private directory for the sockets.
        environ: the supervisor's environment. The children get it without the variables that ``settings`` already
            took into account: a flag that the user gave must not lose against such a variable.
    """
    engine = f"unix:{run_dir / ENGINE_SOCKET}"
    link = run_dir / LINK_SOCKET
    env = _without_settings(environ)
    # Command lines are readable by everybody on the machine, environments are not: keys travel there.
    secrets = {_API_KEY: json.dumps(settings.api_key)} if settings.api_key else {}
    core = settings.narrow(
        CoreSettings, listen=engine, link=link, report_fd=None, metrics_port=_metrics_port(settings, 1)
    )
    worker = settings.narrow(WorkerSettings, link=link, report_fd=None, metrics_port=_metrics_port(settings, 2))
    return Plan(
        children=(
            *_front_ends(settings, run_dir, engine, {**env, **secrets}),
            # It is this machine's own, on a socket that nobody else reaches, and does not register.
            ChildSpec("core", _python("tercet_core", core.arguments()), _without(env, _REDIS_URL)),
            ChildSpec("worker", _python("tercet_worker", worker.arguments()), env, RestartPolicy()),
        ),
        frontend=FRONT_END,
        host=settings.host,
        model=settings.served_model_name[0] if settings.served_model_name else settings.model,
        api_key=settings.api_key[0] if settings.api_key else None,
        needs_key=bool(settings.api_key) or settings.api_keys_file is not None,
        tls=settings.tls_cert is not None,
    )


def _front_ends(settings: ServeSettings, run_dir: Path, engine: str, env: Mapping[str, str]) -> tuple[ChildSpec, ...]:
    common = settings.narrow(
        FrontendSettings, model=[settings.model], core=[engine], discover_cores=False, api_key=[], report_fd=None
    )
    if settings.frontends == 1:
        return (ChildSpec(FRONT_END, _python("tercet_frontend", common.arguments()), env),)
    specs = []
    for number in range(1, settings.frontends + 1):
        own = common.model_copy(update={"process_socket": run_dir / process_socket(number)})
        own.metrics_port = _metrics_port(settings, 0 if number == 1 else number + 1)
        # The first answers from the beginning on, so that /livez and /readyz do; with the others, and whenever one
        # is started again, no client shall meet a process that cannot serve yet.
        late = ("--accept-when-ready",)
        argv = (*_python("tercet_frontend", own.arguments()), *(late if number > 1 else ()))
        again = late if number == 1 else ()
        specs.append(ChildSpec(f"{FRONT_END} {number}", argv, env, RestartPolicy(), role=FRONT_END, again=again))
    return tuple(specs)


def _metrics_port(settings: ServeSettings, place: int) -> int | None:
    """Returns the metrics port of the process at this place; 0 (a free one) and none are the same for all."""
    return settings.metrics_port + place if settings.metrics_port else settings.metrics_port


def process_socket(number: int) -> str:
    """Returns the name of the socket in the run directory that front end ``number`` (from 1) has for itself."""
    return f"http{number}.sock"


def _python(module: str, arguments: list[str]) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    # What only one service knows (TERCET_WORKER_TIMEOUT, …) reaches it through the environment as before.
    decided = {_ENV_PREFIX + name.upper() for name in (*ServeSettings.model_fields, *_NOT_FOR_USERS)}
    return {name: value for name, value in environ.items() if name.upper() not in decided}


def _without(environ: Mapping[str, str], left_out: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.upper() != left_out}


def socket_paths(run_dir: Path) -> tuple[bytes, ...]:
    """Returns the paths of the sockets that a plan puts into ``run_dir``, as the kernel sees them."""
    names = (ENGINE_SOCKET, LINK_SOCKET, process_socket(MAX_FRONTENDS))
    return tuple(os.fsencode(run_dir / name) for name in names)
