"""The socket of a port that several processes serve.

It is opened once, here, and inherited by all of them: each waits on it, and whoever is free takes the next connection.
So a process that is busy takes fewer, and one that is stopped, killed or still starting takes none and costs none: what
waits in the socket's queue is anybody's. With a socket for each process (SO_REUSEPORT) the kernel would deal out
connections by a hash of their addresses, also to a process that does not come to accept them, and those in the queue of
one that dies would be lost.
"""

from __future__ import annotations

import socket

from tercet_shared.errors import ConfigurationError
from tercet_shared.lifecycle.readiness import address_of, why_not

BACKLOG = 2_048


def open_shared_listener(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on ``host`` and ``port``; 0 takes a free port.

    Raises:
        ConfigurationError: that is not possible; the sentence says why.
    """
    family, kind, protocol, address = address_of(host, port)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigurationError(why_not(host, port, error), param="port") from None
    return listener
