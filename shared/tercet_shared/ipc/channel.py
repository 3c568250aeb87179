"""Rings on an asyncio event loop: a sender that never waits, and a receiver that reads eagerly.

The loop watches the doorbells (``loop.add_reader``); there is no thread and nothing polls. Works on asyncio's own loops
and on uvloop. Both take the running loop at their first use, and belong to it from then on. Every descriptor is taken
out of the loop before it is closed: an eventfd lives on in the other process, so the selector would otherwise go on
reporting it under a number that may already mean something else.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from tercet_shared.errors import LinkError
from tercet_shared.ipc.errors import FrameTooLargeError, LinkClosedError

if TYPE_CHECKING:
    from tercet_shared.ipc.ring import Frame, RingReader, RingWriter

FramesCallback: TypeAlias = Callable[[list[bytes]], None]
"""Receives one or more whole frames, in order. Runs on the event loop, so it must not block."""

ErrorCallback: TypeAlias = Callable[[LinkError], None]
"""Told once that the ring is unusable. The channel is idle by then; the owner closes it."""


class RingSender:
    """Sends frames through a ring; those that find no room wait in a local queue, which the space doorbell drains.

    Frames leave in the order of ``send``. The queue has no bound of its own: the caller bounds it (an engine by its
    flight depth) and can read ``pending``.

    Args:
        writer: the ring's writing end, which the sender owns from now on.
        on_error: told when a space doorbell finds the ring corrupt. (``send`` itself raises.)
    """

    def __init__(self, writer: RingWriter, on_error: ErrorCallback) -> None:
        self._writer = writer
        self._on_error = on_error
        self._queue: deque[Frame] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None  # set while the space doorbells are watched
        self._closed = False
        self._fault: LinkError | None = None  # that `try_send` found
        self._lock = threading.Lock()  # of all of that: `try_send` may come from another thread

    @property
    def pending(self) -> int:
        """Frames not completely in the ring yet."""
        return len(self._queue) + self._writer.unfinished

    def send(self, frame: Frame) -> None:
        """Writes ``frame`` now, or as soon as there is room. Never blocks, never awaits, never drops.

        Raises:
            FrameTooLargeError: the frame is over the ring's limit; nothing was sent, the sender goes on.
            CorruptRingError: the ring is unusable.
            LinkClosedError: the sender is closed.
        """
        with self._lock:
            if self._closed:
                raise LinkClosedError("the channel is closed")
            if self._fault is not None:
                raise self._fault
            if self._queue:
                size = memoryview(frame).nbytes
                if size > self._writer.max_frame:
                    raise FrameTooLargeError(
                        f"a frame of {size} bytes is over the ring's limit of {self._writer.max_frame} bytes"
                    )
                self._wait_in_queue(frame)
                return
            if not self._writer.try_write(frame):
                self._wait_in_queue(frame)
            self._watch_space()

    def try_send(self, frame: Frame) -> bool:
        """Writes ``frame`` if that can be done at once, in one piece and behind nothing that waits; from any thread.

        Returns:
            False: nothing was done. ``send`` it on the loop, which also says what is wrong, if anything is.
        """
        with self._lock:
            if self._closed or self.pending or memoryview(frame).nbytes > self._writer.max_piece:
                return False
            try:
                return self._writer.try_write(frame)
            except FrameTooLargeError:
                return False
            except LinkError as error:
                self._fault = error  # what shows it is gone by now
                return False

    def _wait_in_queue(self, frame: Frame) -> None:
        # The caller may reuse a mutable buffer as soon as send returns.
        self._queue.append(frame if isinstance(frame, bytes) else bytes(frame))

    def _watch_space(self) -> None:
        """Watches the space doorbells exactly while something waits."""
        if self.pending and self._loop is None:
            self._loop = asyncio.get_running_loop()
            for doorbell in self._writer.space_doorbells:
                self._loop.add_reader(doorbell, self._on_space)
        elif not self.pending:
            self._unwatch()

    def _unwatch(self) -> None:
        if self._loop is not None:
            for doorbell in self._writer.space_doorbells:
                self._loop.remove_reader(doorbell)
            self._loop = None

    def _on_space(self) -> None:
        try:
            with self._lock:
                self._write_waiting()
        except LinkError as error:
            self._on_error(error)

    def _write_waiting(self) -> None:
        """Writes what waits and has room. Raises `LinkError` when the ring is unusable."""
        try:
            # The writer answers the doorbells as soon as it is short of room again. So either that happens here, or
            # nothing is left to write and they are no longer watched: a doorbell never keeps the loop awake.
            if self._writer.pump():
                while self._queue and self._writer.try_write(self._queue[0]):
                    self._queue.popleft()
        except LinkError:
            self._unwatch()
            raise
        self._watch_space()

    def detach_reader(self, reader: int) -> None:
        """Goes on without a reader that is gone; what only it held back is written now."""
        try:
            with self._lock:
                if self._closed:
                    return
                watching = self._loop is not None
                self._unwatch()
                self._writer.detach_reader(reader)
                if watching and self._writer.space_doorbells:
                    self._write_waiting()
        except LinkError as error:
            self._on_error(error)

    def close(self) -> None:
        """Stops watching and closes the ring's end. Idempotent. Frames still in the local queue are dropped."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._unwatch()
            self._queue.clear()
            self._writer.close()


class RingReceiver:
    """Receives frames from a ring. Until ``start``, they stay in the ring, where they hold back the sender.

    Args:
        reader: the ring's reading end, which the receiver owns from now on.
        on_error: told when the ring is found corrupt.
    """

    def __init__(self, reader: RingReader, on_error: ErrorCallback) -> None:
        self._reader = reader
        self._on_error = on_error
        self._callback: FramesCallback | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def start(self, callback: FramesCallback) -> None:
        """Hands all frames, those already waiting included, to ``callback`` from the running loop. Once.

        Raises:
            LinkClosedError: the receiver is closed.
        """
        if self._closed:
            raise LinkClosedError("the channel is closed")
        if self._callback is not None:
            raise RuntimeError("the receiver was started before")
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader.data_doorbell, self.drain)

    def drain(self) -> None:
        """Hands over what is in the ring now. Called by the loop, and by an owner that learns the writer is gone."""
        if self._closed or self._callback is None:
            return
        try:
            frames = self._reader.read_available()
        except LinkError as error:
            self._unwatch()
            self._on_error(error)
            return
        if frames:
            self._callback(frames)

    def _unwatch(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._reader.data_doorbell)
            self._loop = None

    def close(self) -> None:
        """Stops watching and closes the ring's end. Idempotent. What is still in the ring is dropped."""
        if self._closed:
            return
        self._closed = True
        self._unwatch()
        self._reader.close()
