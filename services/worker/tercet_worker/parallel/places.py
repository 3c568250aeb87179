"""From settings to the place of a process among the ranks of its group. Imports no torch."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from tercet_shared.errors import ConfigurationError
from tercet_worker.parallel.meeting import Meeting
from tercet_worker.parallel.topology import Topology, answering

if TYPE_CHECKING:
    from tercet_shared.config import WorkerSettings

_LAST_PORT = 65_535


def local_ranks(settings: WorkerSettings) -> range:
    """Returns the ranks that run on this host.

    Raises:
        ConfigurationError: they cannot be divided so, or this host is none of those that there are.
    """
    ranks, nodes = settings.tensor_parallel_size * settings.pipeline_parallel_size, settings.nodes
    if ranks % nodes:
        raise ConfigurationError(
            f"--nodes {nodes}: {settings.tensor_parallel_size} x {settings.pipeline_parallel_size} ranks cannot be "
            "divided among them evenly.",
            param="nodes",
        )
    if settings.node_rank >= nodes:
        raise ConfigurationError(
            f"--node-rank {settings.node_rank}: there are {nodes} hosts, counted from 0.", param="node_rank"
        )
    each = ranks // nodes
    return range(settings.node_rank * each, (settings.node_rank + 1) * each)


def topology_of(settings: WorkerSettings) -> Topology:
    """Returns the place of this process; raises ConfigurationError as `local_ranks` does."""
    here = local_ranks(settings)
    rank = here.start + (settings.local_rank or 0)
    return Topology(settings.tensor_parallel_size, settings.pipeline_parallel_size, rank)


def host_and_port(settings: WorkerSettings) -> tuple[str, int]:
    """Returns the parts of ``--rendezvous``. Raises ConfigurationError where it is no address."""
    host, _, port = (settings.rendezvous or "").rpartition(":")
    if not host or not port.isdigit() or int(port) > _LAST_PORT:
        raise ConfigurationError(
            f"--rendezvous {settings.rendezvous}: an address as host:port is needed.", param="rendezvous"
        )
    return host.strip("[]"), int(port)


def meeting_of(settings: WorkerSettings) -> Meeting:
    """Returns where this process meets the other ranks; what starts it has named the place."""
    host, port = host_and_port(settings)
    return Meeting(
        host=host,
        port=port,
        listen_fd=settings.rendezvous_fd,
        nodes=settings.nodes,
        timeout_s=settings.rendezvous_timeout,
        group=uuid.uuid4().hex,
    )


def speaker(settings: WorkerSettings) -> int:
    """Returns the rank of this host whose figures stand for all of them: the one that answers, else the first."""
    here = local_ranks(settings)
    found = answering(settings.tensor_parallel_size, settings.pipeline_parallel_size)
    return found if found in here else here.start
