"""The end of a link, whatever carries it: noticed once, told to everybody."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tercet_shared.errors import TercetError
from tercet_shared.ipc.link import CloseKind, CloseReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_shared.ipc.channel import FramesCallback
    from tercet_shared.ipc.link import Stream


class Ending:
    """Why a link is closed, once it is, and who wants to know."""

    def __init__(self) -> None:
        self.reason: CloseReason | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[CloseReason] | None = None
        self._callbacks: list[Callable[[CloseReason], None]] = []

    def start(self) -> asyncio.AbstractEventLoop:
        """Belongs to the running loop from here on, and returns it."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        return self._loop

    def on_closed(self, callback: Callable[[CloseReason], None]) -> None:
        """Has the loop call ``callback`` once when the link is closed, soon if it is already."""
        if self.reason is not None:
            asyncio.get_running_loop().call_soon(callback, self.reason)
        else:
            self._callbacks.append(callback)

    async def wait(self) -> CloseReason:
        """Waits until the link is closed. May be cancelled."""
        if self._ended is None:
            raise RuntimeError("the link was not started")
        # Shielded: cancelling one who waits must not cancel the event for the others.
        return await asyncio.shield(self._ended)

    def conclude(self, reason: CloseReason) -> None:
        """Tells everybody. Once."""
        self.reason = reason
        if self._loop is not None and self._ended is not None:
            self._ended.set_result(reason)
            for callback in self._callbacks:
                self._loop.call_soon(callback, reason)
        self._callbacks.clear()


def guarded(
    callback: FramesCallback, stream: Stream, peer: str, end: Callable[[CloseKind, str], None]
) -> FramesCallback:
    """Returns ``callback`` such that an error in it ends the link: the frames are lost, so going on makes no sense."""

    def deliver(frames: list[bytes]) -> None:
        try:
            callback(frames)
        except TercetError as error:
            end(CloseKind.PROTOCOL, f"a {stream} frame of the {peer} was refused: {error.message}")
        except Exception:
            # It would leave steps unanswered; the loop's handler shows the traceback.
            end(CloseKind.LOCAL, f"handling a {stream} frame of the {peer} failed")
            raise

    return deliver
