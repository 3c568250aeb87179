"""`tercet worker` with several ranks: starts those of this host, watches them, and ends with the first that ends.

The ranks of a group are of no use one by one: when one ends, the others are ended too, and this process ends with the
reason. Who supervises it (`tercet serve`, a container's runtime) starts the group again, as a whole.

Imports no torch: this process computes nothing.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from tercet_shared.config import WorkerSettings, parse
from tercet_shared.errors import ConfigurationError, TercetError
from tercet_shared.lifecycle.plan import ChildSpec
from tercet_shared.lifecycle.process import Child
from tercet_worker.parallel.failures import is_consequence
from tercet_worker.parallel.places import host_and_port, local_ranks, speaker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tercet_shared.lifecycle.report import Event, Reporter

_CAUSE_S: Final = 2.0
"""Seconds that ranks are given to say what happened, when the first to end was only dragged along."""
_STOP_S: Final = 3.0
"""Seconds in which ranks that were asked to end must do so."""
_LOOPBACK: Final = "127.0.0.1"


def launches(argv: list[str]) -> bool:
    """Returns whether a worker with this command line starts ranks (or says what is wrong with it)."""
    try:
        settings = parse(WorkerSettings, argv)
    except ConfigurationError:
        return True
    return settings.local_rank is None and settings.tensor_parallel_size * settings.pipeline_parallel_size > 1


async def launch(settings: WorkerSettings, reporter: Reporter, stop: asyncio.Event) -> None:
    """Runs the ranks of this host until ``stop`` is set.

    Raises:
        ConfigurationError: the settings do not fit together, or the address of the rendezvous cannot be had.
        TercetError: a rank ended; the sentence says which and why.
    """
    with _rendezvous(settings) as (address, listener):
        ranks = _Ranks(rank_specs(settings, address, listener, os.environ), reporter, _speaker_place(settings))
        await ranks.run(stop)


def rank_specs(
    settings: WorkerSettings, address: str, listener: int | None, environ: Mapping[str, str]
) -> list[ChildSpec]:
    """Returns the processes of this host's ranks.

    Args:
        settings: of the worker.
        address: where ranks meet.
        listener: descriptor of the socket that listens there; None where it is on another host.
        environ: of this process; what ``settings`` took from it is left out.
    """
    taken = {f"TERCET_{name.upper()}" for name in WorkerSettings.model_fields}
    env = {name: value for name, value in environ.items() if name.upper() not in taken}
    env.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what goes wrong with a peer becomes a sentence of ours
    if settings.nodes == 1:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    specs = []
    for place, rank in enumerate(local_ranks(settings)):
        own = settings.model_copy(
            update={
                "local_rank": place,
                "rendezvous": address,
                "rendezvous_fd": listener if rank == 0 else None,
                "report_fd": None,
                "metrics_port": settings.metrics_port if place == _speaker_place(settings) else None,
            }
        )
        argv = (sys.executable, "-m", "tercet_worker", *own.arguments())
        holds = (listener,) if rank == 0 and listener is not None else ()
        specs.append(ChildSpec(f"worker's rank {rank}", argv, env, holds=holds, role=f"rank {rank}"))
    return specs


def _speaker_place(settings: WorkerSettings) -> int:
    return speaker(settings) - local_ranks(settings).start


@contextmanager
def _rendezvous(settings: WorkerSettings) -> Iterator[tuple[str, int | None]]:
    """Yields the address where ranks meet, and the socket that listens there if this is the host."""
    if settings.rendezvous is None and settings.nodes > 1:
        raise ConfigurationError(
            "--rendezvous is needed with --nodes: an address of host 0, as host:port.", param="rendezvous"
        )
    local_ranks(settings)
    if settings.node_rank > 0:
        host_and_port(settings)
        yield settings.rendezvous or "", None
        return
    host, port = (_LOOPBACK, 0) if settings.rendezvous is None else host_and_port(settings)
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(place[:2], family=family)
    except OSError as error:
        reason = {
            errno.EADDRINUSE: "it is in use",
            errno.EADDRNOTAVAIL: "it is no address of this host, which has --node-rank 0",
        }.get(error.errno or 0, error.strerror)
        raise ConfigurationError(
            f"The ranks cannot meet at {settings.rendezvous}: {reason}.", param="rendezvous"
        ) from error
    with listener:
        address = f"{host}:{port}" if port else f"{host}:{listener.getsockname()[1]}"
        yield address, listener.fileno()


class _Ranks:
    """The processes; an `Observer` of each."""

    def __init__(self, specs: list[ChildSpec], reporter: Reporter, speaker_place: int) -> None:
        self._children = [Child(spec, self) for spec in specs]
        self._speaker = self._children[speaker_place]
        self._reporter = reporter
        self._ended: list[Child] = []  # in the order in which it was noticed
        self._first_end = asyncio.Event()
        self._stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        try:
            for child in self._children:
                child.start()
            asked = asyncio.create_task(stop.wait())
            ended = asyncio.create_task(self._first_end.wait())
            try:
                await asyncio.wait((asked, ended), return_when=asyncio.FIRST_COMPLETED)
            finally:
                asked.cancel()
                ended.cancel()
            if not stop.is_set():
                raise TercetError(await self._cause())
        finally:
            await self._end_all()

    def on_report(self, child: Child, event: Event) -> None:
        """See `Observer`: passes on how far the first rank is, and that all are ready."""
        if event.event == "progress" and child is self._children[0]:
            self._reporter.progress(event.stage, event.fraction)
        elif event.event == "ready" and all(each.is_ready.is_set() for each in self._children):
            self._reporter.ready(**self._speaker.detail)

    def on_log(self, child: Child, line: str) -> None:
        """See `Observer`."""
        # A line of JSON stays one.
        mark = "" if line.startswith("{") else f"[{child.spec.role}] "
        sys.stderr.write(f"{mark}{line}\n")
        sys.stderr.flush()

    def on_exit(self, child: Child) -> None:
        """See `Observer`."""
        if not self._stopping:
            self._ended.append(child)
            self._first_end.set()

    async def _cause(self) -> str:
        """Returns why the group ends: what the rank says that was not only dragged along by others."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CAUSE_S):
                for child in self._children:
                    if self._found() is not None:
                        break
                    await child.exited.wait()
        for child in self._children:
            child.look()
        return self._found() or _said(self._ended[0])

    def _found(self) -> str | None:
        own = [child for child in self._ended if child.fatal is None or not is_consequence(child.fatal)]
        # One that was killed could say nothing, and is the cause of what the others say.
        silent = next((child for child in own if child.fatal is None), None)
        found = silent or next(iter(own), None)
        return None if found is None else _said(found)

    async def _end_all(self) -> None:
        self._stopping = True
        for child in self._children:
            child.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                for child in self._children:
                    if child.alive:
                        await child.exited.wait()
        for child in self._children:
            if child.alive:
                child.kill()
                await child.exited.wait()


def _said(child: Child) -> str:
    return child.fatal or child.describe_end()
