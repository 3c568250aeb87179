"""Messages on the link's Unix socket: the handshake, heartbeats and goodbyes. Frames never travel here.

Every message is a header of 8 bytes, little-endian, and a payload::

    0  2  marker   0x5443
    2  1  version  1; a side that finds another one closes, and says so
    3  1  kind     see ``Kind``
    4  4  length   bytes of payload

    HELLO      worker → core   the worker's hello (opaque here), at most ``ListenerSettings.max_hello`` bytes
    ACCEPT     core → worker   ``ACCEPT_BODY``, then the core's reply (opaque here); with the first byte travel nine
                               descriptors (SCM_RIGHTS): memory, data doorbell, space doorbell of the plan ring, of the
                               result ring, of the mask ring
    REJECT     core → worker   the reason, UTF-8; the core closes after it
    HEARTBEAT  both ways       nothing
    GOODBYE    both ways       the reason, UTF-8, at most ``MAX_TEXT`` bytes; its sender closes after it
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from tercet_shared.errors import ProtocolError
from tercet_shared.ipc.errors import LinkClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

HEADER: Final = struct.Struct("<HBBI")
ACCEPT_BODY: Final = struct.Struct("<ddHH")
"""Heartbeat interval and dead-after in seconds; the worker's reader index in the plan and the mask ring."""
ACCEPT_DESCRIPTORS: Final = 9
MAX_TEXT: Final = 4096
MAX_REPLY: Final = 1024 * 1024

_MARKER: Final = 0x5443
_VERSION: Final = 1


class Kind(IntEnum):
    """Kinds of message."""

    HELLO = 1
    ACCEPT = 2
    REJECT = 3
    HEARTBEAT = 4
    GOODBYE = 5


def encode(kind: Kind, payload: bytes = b"") -> bytes:
    """Returns the message as bytes."""
    return HEADER.pack(_MARKER, _VERSION, kind, len(payload)) + payload


def encode_text(kind: Kind, text: str) -> bytes:
    """Returns a message with a sentence, cut to ``MAX_TEXT`` bytes."""
    return encode(kind, text.encode("utf-8", "replace")[:MAX_TEXT])


def decode_text(payload: bytes) -> str:
    """Returns the sentence in a payload; bytes that are not UTF-8 (a cut character, a careless peer) are replaced."""
    return payload.decode("utf-8", "replace")


def decode_header(header: bytes) -> tuple[Kind, int]:
    """Returns kind and payload length.

    Raises:
        ProtocolError: not a message of this protocol and version.
    """
    marker, version, kind, length = HEADER.unpack(header)
    if marker != _MARKER:
        raise ProtocolError(f"the peer does not speak the link protocol (it sent {header!r})")
    if version != _VERSION:
        raise ProtocolError(f"the peer speaks version {version} of the link protocol; this process speaks {_VERSION}")
    try:
        return Kind(kind), length
    except ValueError:
        raise ProtocolError(f"the peer sent a message of unknown kind {kind}") from None


async def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Reads ``size`` bytes from a non-blocking socket, and not one more.

    Raises:
        LinkClosedError: the stream ended before.
        OSError: the connection failed.
    """
    received = bytearray()
    while len(received) < size:
        try:
            part = sock.recv(size - len(received))
        except BlockingIOError:
            await until_ready(sock, write=False)
            continue
        _check_part(part, 0)
        received += part
    return bytes(received)


async def receive_with_descriptors(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """As ``receive_exactly``, and returns the descriptors that came along, close-on-exec; the caller owns them.

    Raises:
        LinkClosedError: the stream ended before.
        ProtocolError: more than ``most`` descriptors came, or this process may not hold that many.
        OSError: the connection failed.
    """
    received = bytearray()
    descriptors: list[int] = []
    try:
        while len(received) < size:
            try:
                # socket.recv_fds drops its flags argument in CPython 3.11, and with it close-on-exec.
                part, ancillary, flags, _ = sock.recvmsg(
                    size - len(received), socket.CMSG_LEN(most * 4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                await until_ready(sock, write=False)
                continue
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                    descriptors.extend(numbers)
            _check_part(part, flags)
            received += part
    except BaseException:  # cancellation included: descriptors that nobody holds would stay open for good
        for fd in descriptors:
            os.close(fd)
        raise
    return bytes(received), descriptors


def _check_part(part: bytes, flags: int) -> None:
    if flags & socket.MSG_CTRUNC:
        raise ProtocolError("not all descriptors that the peer passed arrived: too many, or over the open-files limit")
    if not part:
        raise LinkClosedError("the peer closed the connection in the middle of a message")


async def send_all(sock: socket.socket, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
    """Writes all of ``data`` to a non-blocking socket; ``descriptors`` travel with its first byte.

    Raises:
        OSError: the connection failed.
    """
    rest = memoryview(data)
    while rest:
        try:
            if descriptors:
                sent = socket.send_fds(sock, [rest], descriptors)
                descriptors = ()
            else:
                sent = sock.send(rest)
        except BlockingIOError:
            await until_ready(sock, write=True)
            continue
        rest = rest[sent:]


async def until_ready(sock: socket.socket, *, write: bool) -> None:
    """Waits until the socket can be read (a listening one: has a connection) or written. Leaves the loop as it was."""
    loop = asyncio.get_running_loop()
    fd = sock.fileno()
    future: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    add: Callable[..., None] = loop.add_writer if write else loop.add_reader
    remove = loop.remove_writer if write else loop.remove_reader
    add(fd, wake)
    try:
        await future
    finally:
        remove(fd)
