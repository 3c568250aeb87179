"""Where the ranks of a group meet. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and how ranks meet.

    Attributes:
        host: of the rendezvous.
        port: of the rendezvous.
        listen_fd: descriptor of the socket that listens there; in rank 0 only.
        nodes: hosts.
        timeout_s: seconds in which all must have come.
        group: name of the group that rank 0 gives it.
    """

    host: str
    port: int
    listen_fd: int | None
    nodes: int
    timeout_s: float
    group: str

    @property
    def address(self) -> str:
        """For people."""
        return f"{self.host}:{self.port}"
