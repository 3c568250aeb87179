"""What waits to be written to a core, made into as few frames as the core's limit allows."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from tercet_proto.v1 import engine_pb2
from tercet_shared.errors import bounded

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_REASON = 200
_MIN_LIMIT = 1024
"""Any abort fits into it."""

M = TypeVar("M", engine_pb2.Abort, engine_pb2.Finish)


class Outbox:
    """Aborts, finishes and submits that are not written yet, in this order of urgency.

    A submit that is withdrawn before it was written is never written.
    """

    def __init__(self) -> None:
        self._aborts: deque[engine_pb2.Abort] = deque()
        self._finishes: deque[engine_pb2.Finish] = deque()
        self._submits: dict[int, engine_pb2.Submit] = {}
        self._filled = asyncio.Event()

    def submit(self, submit: engine_pb2.Submit) -> None:
        """Adds a submission, of which `encoded_size` was checked against the core's limit."""
        self._submits[submit.handle] = submit
        self._filled.set()

    def withdraw(self, handle: int) -> bool:
        """Takes a submit back. Returns False when it was written already."""
        return self._submits.pop(handle, None) is not None

    def abort(self, handle: int, attempt: int, reason: str) -> None:
        """Adds an abort."""
        self._aborts.append(engine_pb2.Abort(handle=handle, attempt=attempt, reason=bounded(reason, _MAX_REASON)))
        self._filled.set()

    def finish(self, handle: int, attempt: int, output_tokens: int) -> None:
        """Adds a finish."""
        self._finishes.append(engine_pb2.Finish(handle=handle, attempt=attempt, output_tokens=output_tokens))
        self._filled.set()

    def clear(self) -> set[int]:
        """Forgets everything, with the connection for which it was meant. Returns the handles that were not written."""
        self._aborts.clear()
        self._finishes.clear()
        unwritten, self._submits = set(self._submits), {}
        return unwritten

    async def wait(self, timeout: float) -> None:  # noqa: ASYNC109  # running out is a normal end here
        """Returns when there is something to write, or after ``timeout`` seconds."""
        if self._aborts or self._finishes or self._submits:
            return
        self._filled.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._filled.wait()
        except TimeoutError:
            return

    def take(self, limit: int) -> engine_pb2.ClientFrame:
        """Removes and returns what fits into the next frame of ``limit`` encoded bytes; it may be empty."""
        frame = engine_pb2.ClientFrame()
        limit = max(limit, _MIN_LIMIT)
        room = limit - _drain(self._aborts, frame.aborts.append, limit)
        room -= _drain(self._finishes, frame.finishes.append, room)
        while self._submits:
            handle = next(iter(self._submits))
            size = encoded_size(self._submits[handle])
            if size > room and frame.ByteSize():
                break  # but alone it goes: its size was checked, and what cannot go would stop all others
            room -= size
            frame.submits.append(self._submits.pop(handle))
        return frame


def encoded_size(message: engine_pb2.Submit | engine_pb2.Abort | engine_pb2.Finish) -> int:
    """Returns the bytes that ``message`` takes in a ClientFrame: its own, its length and its tag."""
    size = message.ByteSize()
    return size + max((size.bit_length() + 6) // 7, 1) + 1


def _drain(queue: deque[M], append: Callable[[M], None], room: int) -> int:
    used = 0
    while queue and used + (size := encoded_size(queue[0])) <= room:
        used += size
        append(queue.popleft())
    return used
