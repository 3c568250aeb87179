"""How the ranks of a group find each other: within a time limit, and with a sentence that says what went wrong.

One process, rank 0, listens at the address of the rendezvous and keeps a few values there for all (a ``TCPStore`` of
``torch.distributed``). Every rank states there how the group is meant to look, and takes its place; when all have come,
``torch.distributed`` connects them.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # what torch.distributed exports, with types

from tercet_shared.errors import ConfigurationError, LinkError
from tercet_worker.parallel.communicator import ALONE, ProcessGroups
from tercet_worker.parallel.failures import LOST_RENDEZVOUS

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from tercet_worker.parallel.communicator import Communicator
    from tercet_worker.parallel.meeting import Meeting
    from tercet_worker.parallel.topology import Topology

_SHAPE, _GROUP, _OBJECTION = "tercet/shape", "tercet/group", "tercet/objection"
_LONGEST_WAIT = timedelta(hours=2)
"""For ranks that load their weights, which takes as long as it takes. One that ends is noticed at once."""
_FIRST_DELAY, _LONGEST_DELAY = 0.05, 1.0
"""Seconds between attempts to reach the rendezvous: at first, and after doubling."""


class RendezvousError(LinkError):
    """The ranks did not come together. One sentence says why."""


@dataclass(frozen=True, slots=True)
class Membership:
    """One rank's place in a group that is complete."""

    communicator: Communicator = ALONE
    group: str = ""


def join_group(meeting: Meeting, topology: Topology, device: torch.device) -> Membership:
    """Waits for all ranks and connects to them. Blocks; once in a process.

    Raises:
        RendezvousError: the address cannot be reached, or ranks did not come within the time limit.
        ConfigurationError: ranks were started with different ideas of the group.
    """
    deadline = time.monotonic() + meeting.timeout_s
    store = _open_store(meeting, deadline)
    try:
        group = _take_place(store, meeting, topology)
        _wait_for_all(store, meeting, topology, deadline)
        dist.init_process_group(
            "gloo",
            store=PrefixStore("tercet/processes", store),
            rank=topology.rank,
            world_size=topology.ranks,
            timeout=_LONGEST_WAIT,
        )
    except RuntimeError as error:  # of torch.distributed, which has no narrower one
        first = str(error).partition("\n")[0]
        raise RendezvousError(f"{LOST_RENDEZVOUS} at {meeting.address}: another rank ended ({first}).") from error
    return Membership(ProcessGroups(topology, device), group)


def _open_store(meeting: Meeting, deadline: float) -> TCPStore:
    if meeting.listen_fd is None:
        _reach(meeting, deadline)
    try:
        return TCPStore(
            meeting.host,
            meeting.port,
            is_master=meeting.listen_fd is not None,
            timeout=timedelta(seconds=max(deadline - time.monotonic(), 1.0)),
            wait_for_workers=False,
            master_listen_fd=meeting.listen_fd,
        )
    except RuntimeError as error:  # see above
        first = str(error).partition("\n")[0]
        raise RendezvousError(f"There is no rendezvous at {meeting.address}: {first}") from error


def _reach(meeting: Meeting, deadline: float) -> None:
    """Waits until something listens at the address: the host of rank 0 may start later than this one.

    There is no event for that across hosts, so it is tried again after a growing delay; nothing waits but this rank.
    """
    delay = _FIRST_DELAY
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((meeting.host, meeting.port), timeout=max(left, 0.1)).close()
        except OSError as error:
            if left <= delay:
                raise RendezvousError(
                    f"The rendezvous at {meeting.address} cannot be reached after {meeting.timeout_s:g} s: "
                    f"{error.strerror or error}. Rank 0 listens there, on the host with --node-rank 0."
                ) from error
        else:
            return
        time.sleep(delay)
        delay = min(2 * delay, _LONGEST_DELAY)


def _take_place(store: Store, meeting: Meeting, topology: Topology) -> str:
    """Says that this rank is here, and returns the name of the group."""
    shape = f"{topology.tensor} x {topology.pipeline} ranks on {meeting.nodes} host{'s' * (meeting.nodes > 1)}"
    found = bytes(store.compare_set(_SHAPE, "", shape)).decode()
    if found != shape:
        objection = f"a group of {found} meets at {meeting.address}, and rank {topology.rank} belongs to one of {shape}"
        store.set(_OBJECTION, objection)
        raise ConfigurationError(
            f"{objection[0].upper()}{objection[1:]}: the parallel sizes and --nodes must be the same on all hosts."
        )
    if store.add(f"{_place(topology.rank)}/count", 1) > 1:
        objection = f"rank {topology.rank} came twice to {meeting.address}"
        store.set(_OBJECTION, objection)
        raise ConfigurationError(f"{objection[0].upper()}{objection[1:]}: do two hosts have the same --node-rank?")
    group = bytes(store.compare_set(_GROUP, "", meeting.group)).decode() if topology.rank == 0 else ""
    store.set(_place(topology.rank), socket.gethostname())
    return group or bytes(store.get(_GROUP)).decode()


def _wait_for_all(store: Store, meeting: Meeting, topology: Topology, deadline: float) -> None:
    ranks = range(topology.ranks)
    left = timedelta(seconds=max(deadline - time.monotonic(), 0.01))
    try:
        store.wait([_place(rank) for rank in ranks], left)
    except dist.DistStoreError as error:
        missing = [rank for rank in ranks if not store.check([_place(rank)])]
        each = topology.ranks // meeting.nodes
        hosts = sorted({rank // each for rank in missing})
        where = f" (of host {_list(hosts)})" if meeting.nodes > 1 else ""
        reason = ""
        with suppress(RuntimeError):  # rank 0, which keeps the values, may give up first
            if store.check([_OBJECTION]):
                reason = f" It was noticed that {bytes(store.get(_OBJECTION)).decode()}."
        raise RendezvousError(
            f"{len(missing)} of {topology.ranks} ranks did not come to the rendezvous at {meeting.address} within "
            f"{meeting.timeout_s:g} s: {_list(missing)}{where}.{reason}"
        ) from error


def _place(rank: int) -> str:
    return f"tercet/rank/{rank}"


def _list(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
