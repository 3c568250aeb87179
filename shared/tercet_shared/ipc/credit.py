"""A stream of frames over a connection that carries several: as a ring would, a window bounds what is under way.

The sender takes from its credit what it sends, and gets it back when the receiver has consumed it; a frame without
credit waits at the sender. So the receiver reads its connection at once whatever it does with the frames, no stream
holds another one up, and nowhere lies more than a window. Parts and sizes are those of a ring (see ``layout``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tercet_shared.errors import ProtocolError
from tercet_shared.ipc.errors import FrameTooLargeError, LinkClosedError
from tercet_shared.ipc.layout import RECORD, record_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_shared.ipc.channel import FramesCallback
    from tercet_shared.ipc.ring import Frame

_SHARE: Final = 4
"""A part takes at most this share of the window; as much, once consumed, is worth a message."""

MAX_PART: Final = 512 * 1024
"""Bytes of the largest part: far below what a gRPC message may have."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits of one stream in one direction.

    Attributes:
        window: bytes that may be under way.
        max_frame: bytes of the largest frame.
    """

    window: int
    max_frame: int


@dataclass(frozen=True, slots=True)
class Part:
    """A frame or a part of one.

    Attributes:
        data: its bytes.
        rest: bytes of the frame that are still to come.
    """

    data: bytes
    rest: int


class CreditSender:
    """The sending end.

    Args:
        limits: what the receiver allows.
        put: takes the parts on their way, in order.
    """

    def __init__(self, limits: StreamLimits, put: Callable[[Part], None]) -> None:
        self._limits = limits
        self._put = put
        self._credit = limits.window
        self._largest = min(limits.window // _SHARE - RECORD.size, MAX_PART)
        self._queue: deque[bytes] = deque()
        self._sent = 0  # bytes of the first frame in the queue

    @property
    def pending(self) -> int:
        """Frames not completely on their way yet."""
        return len(self._queue)

    def send(self, frame: Frame) -> None:
        """Sends ``frame`` now, or as soon as there is credit. Never blocks, never drops.

        Raises:
            FrameTooLargeError: the frame is over the limit; nothing was sent.
        """
        size = memoryview(frame).nbytes
        if size > self._limits.max_frame:
            raise FrameTooLargeError(
                f"a frame of {size} bytes is over the link's limit of {self._limits.max_frame} bytes"
            )
        # The caller may reuse a mutable buffer as soon as send returns.
        self._queue.append(frame if isinstance(frame, bytes) else bytes(frame))
        if len(self._queue) == 1:
            self._fill()

    def consumed(self, amount: int) -> None:
        """Takes credit back.

        Raises:
            ProtocolError: the receiver claims to have consumed more than was sent.
        """
        self._credit += amount
        if self._credit > self._limits.window:
            raise ProtocolError(f"the receiver claims to have consumed {amount} bytes, which were not sent")
        self._fill()

    def drop(self) -> None:
        """Forgets what waits."""
        self._queue.clear()

    def _fill(self) -> None:
        while self._queue:
            frame = self._queue[0]
            data = frame[self._sent : self._sent + self._largest]
            cost = record_size(len(data))
            if cost > self._credit:
                return
            self._credit -= cost
            self._sent += len(data)
            rest = len(frame) - self._sent
            self._put(Part(data, rest))
            if not rest:
                self._queue.popleft()
                self._sent = 0


class CreditReceiver:
    """The receiving end. Until ``start``, what comes is kept and holds back the sender.

    Args:
        limits: what the sender was allowed.
        announce: told how many bytes the sender gets back.
    """

    def __init__(self, limits: StreamLimits, announce: Callable[[int], None]) -> None:
        self._limits = limits
        self._announce = announce
        self._callback: FramesCallback | None = None
        self._kept: list[Part] = []
        self._used = 0  # bytes of the window that the sender has not got back
        self._consumed = 0  # those of them that it may have
        self._parts: list[bytes] = []  # of the frame being put together
        self._rest = 0  # bytes that it lacks
        self._closed = False

    @property
    def started(self) -> bool:
        """Whether somebody gets the frames."""
        return self._callback is not None

    def start(self, callback: FramesCallback) -> None:
        """Hands all frames, those already here included, to ``callback``; the first at once. Once.

        Raises:
            LinkClosedError: the receiver is closed.
            ProtocolError: what is here makes no sense.
        """
        if self._closed:
            raise LinkClosedError("the channel is closed")
        if self._callback is not None:
            raise RuntimeError("the receiver was started before")
        self._callback = callback
        kept, self._kept = self._kept, []
        self._deliver(kept)

    def take(self, parts: list[Part]) -> None:
        """Takes parts that have come.

        Raises:
            ProtocolError: they are more than was allowed, or do not fit together.
        """
        if self._closed:
            return
        self._used += sum(record_size(len(part.data)) for part in parts)
        if self._used > self._limits.window:
            raise ProtocolError(f"the sender has {self._used} bytes under way; the limit is {self._limits.window}")
        if self._callback is None:
            self._kept += parts
        else:
            self._deliver(parts)

    def close(self) -> None:
        """Drops what was not delivered. Idempotent."""
        self._closed = True
        self._kept.clear()
        self._parts.clear()

    def _deliver(self, parts: list[Part]) -> None:
        frames: list[bytes] = []
        for part in parts:
            self._consumed += record_size(len(part.data))
            if (frame := self._assemble(part)) is not None:
                frames.append(frame)
        if frames and self._callback is not None:
            self._callback(frames)
        if self._consumed >= self._limits.window // _SHARE and not self._closed:
            self._used -= self._consumed
            self._announce(self._consumed)
            self._consumed = 0

    def _assemble(self, part: Part) -> bytes | None:
        """Takes one part; returns the frame that it completes, if it does."""
        size = len(part.data)
        if not self._parts:
            if not part.rest and size <= self._limits.max_frame:
                return part.data
            self._rest = size + part.rest
            if self._rest > self._limits.max_frame:
                raise ProtocolError(f"a frame of {self._rest} bytes is over the limit of {self._limits.max_frame}")
        # Every part carries something, so a frame is at most as many parts as it has bytes.
        if not size or part.rest != self._rest - size:
            raise ProtocolError(f"a part does not continue its frame, of which {self._rest} bytes are to come")
        self._rest = part.rest
        self._parts.append(part.data)
        if part.rest:
            return None
        frame = b"".join(self._parts)
        self._parts.clear()
        return frame
