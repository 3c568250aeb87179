"""One live link between a core and a worker on one host: the rings, and the socket that stays open to watch the peer.

``LinkListener`` makes the core's side, ``connect`` the worker's. Both are a ``FrameLink``. Connections to the ranks of
one group share the sending ends (see ``group``): a frame sent on one of them reaches all.

The end of a peer is noticed in three ways. However a process ends, the kernel closes its end of the socket, and EOF
arrives at once. One that ends on purpose says goodbye first. One that exists but does nothing (stopped, or its event
loop is stuck) stops sending heartbeats. What it had put into the rings before it ended is read first.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from tercet_shared.errors import LinkError, ProtocolError
from tercet_shared.ipc.channel import ErrorCallback, FramesCallback, RingReceiver, RingSender
from tercet_shared.ipc.control import HEADER, MAX_TEXT, Kind, decode_header, decode_text, encode, encode_text
from tercet_shared.ipc.ending import Ending, guarded
from tercet_shared.ipc.errors import FrameTooLargeError, LinkClosedError
from tercet_shared.ipc.link import CloseKind, CloseReason, Stream

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from tercet_shared.ipc.ring import Frame, RingReader, RingWriter
    from tercet_shared.ipc.settings import HeartbeatSettings

_log = logging.getLogger(__name__)

_HEARTBEAT: Final = encode(Kind.HEARTBEAT)
_READ_SIZE: Final = 16 * 1024


class Sender(Protocol):
    """A sending end of the link; see ``RingSender``."""

    @property
    def pending(self) -> int:
        """Frames that wait for room."""

    def send(self, frame: Frame) -> None:
        """Sends a frame, now or as soon as there is room."""

    def try_send(self, frame: Frame) -> bool:
        """Sends a frame if that can be done at once; from any thread."""

    def close(self) -> None:
        """Gives the end back. Idempotent."""


SenderMaker: TypeAlias = Callable[[ErrorCallback], Sender]
"""Makes a sending end that tells the callback when its ring is broken."""


def sender_through(writer: RingWriter) -> SenderMaker:
    """Returns what makes the sending end of a ring with one reader."""
    return partial(RingSender, writer)


class LinkConnection:
    """One side of a link; see ``FrameLink`` for the meaning of its methods. Nothing happens before ``start``.

    Args:
        sock: the connected socket, non-blocking, after the handshake; owned from now on.
        outgoing: what makes the sending end of each stream that this side sends; it owns the end from now on.
        incoming: reading end per stream that this side receives; owned from now on.
        heartbeat: both sides' rhythm.
        peer: what to call the other side in sentences, such as "worker".
        audience: what the sending ends are shared through; None: they are this link's own.
    """

    def __init__(
        self,
        sock: socket.socket,
        outgoing: Mapping[Stream, SenderMaker],
        incoming: Mapping[Stream, RingReader],
        heartbeat: HeartbeatSettings,
        peer: str,
        audience: object = None,
    ) -> None:
        self._sock = sock
        self._senders = {stream: make(self._on_ring_error) for stream, make in outgoing.items()}
        self._receivers = {stream: RingReceiver(reader, self._on_ring_error) for stream, reader in incoming.items()}
        self._heartbeat = heartbeat
        self._peer = peer
        self._audience = audience
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = Ending()
        self._closing = False
        self._received = bytearray()  # of a control message that is not complete yet
        self._unsent = b""  # rest of a control message that the socket did not take
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick = 0.0
        self._silence_s = 0.0

    @property
    def close_reason(self) -> CloseReason | None:
        """Why the link is closed; None while it is open."""
        return self._ending.reason

    @property
    def audience(self) -> object:
        """What this side's frames reach; see ``FrameLink``."""
        return self if self._audience is None else self._audience

    def start(self) -> None:
        """Watches the peer and sends heartbeats, on the running loop, until the link is closed by either side."""
        self._loop = self._ending.start()
        self._loop.add_reader(self._sock.fileno(), self._on_readable)
        self._last_tick = self._loop.time()
        self._timer = self._loop.call_later(self._heartbeat.interval_s, self._tick)

    def send(self, frame: Frame, stream: Stream = Stream.STEPS) -> None:
        """Sends ``frame`` after all earlier ones of ``stream``; never blocks. Errors as in ``FrameLink``."""
        if self._ending.reason is not None:
            raise LinkClosedError(self._ending.reason.text)
        sender = self._senders.get(stream)
        if sender is None:
            raise ValueError(f"this side of the link does not send {stream}")
        try:
            sender.send(frame)
        except FrameTooLargeError:
            raise
        except LinkError as error:
            self._on_ring_error(error)
            raise LinkClosedError(error.message) from error

    def try_send(self, frame: Frame) -> bool:
        """Sends ``frame`` if that can be done at once; from any thread. See ``FrameLink``."""
        sender = self._senders.get(Stream.STEPS)
        return sender is not None and sender.try_send(frame)

    def pending(self, stream: Stream = Stream.STEPS) -> int:
        """Returns the number of frames of ``stream`` that wait for room."""
        sender = self._senders.get(stream)
        if sender is None:
            raise ValueError(f"this side of the link does not send {stream}")
        return 0 if self._ending.reason is not None else sender.pending

    def on_frames(self, callback: FramesCallback, stream: Stream = Stream.STEPS) -> None:
        """Hands the frames of ``stream`` to ``callback``; errors and order as in ``FrameLink``."""
        if self._ending.reason is not None:
            raise LinkClosedError(self._ending.reason.text)
        receiver = self._receivers.get(stream)
        if receiver is None:
            raise ValueError(f"this side of the link does not receive {stream}")
        receiver.start(guarded(callback, stream, self._peer, self._end))

    def on_closed(self, callback: Callable[[CloseReason], None]) -> None:
        """Has the loop call ``callback`` once when the link is closed, soon if it is already."""
        self._ending.on_closed(callback)

    async def wait_closed(self) -> CloseReason:
        """Waits until the link is closed, by whichever side. May be cancelled."""
        return await self._ending.wait()

    async def close(self, goodbye: str = "closed") -> None:
        """Closes the link and tells the other side ``goodbye``, one sentence. Idempotent."""
        self._end(CloseKind.LOCAL, goodbye)

    def _tick(self) -> None:
        """Once per interval: send a heartbeat, and judge the peer's silence."""
        if self._loop is None or not self._is_open():
            return
        now = self._loop.time()
        # A tick that comes late says that this process did not run; the peer cannot be blamed for that time.
        self._silence_s += min(now - self._last_tick, 1.5 * self._heartbeat.interval_s)
        self._last_tick = now
        self._on_readable()  # what waits in the socket counts before the verdict
        if not self._is_open():
            return
        if self._silence_s >= self._heartbeat.dead_after_s:
            self._end(
                CloseKind.HEARTBEAT_LOST,
                f"the {self._peer} has shown no life for {self._silence_s:.1f} s: stopped, or its event loop is stuck",
            )
            return
        self._write(b"" if self._unsent else _HEARTBEAT)
        self._timer = self._loop.call_later(self._heartbeat.interval_s, self._tick)

    def _write(self, message: bytes) -> None:
        """Gives the socket what it takes. A full socket is a peer that does not read; its silence decides, not this."""
        data = self._unsent + message
        try:
            sent = self._sock.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError:
            # The peer is gone; the reading side finds EOF, after what it still had to say.
            sent = len(data)
        self._unsent = data[sent:]

    def _on_readable(self) -> None:
        try:
            data = self._sock.recv(_READ_SIZE)
        except BlockingIOError:
            return
        except OSError as error:  # reset: the peer closed with something of ours unread, or was killed
            self._end(CloseKind.PEER_DIED, f"the {self._peer} is gone ({error.strerror})")
            return
        if not data:
            self._end(CloseKind.PEER_DIED, f"the {self._peer} is gone (its end of the link is closed)")
            return
        if self._loop is not None:
            # The next tick adds the time since the last one; only the part after now is silence.
            self._silence_s = self._last_tick - self._loop.time()
        self._received += data
        try:
            self._take_messages()
        except ProtocolError as error:
            self._end(CloseKind.PROTOCOL, error.message)

    def _is_open(self) -> bool:
        return not self._closing

    def _take_messages(self) -> None:
        while self._is_open() and len(self._received) >= HEADER.size:
            kind, length = decode_header(bytes(self._received[: HEADER.size]))
            if kind not in {Kind.HEARTBEAT, Kind.GOODBYE} or length > (MAX_TEXT if kind is Kind.GOODBYE else 0):
                raise ProtocolError(
                    f"the {self._peer} sent {kind.name} with {length} bytes, which has no place on an open link"
                )
            end = HEADER.size + length
            if len(self._received) < end:
                return
            payload = bytes(self._received[HEADER.size : end])
            del self._received[:end]
            if kind is Kind.GOODBYE:
                self._end(CloseKind.GOODBYE, decode_text(payload))

    def _on_ring_error(self, error: LinkError) -> None:
        self._end(CloseKind.PROTOCOL, f"the ring shared with the {self._peer} is broken: {error.message}")

    def _end(self, kind: CloseKind, text: str) -> None:
        """Closes everything, once, and tells everybody why."""
        if self._closing:
            return
        self._closing = True
        try:
            if kind in {CloseKind.PEER_DIED, CloseKind.GOODBYE}:
                for receiver in self._receivers.values():
                    receiver.drain()
            else:
                self._write(encode_text(Kind.GOODBYE, text))
        finally:
            self._finish(CloseReason(kind, text))

    def _finish(self, reason: CloseReason) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self._sock.fileno())
        for sender in self._senders.values():
            sender.close()
        for receiver in self._receivers.values():
            receiver.close()
        self._sock.close()
        _log.debug("link to the %s closed: %s: %s", self._peer, reason.kind, reason.text)
        self._ending.conclude(reason)
