"""The worker's end: connects to a core's socket, says hello, and receives its rings."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tercet_shared.errors import ConfigurationError, ProtocolError
from tercet_shared.ipc.claim import check_socket_path
from tercet_shared.ipc.connection import LinkConnection, sender_through
from tercet_shared.ipc.control import (
    ACCEPT_BODY,
    ACCEPT_DESCRIPTORS,
    HEADER,
    MAX_REPLY,
    MAX_TEXT,
    Kind,
    decode_header,
    decode_text,
    encode,
    receive_exactly,
    receive_with_descriptors,
    send_all,
)
from tercet_shared.ipc.errors import LinkClosedError, LinkRejectedError, LinkUnavailableError
from tercet_shared.ipc.layout import RingMemory
from tercet_shared.ipc.link import FrameLink, Stream
from tercet_shared.ipc.ring import RingReader, RingWriter
from tercet_shared.ipc.settings import HeartbeatSettings

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker's place at a core: the started connection, which the caller owns, and the core's reply to the hello."""

    connection: FrameLink
    reply: bytes


async def connect(path: Path, hello: bytes, *, timeout_s: float = 10.0) -> Joined:
    """Joins the core that listens on ``path``. Heartbeat settings are the core's.

    Args:
        path: the core's socket.
        hello: what the core judges; opaque here.
        timeout_s: seconds for the whole handshake.

    Raises:
        LinkUnavailableError: nobody listens there, or does not answer in time, or ended meanwhile. Try again.
        LinkRejectedError: the core refused the hello and said why.
        ProtocolError: what listens there does not speak this protocol.
        ConfigurationError: the path cannot be a socket's.
    """
    check_socket_path(path)
    with ExitStack() as undo:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        undo.callback(sock.close)
        try:
            async with asyncio.timeout(timeout_s):
                # Connecting to a Unix socket succeeds or fails at once; a full backlog is BlockingIOError.
                sock.connect(os.fspath(path))
                # A core that refuses early closes while the hello is still being sent; its answer says why.
                with suppress(BrokenPipeError, ConnectionResetError):
                    await send_all(sock, encode(Kind.HELLO, hello))
                connection, reply = await _receive_answer(sock, undo)
        except TimeoutError:
            raise LinkUnavailableError(f"the core at {path} did not answer within {timeout_s:g} s") from None
        except LinkClosedError as error:
            raise LinkUnavailableError(f"the core at {path} did not answer: {error.message}") from error
        except OSError as error:
            raise LinkUnavailableError(f"no core can be reached at {path}: {error.strerror}") from error
        undo.pop_all()
    connection.start()
    return Joined(connection, reply)


async def _receive_answer(sock: socket.socket, undo: ExitStack) -> tuple[LinkConnection, bytes]:
    header, descriptors = await receive_with_descriptors(sock, HEADER.size, ACCEPT_DESCRIPTORS)
    with ExitStack() as unclaimed:
        for fd in descriptors:
            unclaimed.callback(os.close, fd)
        kind, length = decode_header(header)
        if kind is Kind.REJECT and length <= MAX_TEXT:
            raise LinkRejectedError(decode_text(await receive_exactly(sock, length)))
        if kind is not Kind.ACCEPT or not ACCEPT_BODY.size <= length <= ACCEPT_BODY.size + MAX_REPLY:
            raise ProtocolError(f"the core answered a hello with {kind.name} and {length} bytes")
        if len(descriptors) != ACCEPT_DESCRIPTORS:
            raise ProtocolError(f"the core passed {len(descriptors)} descriptors instead of {ACCEPT_DESCRIPTORS}")
        body = await receive_exactly(sock, length)
        # From here on nothing waits: the ends take over the doorbells, and the memfds are not needed once mapped.
        interval_s, dead_after_s, plan_index, mask_index = ACCEPT_BODY.unpack_from(body)
        try:
            heartbeat = HeartbeatSettings(interval_s, dead_after_s)
        except ConfigurationError as error:
            raise ProtocolError(f"the core's settings cannot be used: {error.message}") from None
        memories: list[RingMemory] = []
        plan, plan_data, plan_space, result, result_data, result_space, mask, mask_data, mask_space = descriptors
        for fd in (plan, result, mask):
            memory = RingMemory(fd)
            memories.append(memory)
            undo.callback(memory.close)
        connection = LinkConnection(
            sock,
            {Stream.STEPS: sender_through(RingWriter(memories[1], (result_data,), (result_space,)))},
            {
                Stream.STEPS: RingReader(memories[0], plan_data, plan_space, plan_index),
                Stream.MASKS: RingReader(memories[2], mask_data, mask_space, mask_index),
            },
            heartbeat,
            "core",
        )
        unclaimed.pop_all()
        for fd in (plan, result, mask):
            os.close(fd)
    return connection, body[ACCEPT_BODY.size :]
