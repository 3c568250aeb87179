"""TCP ports for programs that must be told theirs before they start."""

from __future__ import annotations

import errno
import itertools
import os
import socket

_FIRST, _LAST = 20_000, 32_000
"""Below those that the kernel gives to outgoing connections and to port 0: nobody takes one of these unasked."""

_held: list[socket.socket] = []
"""Names of reserved ports, until this process ends."""

_candidates = itertools.cycle(range(_FIRST, _LAST))


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Returns so many ports in a row on which nobody listens, and that no other test on this machine is given.

    Raises:
        RuntimeError: there are none.
    """
    found: list[int] = []
    for _ in range(_LAST - _FIRST):
        port = next(_candidates)
        if found and found[-1] + 1 != port:
            found = []
        found = [*found, port] if _reserve(port, address) else []
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} ports in a row are free between {_FIRST} and {_LAST}")


def free_port(address: str = "127.0.0.1") -> int:
    """Returns one port, as `free_ports` does."""
    return free_ports(1, address)[0]


def _reserve(port: int, address: str) -> bool:
    # An abstract name of a Unix socket exists once on a machine, and goes with the process that holds it.
    name = socket.socket(socket.AF_UNIX)
    with socket.socket() as probe:
        try:
            name.bind(f"\0tercet-test-port-{port}")
            probe.bind((address, port))
        except OSError as error:
            name.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    _held.append(name)
    return True


# Processes that test at the same time look in different places first.
for _ in range(os.getpid() % (_LAST - _FIRST)):
    next(_candidates)
