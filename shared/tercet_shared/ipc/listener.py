"""The core's end: a Unix socket in a private directory, on which workers connect and receive their rings.

Who may listen is decided by a `SocketClaim`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import socket
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from tercet_shared.errors import ConfigurationError, LinkError, ProtocolError, TercetError
from tercet_shared.ipc.claim import SocketClaim, check_socket_path
from tercet_shared.ipc.connection import LinkConnection, sender_through
from tercet_shared.ipc.control import (
    ACCEPT_BODY,
    HEADER,
    MAX_REPLY,
    Kind,
    decode_header,
    encode,
    encode_text,
    receive_exactly,
    send_all,
    until_ready,
)
from tercet_shared.ipc.group import GroupRings, Place, create_ring_to_workers
from tercet_shared.ipc.layout import RingMemory
from tercet_shared.ipc.link import Stream
from tercet_shared.ipc.ring import RingDescriptors, RingReader, create_ring
from tercet_shared.ipc.settings import ListenerSettings, RingSettings

if TYPE_CHECKING:
    from pathlib import Path

    from tercet_shared.ipc.connection import SenderMaker
    from tercet_shared.ipc.group import PassedRing

_log = logging.getLogger(__name__)

_ACCEPT_RETRY_S: Final = 0.5  # there is no event for "a descriptor became free"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The worker may join. ``reply`` is sent to it, opaque here, at most 1 MiB; ``place`` is that in its group."""

    reply: bytes
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """The worker may not join. ``reason`` is sent to it: one sentence."""

    reason: str


Verdict: TypeAlias = Accepted | Rejected
HelloCallback: TypeAlias = Callable[[bytes], Verdict]
"""Judges a hello. A ``TercetError`` that it raises is a rejection with that text."""
ConnectionCallback: TypeAlias = Callable[[LinkConnection, bytes], None]
"""Takes over a started connection and the hello it came with; owns the connection from then on."""


class LinkListener:
    """Accepts workers. ``open``, then ``serve``, then ``close``; also a context manager around the first and the last.

    Args:
        path: the socket. A missing directory is made, private to this user (and the group, if one is set).
        settings: limits and sizes.
    """

    def __init__(self, path: Path, settings: ListenerSettings | None = None) -> None:
        self.claim = SocketClaim(path)
        self._path = path
        self._settings = settings if settings is not None else ListenerSettings()
        self._sock: socket.socket | None = None
        self._groups: dict[str, GroupRings] = {}  # those of which somebody holds a place

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Claims the path, replaces a stale socket, and listens.

        Raises:
            ConfigurationError: the path cannot be used, or another process listens there; one sentence says which.
        """
        check_socket_path(self._path)
        with ExitStack() as undo:
            try:
                self._prepare_directory()
                self.claim.take()
                undo.callback(self.claim.release)
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
                undo.callback(sock.close)
                sock.bind(os.fspath(self._path))
                # Nobody can connect before listen, so the permissions are right from the first moment.
                self._path.chmod(self._settings.mode)
                if self._settings.group is not None:
                    shutil.chown(self._path, group=self._settings.group)
                sock.listen(128)
            except LookupError as error:
                raise ConfigurationError(
                    f"the socket {self._path} cannot be given to a group: {error.args[0]}"
                ) from None
            except OSError as error:
                raise ConfigurationError(f"cannot listen on {self._path}: {error.strerror}") from error
            undo.pop_all()
        self._sock = sock

    def close(self) -> None:
        """Stops listening and removes the socket and the lock file. Idempotent. Connections already made live on."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self.claim.release()

    async def serve(self, on_hello: HelloCallback, on_connection: ConnectionCallback) -> None:
        """Accepts workers until it is cancelled. A peer that breaks the protocol is logged and closed, nobody else is.

        Cancelling ends the handshakes in progress. Connections already handed to ``on_connection`` belong to it.
        """
        if self._sock is None:
            raise RuntimeError("the listener is not open")
        listening = self._sock
        places = asyncio.Semaphore(self._settings.max_handshakes)
        async with asyncio.TaskGroup() as handshakes:
            while True:
                await places.acquire()
                try:
                    sock, _ = listening.accept()
                except BlockingIOError:
                    places.release()
                    await until_ready(listening, write=False)
                    continue
                except OSError as error:
                    if error.errno not in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED}:
                        raise
                    places.release()
                    _log.warning("a worker waits to connect but cannot be accepted now: %s", error.strerror)
                    await asyncio.sleep(_ACCEPT_RETRY_S)
                    continue
                task = handshakes.create_task(self._handshake(sock, on_hello, on_connection))
                task.add_done_callback(lambda _: places.release())

    async def _handshake(self, sock: socket.socket, on_hello: HelloCallback, on_connection: ConnectionCallback) -> None:
        with ExitStack() as undo:
            undo.callback(sock.close)
            try:
                async with asyncio.timeout(self._settings.handshake_timeout_s):
                    sock.setblocking(False)
                    hello = await self._receive_hello(sock)
                    verdict = _judge(on_hello, hello)
                    if isinstance(verdict, Accepted) and verdict.place is not None:
                        verdict = self._take_place(verdict, verdict.place, undo)
                    if isinstance(verdict, Rejected):
                        _log.warning("a worker was rejected: %s", verdict.reason)
                        await send_all(sock, encode_text(Kind.REJECT, verdict.reason))
                        return
                    connection = await self._hand_over(sock, verdict, undo)
            except TimeoutError:
                _log.warning(
                    "a connecting peer was closed: its handshake took longer than %g s",
                    self._settings.handshake_timeout_s,
                )
                return
            except (LinkError, ConfigurationError) as error:
                _log.warning("a connecting peer was closed: %s", error.message)
                return
            except OSError as error:
                _log.warning("a connecting peer was closed: %s", error.strerror)
                return
            undo.pop_all()
        connection.start()
        on_connection(connection, hello)

    async def _receive_hello(self, sock: socket.socket) -> bytes:
        try:
            length = self._hello_length(await receive_exactly(sock, HEADER.size))
        except ProtocolError as error:
            # Best effort and without waiting: a peer of another version learns what is wrong.
            with suppress(OSError):
                sock.send(encode_text(Kind.REJECT, error.message))
            raise
        return await receive_exactly(sock, length)

    def _hello_length(self, header: bytes) -> int:
        kind, length = decode_header(header)
        if kind is not Kind.HELLO:
            raise ProtocolError(f"the peer began with {kind.name} instead of a hello")
        if length > self._settings.max_hello:
            raise ProtocolError(f"the hello has {length} bytes; the limit is {self._settings.max_hello}")
        return length

    def _take_place(self, accepted: Accepted, place: Place, undo: ExitStack) -> Verdict:
        """Takes the worker's place in its group, whose rings are made for the first who comes."""
        key = place.group
        if key not in self._groups:
            self._groups[key] = GroupRings(place.places, self._settings, lambda: self._groups.pop(key, None))
        rings = self._groups[key]
        try:
            rings.take(place)
        except LinkError as error:
            return Rejected(error.message)
        undo.callback(rings.release, place.index)
        return accepted

    async def _hand_over(self, sock: socket.socket, accepted: Accepted, undo: ExitStack) -> LinkConnection:
        """Makes the rings, opens this side's ends, sends the worker its own. ``undo`` gets what a failure must undo."""
        reply, place = accepted.reply, accepted.place
        if len(reply) > MAX_REPLY:
            raise ConfigurationError(f"the reply to a hello has {len(reply)} bytes; the limit is {MAX_REPLY}")
        settings = self._settings
        rings = None if place is None else self._groups[place.group]
        with ExitStack() as memories:  # the memfds are only needed until both sides have mapped them
            if place is None or rings is None:
                index = 0
                plan, mask, outgoing = _own_rings(settings, memories, undo)
            else:
                index = place.index
                plan, mask = rings.descriptors(index)
                outgoing = {stream: partial(rings.end, stream, index) for stream in Stream}
            result, result_reader = _ring_from_worker("tercet-result", settings.result, memories, undo)
            body = ACCEPT_BODY.pack(settings.heartbeat.interval_s, settings.heartbeat.dead_after_s, index, index)
            own = (result.memory, result.data[0], result.space[0])
            await send_all(sock, encode(Kind.ACCEPT, body + reply), (*plan, *own, *mask))
        return LinkConnection(sock, outgoing, {Stream.STEPS: result_reader}, settings.heartbeat, "worker", rings)

    def _prepare_directory(self) -> None:
        directory = self._path.parent
        directory.mkdir(mode=0o700 if self._settings.group is None else 0o750, parents=True, exist_ok=True)
        mode = directory.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigurationError(
                f"the directory {directory} can be written by everyone; the link needs a private one"
            )


def _judge(on_hello: HelloCallback, hello: bytes) -> Verdict:
    try:
        return on_hello(hello)
    except TercetError as error:
        return Rejected(error.message)


def _own_rings(
    settings: ListenerSettings, memories: ExitStack, undo: ExitStack
) -> tuple[PassedRing, PassedRing, dict[Stream, SenderMaker]]:
    """Makes the rings to a worker that is no rank of a group: what it is given of each, and this side's ends."""
    passed: list[PassedRing] = []
    outgoing: dict[Stream, SenderMaker] = {}
    for stream, name, sizes in (
        (Stream.STEPS, "tercet-plan", settings.plan),
        (Stream.MASKS, "tercet-mask", settings.mask),
    ):
        ring, writer = create_ring_to_workers(name, sizes)
        memories.callback(os.close, ring.memory)
        undo.callback(writer.close)
        passed.append((ring.memory, ring.data[0], ring.space[0]))
        outgoing[stream] = sender_through(writer)
    plan, mask = passed
    return plan, mask, outgoing


def _ring_from_worker(
    name: str, settings: RingSettings, memories: ExitStack, undo: ExitStack
) -> tuple[RingDescriptors, RingReader]:
    ring = create_ring(name, capacity=settings.capacity, max_frame=settings.max_frame)
    memories.callback(os.close, ring.memory)
    reader = RingReader(RingMemory(ring.memory), ring.data[0], ring.space[0])
    undo.callback(reader.close)
    return ring, reader
