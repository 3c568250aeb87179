"""How ranks find each other, and what is said when they do not. (That they do: `test_parallel.py`.)"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import TCPStore  # what torch.distributed exports, with types

from tercet_shared.errors import ConfigurationError, TercetError
from tercet_worker.parallel.meeting import Meeting
from tercet_worker.parallel.rendezvous import Membership, RendezvousError, join_group
from tercet_worker.parallel.topology import Topology
from tests.fakes.ports import free_port

CPU = torch.device("cpu")


class Host:
    """A place to meet, and ranks that go there, each in a thread."""

    def __init__(self) -> None:
        port = free_port()
        self.listener = socket.create_server(("127.0.0.1", port))
        self.meeting = Meeting("127.0.0.1", port, None, 1, 3.0, "g")
        self.threads = ThreadPoolExecutor(4)

    def join(self, topology: Topology, **changes: object) -> Future[Membership]:
        meeting = replace(self.meeting, **changes)  # type: ignore[arg-type]
        if topology.rank == 0:
            meeting = replace(meeting, listen_fd=self.listener.detach())
        return self.threads.submit(join_group, meeting, topology, CPU)

    def wait_for(self, key: str) -> None:
        """Waits until somebody has left a value at the place to meet."""
        store = TCPStore(self.meeting.host, self.meeting.port, is_master=False, timeout=timedelta(seconds=20))
        store.wait([key])


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.listener.close()
    made.threads.shutdown()


def error_of(future: Future[Membership]) -> TercetError:
    error = future.exception(60)
    assert isinstance(error, TercetError)
    return error


def test_ranks_that_do_not_come_are_named(host: Host) -> None:
    first, third = host.join(Topology(2, 2, 0), nodes=2), host.join(Topology(2, 2, 2), nodes=2)
    message = error_of(first).message
    assert isinstance(error_of(first), RendezvousError)
    assert message == (
        f"2 of 4 ranks did not come to the rendezvous at {host.meeting.address} within 3 s: 1, 3 (of host 0, 1)."
    )
    assert "rendezvous" in error_of(third).message


def test_a_group_of_another_shape_is_told_so_and_so_are_those_who_wait(host: Host) -> None:
    first = host.join(Topology(2, 1, 0))
    host.wait_for("tercet/shape")  # of the first; if the other's came first, the first would be the one that is refused
    other = host.join(Topology(1, 2, 1), timeout_s=30)
    errors = {type(error_of(future)): error_of(future).message for future in (first, other)}
    (refused,) = [message for kind, message in errors.items() if kind is ConfigurationError]
    (waited,) = [message for kind, message in errors.items() if kind is RendezvousError]
    assert "the parallel sizes and --nodes must be the same on all hosts" in refused
    assert "did not come" in waited
    assert "It was noticed that a group of" in waited


def test_two_hosts_of_one_number(host: Host) -> None:
    host.join(Topology(3, 1, 0))
    twins = [host.join(Topology(3, 1, 1), timeout_s=30) for _ in range(2)]
    messages = [error_of(twin).message for twin in twins]
    assert sum("do two hosts have the same --node-rank?" in message for message in messages) == 1


def test_an_address_where_nobody_listens(host: Host) -> None:
    host.listener.close()
    message = error_of(host.join(Topology(2, 1, 1), timeout_s=0.3)).message
    assert message.startswith(
        f"The rendezvous at {host.meeting.address} cannot be reached after 0.3 s: Connection refused"
    )
    assert "Rank 0 listens there" in message


def test_a_name_that_stands_for_nothing(host: Host) -> None:
    with pytest.raises(RendezvousError, match=r"cannot be reached after 0\.1 s"):
        join_group(replace(host.meeting, host="no.such.host.invalid", timeout_s=0.1), Topology(2, 1, 1), CPU)
