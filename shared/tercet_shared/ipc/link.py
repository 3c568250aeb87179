"""What the users of a link may rely on, whatever carries the frames: rings on one host, gRPC between hosts.

Frames are opaque bytes. Each stream is ordered, and nothing is lost or repeated while the link is open; when it closes,
both sides learn why, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_shared.ipc.channel import FramesCallback
    from tercet_shared.ipc.ring import Frame


class Stream(StrEnum):
    """The independent frame sequences of a link."""

    STEPS = "steps"
    """Plans from core to worker, results from worker to core."""
    MASKS = "masks"
    """Grammar masks, core to worker only: they must not queue behind plans."""


class CloseKind(StrEnum):
    """Why a link is closed."""

    LOCAL = "local"
    """This side called ``close``."""
    GOODBYE = "goodbye"
    """The other side closed on purpose, and said why."""
    PEER_DIED = "peer died"
    """The other process is gone and said nothing."""
    HEARTBEAT_LOST = "heartbeat lost"
    """The other process still exists but has shown no life for too long."""
    PROTOCOL = "protocol"
    """The other side sent what the protocol does not allow."""


LEAVES = "the worker stops"
"""The goodbye of a worker that was asked to stop. Every other one says what went wrong."""


@dataclass(frozen=True, slots=True)
class CloseReason:
    """Why a link is closed: the kind to decide by, and a sentence for people."""

    kind: CloseKind
    text: str

    def __str__(self) -> str:
        return self.text


class FrameLink(Protocol):
    """One open link to one peer, on one event loop. All methods but `try_send` are called on that loop."""

    @property
    def close_reason(self) -> CloseReason | None:
        """Why the link is closed; None while it is open."""

    @property
    def audience(self) -> object:
        """What this side's frames reach: this link itself, or a group that it shares its sending ends with.

        Of several links with the same audience, a frame is sent on one.
        """

    def send(self, frame: Frame, stream: Stream = Stream.STEPS) -> None:
        """Sends ``frame`` after all earlier ones of ``stream``. Never blocks: without room it waits in a local queue.

        Raises:
            FrameTooLargeError: over the stream's limit; nothing was sent and the link lives on.
            LinkClosedError: the link is closed; the text says why.
            ValueError: this side does not send on that stream.
        """

    def try_send(self, frame: Frame) -> bool:
        """Sends ``frame`` on the stream of steps if that can be done at once, from any thread; never blocks.

        It spares whoever has something to send on another thread the way through the loop.

        Returns:
            False: nothing was done, as no room is left, the link is closed, or its transport belongs to the loop. The
            frame is to be sent there, before any other.
        """

    def pending(self, stream: Stream = Stream.STEPS) -> int:
        """Returns the number of frames that wait for room. The caller bounds it."""

    def on_frames(self, callback: FramesCallback, stream: Stream = Stream.STEPS) -> None:
        """Hands the frames of ``stream`` to ``callback``; they wait in the transport until then. Once per stream.

        Everything that the other side sent before it closed or died is handed over before the link counts as closed.
        If the callback raises ``TercetError``, the frame was not valid, and the link is closed with that text; any
        other error closes the link too, and goes to the loop's exception handler.

        Raises:
            LinkClosedError: the link is closed.
            ValueError: this side does not receive on that stream.
        """

    def on_closed(self, callback: Callable[[CloseReason], None]) -> None:
        """Has the loop call ``callback`` once when the link is closed, soon if it is already."""

    async def wait_closed(self) -> CloseReason:
        """Waits until the link is closed, by whichever side. May be cancelled."""

    async def close(self, goodbye: str = "closed") -> None:
        """Closes the link and tells the other side ``goodbye``, one sentence. Idempotent.

        What is in the transport still reaches the other side; frames that are still pending are dropped.
        """
