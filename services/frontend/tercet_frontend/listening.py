"""Where this process answers: on a port of its own, or on one that it shares, and then on a socket of its own too."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def shared_listener(descriptor: int) -> socket.socket:
    """Returns the listening socket that this process inherited as ``descriptor``, and now owns.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ConfigurationError(
            f"Descriptor {descriptor} is no socket: {error.strerror}.", param="listen_fd"
        ) from None
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise ConfigurationError(f"The socket {descriptor} does not listen.", param="listen_fd")
    listener.set_inheritable(False)
    listener.setblocking(False)
    return listener


@contextlib.contextmanager
def process_listener(path: Path) -> Iterator[socket.socket]:
    """Yields a listening Unix socket at ``path``, for this user alone; one that a dead process left there is replaced.

    Raises:
        ConfigurationError: it cannot be made there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen()
            listener.setblocking(False)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigurationError(f"No socket can be made at {path}: {reason}.", param="process_socket") from None
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
