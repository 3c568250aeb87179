"""One live link between a core and a worker on different hosts: a `FrameLink` over one gRPC call.

``RemoteListener`` makes the core's side, ``connect_remote`` the worker's. The messages are those of ``link.proto``. The
call is read at once whatever happens to the frames; how much may be under way is bounded by credit (see ``credit``).

The end of a peer is noticed as on one host: the call ends with its connection, one that ends on purpose says goodbye
first, and one that exists but does nothing stops sending heartbeats. What was under way when a process was killed may
be lost; on one host it would be in the ring.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from tercet_proto.v1 import link_pb2 as pb
from tercet_shared.errors import ProtocolError
from tercet_shared.ipc.control import MAX_TEXT
from tercet_shared.ipc.credit import MAX_PART, CreditReceiver, CreditSender, Part, StreamLimits
from tercet_shared.ipc.ending import Ending, guarded
from tercet_shared.ipc.errors import LinkClosedError
from tercet_shared.ipc.link import CloseKind, CloseReason, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from tercet_shared.ipc.channel import FramesCallback
    from tercet_shared.ipc.ring import Frame
    from tercet_shared.ipc.settings import HeartbeatSettings, RingSettings

_log = logging.getLogger(__name__)

VERSION: Final = 1
"""Of the protocol; a side that finds another one closes, and says so."""

_LINGER_S: Final = 1.0
"""Seconds that the other side is given to take a goodbye."""

_SMALLEST_WINDOW: Final = 4096

_KINDS: Final[Mapping[Stream, pb.LinkStreamKind]] = {
    Stream.STEPS: pb.LINK_STREAM_KIND_STEPS,
    Stream.MASKS: pb.LINK_STREAM_KIND_MASKS,
}


class Wire(Protocol):
    """The messages of a call, from one of its sides."""

    async def read(self) -> pb.LinkMessage | None:
        """Returns the next message, or None when the other side sends no more. Raises `LinkClosedError`."""

    async def write(self, message: pb.LinkMessage) -> None:
        """Sends a message; waits while the connection is busy. Raises `LinkClosedError`."""

    async def end(self) -> None:
        """Says that this side sends no more."""


def limits_of(settings: RingSettings) -> StreamLimits:
    """Returns the limits of a stream that on one host would be a ring of these settings."""
    return StreamLimits(max(settings.capacity, _SMALLEST_WINDOW), settings.max_frame)


def encode_limits(limits: StreamLimits) -> pb.LinkStream:
    """Returns ``limits`` for the wire."""
    return pb.LinkStream(window=limits.window, max_frame=limits.max_frame)


def decode_limits(message: pb.LinkStream) -> StreamLimits:
    """Returns the limits in ``message``. Raises `ProtocolError` when they cannot be kept."""
    if message.window < _SMALLEST_WINDOW or message.max_frame < 1:
        raise ProtocolError(f"a stream has a window of {message.window} and frames of {message.max_frame} bytes")
    return StreamLimits(message.window, message.max_frame)


class RemoteLink:
    """One side of a link; see ``FrameLink`` for the meaning of its methods. Nothing happens before ``start``.

    Somebody must ``run`` it, from its start on; ``close`` waits for the end of that.

    Args:
        wire: the call, after the handshake; used by nobody else from now on.
        outgoing: limits per stream that this side sends.
        incoming: limits per stream that this side receives.
        heartbeat: both sides' rhythm.
        peer: what to call the other side in sentences, such as "worker".
    """

    def __init__(
        self,
        wire: Wire,
        outgoing: Mapping[Stream, StreamLimits],
        incoming: Mapping[Stream, StreamLimits],
        heartbeat: HeartbeatSettings,
        peer: str,
    ) -> None:
        self._wire = wire
        self._senders = {
            stream: CreditSender(limits, partial(self._put, stream)) for stream, limits in outgoing.items()
        }
        self._receivers = {
            stream: CreditReceiver(limits, partial(self._announce, stream)) for stream, limits in incoming.items()
        }
        self._heartbeat = heartbeat
        self._peer = peer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = Ending()
        self._starting: dict[Stream, FramesCallback] = {}  # handlers that begin with the loop's next turn
        self._parts: list[tuple[Stream, Part]] = []  # on their way
        self._consumed: dict[Stream, int] = {}
        self._beat = False
        self._goodbye: str | None = None
        self._wake = asyncio.Event()
        self._over = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick = 0.0
        self._silence_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def close_reason(self) -> CloseReason | None:
        """Why the link is closed; None while it is open."""
        return self._ending.reason

    @property
    def audience(self) -> object:
        """This link: its frames reach nobody else."""
        return self

    def start(self) -> None:
        """Watches the peer and sends heartbeats, on the running loop, until the link is closed by either side."""
        self._loop = self._ending.start()
        self._last_tick = self._loop.time()
        self._timer = self._loop.call_later(self._heartbeat.interval_s, self._tick)

    def send(self, frame: Frame, stream: Stream = Stream.STEPS) -> None:
        """Sends ``frame`` after all earlier ones of ``stream``; never blocks. Errors as in ``FrameLink``."""
        self._check_open()
        sender = self._senders.get(stream)
        if sender is None:
            raise ValueError(f"this side of the link does not send {stream}")
        sender.send(frame)

    def try_send(self, frame: Frame) -> bool:  # noqa: ARG002  # see ``FrameLink``
        """Returns False: the call belongs to the loop."""
        return False

    def pending(self, stream: Stream = Stream.STEPS) -> int:
        """Returns the number of frames of ``stream`` that wait for room."""
        sender = self._senders.get(stream)
        if sender is None:
            raise ValueError(f"this side of the link does not send {stream}")
        return sender.pending

    def on_frames(self, callback: FramesCallback, stream: Stream = Stream.STEPS) -> None:
        """Hands the frames of ``stream`` to ``callback``; errors and order as in ``FrameLink``."""
        self._check_open()
        receiver = self._receivers.get(stream)
        if receiver is None or self._loop is None:
            raise ValueError(f"this side of the link does not receive {stream}")
        if stream in self._starting:
            raise RuntimeError("the receiver was started before")
        self._starting[stream] = guarded(callback, stream, self._peer, self._end)
        self._loop.call_soon(self._begin, stream)

    def on_closed(self, callback: Callable[[CloseReason], None]) -> None:
        """Has the loop call ``callback`` once when the link is closed, soon if it is already."""
        self._ending.on_closed(callback)

    async def wait_closed(self) -> CloseReason:
        """Waits until the link is closed, by whichever side. May be cancelled."""
        return await self._ending.wait()

    async def close(self, goodbye: str = "closed") -> None:
        """Closes the link, tells the other side ``goodbye``, one sentence, and waits until that is done. Idempotent."""
        self._end(CloseKind.LOCAL, goodbye)
        await self._over.wait()

    # ---------------------------------------------------------------------------------------- the call

    def run_in_task(self, clean_up: Callable[[], Coroutine[None, None, None]]) -> None:
        """Runs in a task of its own, which ends with ``clean_up``; ``close`` waits for it."""

        async def run() -> None:
            try:
                await self._carry()
            finally:
                await clean_up()
                self._over.set()

        self._task = asyncio.get_running_loop().create_task(run(), name=f"link to the {self._peer}")

    async def run(self) -> None:
        """Carries messages until the link is closed and the other side knows, or has had time to."""
        try:
            await self._carry()
        finally:
            self._over.set()

    async def _carry(self) -> None:
        loop = asyncio.get_running_loop()
        name = f"link to the {self._peer}"
        tasks = [loop.create_task(self._read(), name=name), loop.create_task(self._write(), name=name)]
        ended = loop.create_task(self._ending.wait(), name=name)
        try:
            # A peer that does not read holds up the writer, and one that is quiet the reader.
            await asyncio.wait({*tasks, ended}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(tasks, timeout=_LINGER_S)
        finally:
            for task in (*tasks, ended):
                task.cancel()
            await asyncio.gather(*tasks, ended, return_exceptions=True)
            self._end(CloseKind.PEER_DIED, f"the {self._peer} is gone (its connection is broken)")
            for task in tasks:  # a bug in somebody's handler, which has ended the link
                if not task.cancelled() and (error := task.exception()) is not None:
                    loop.call_exception_handler({"message": name, "exception": error})

    async def _read(self) -> None:
        """Takes messages until there are no more; those that come when the link is closed are dropped."""
        while True:
            try:
                message = await self._wire.read()
            except LinkClosedError as error:
                self._end(CloseKind.PEER_DIED, f"the {self._peer} is gone ({error.message})")
                return
            if message is None:
                self._end(CloseKind.PEER_DIED, f"the {self._peer} is gone (its end of the link is closed)")
                return
            if self._ending.reason is not None or self._loop is None:
                continue
            # The next tick adds the time since the last one; only the part after now is silence.
            self._silence_s = self._last_tick - self._loop.time()
            try:
                self._take(message)
            except ProtocolError as error:
                self._end(CloseKind.PROTOCOL, error.message)

    def _take(self, message: pb.LinkMessage) -> None:
        if message.HasField("open") or message.HasField("accept") or message.HasField("reject"):
            raise ProtocolError(f"the {self._peer} sent a handshake, which has no place on an open link")
        came: dict[int, list[Part]] = {}
        for part in message.parts:
            came.setdefault(part.stream, []).append(Part(part.data, part.rest))
        for stream, parts in came.items():
            self._receiver(stream).take(parts)
        for consumed in message.consumed:
            self._sender(consumed.stream).consumed(consumed.bytes)
        if message.HasField("goodbye"):
            self._end(CloseKind.GOODBYE, message.goodbye)

    def _receiver(self, kind: int) -> CreditReceiver:
        for stream, receiver in self._receivers.items():
            if _KINDS[stream] == kind:
                return receiver
        raise ProtocolError(f"the {self._peer} sent a frame of stream {kind}, which it does not send")

    def _sender(self, kind: int) -> CreditSender:
        for stream, sender in self._senders.items():
            if _KINDS[stream] == kind:
                return sender
        raise ProtocolError(f"the {self._peer} consumed of stream {kind}, which this side does not send")

    async def _write(self) -> None:
        """Sends what there is to send until the link is closed."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while (message := self._next_message()) is not None:
                    await self._wire.write(message)
                    if message.HasField("goodbye"):
                        break
                if self._ending.reason is not None:
                    await self._wire.end()
                    return
        except LinkClosedError as error:  # the reader finds the end, after what the peer still had to say
            _log.debug("cannot send to the %s any more: %s", self._peer, error.message)

    def _next_message(self) -> pb.LinkMessage | None:
        message = pb.LinkMessage()
        size, count = 0, 0
        for stream, part in self._parts:
            if count and size + len(part.data) > MAX_PART:
                break
            message.parts.add(stream=_KINDS[stream], data=part.data, rest=part.rest)
            size += len(part.data)
            count += 1
        del self._parts[:count]
        for stream, amount in self._consumed.items():
            message.consumed.add(stream=_KINDS[stream], bytes=amount)
        said = bool(count or self._consumed or self._beat)
        self._consumed.clear()
        self._beat = False
        if self._goodbye is not None and not self._parts:
            message.goodbye, self._goodbye = self._goodbye, None
            return message
        return message if said else None

    # ---------------------------------------------------------------------------------------- its parts

    def _put(self, stream: Stream, part: Part) -> None:
        self._parts.append((stream, part))
        self._wake.set()

    def _announce(self, stream: Stream, amount: int) -> None:
        self._consumed[stream] = self._consumed.get(stream, 0) + amount
        self._wake.set()

    def _begin(self, stream: Stream) -> None:
        """Starts a handler; in a turn of the loop of its own, unless the link ends before."""
        callback = self._starting.get(stream)
        if callback is None or self._ending.reason is not None:
            return
        receiver = self._receivers[stream]
        if receiver.started:
            return
        try:
            receiver.start(callback)
        except ProtocolError as error:
            self._end(CloseKind.PROTOCOL, error.message)

    def _tick(self) -> None:
        """Once per interval: send a heartbeat, and judge the peer's silence."""
        if self._loop is None or self._ending.reason is not None:
            return
        now = self._loop.time()
        # A tick that comes late says that this process did not run; the peer cannot be blamed for that time.
        self._silence_s += min(now - self._last_tick, 1.5 * self._heartbeat.interval_s)
        self._last_tick = now
        if self._silence_s >= self._heartbeat.dead_after_s:
            self._end(
                CloseKind.HEARTBEAT_LOST,
                f"the {self._peer} has shown no life for {self._silence_s:.1f} s: stopped, or its event loop is stuck",
            )
            return
        self._beat = True
        self._wake.set()
        self._timer = self._loop.call_later(self._heartbeat.interval_s, self._tick)

    def _check_open(self) -> None:
        if self._ending.reason is not None:
            raise LinkClosedError(self._ending.reason.text)

    def _is_over(self) -> bool:
        return self._ending.reason is not None

    def _end(self, kind: CloseKind, text: str) -> None:
        """Closes the link, once, and tells everybody why."""
        if self._is_over():
            return
        if kind in {CloseKind.PEER_DIED, CloseKind.GOODBYE}:
            for stream in self._starting:
                self._begin(stream)
            if self._is_over():  # what it had to say was not valid
                return
            self._parts.clear()
        else:
            self._goodbye = text.encode("utf-8", "replace")[:MAX_TEXT].decode("utf-8", "ignore")
        for sender in self._senders.values():
            sender.drop()
        for receiver in self._receivers.values():
            receiver.close()
        if self._timer is not None:
            self._timer.cancel()
        _log.debug("link to the %s closed: %s: %s", self._peer, kind, text)
        self._wake.set()
        self._ending.conclude(CloseReason(kind, text))
