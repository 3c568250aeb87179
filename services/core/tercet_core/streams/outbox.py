"""What one front end is to hear next: bounded, and coalescing while its stream is busy.

The engine puts outputs in and never waits. The stream's writer takes all there is when it can write again, so a slow
front end gets fewer, larger frames; past the bound it is cut off instead of slowing anyone.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tercet_core.scheduling.outputs import merged
from tercet_core.streams.encoding import step_frames

if TYPE_CHECKING:
    from tercet_core.scheduling.logprobs import PromptRun
    from tercet_core.scheduling.outputs import Output
    from tercet_proto.v1 import engine_pb2 as pb

MAX_PENDING_ROWS = 1_000_000
"""Rows (about one token each) that may wait for a front end before it counts as not reading."""

FRAME_BYTES = 1024 * 1024
"""Size above which a step's results are split into several frames."""


def _weight(run: PromptRun) -> int:
    return len(run.values) + len(run.values.top_ids)


class Outbox:
    """Frames to come for one front end. Used on one event loop."""

    def __init__(self, *, max_rows: int = MAX_PENDING_ROWS) -> None:
        self._max_rows = max_rows
        self._rows = 0
        self._outputs: list[Output] = []
        self._frames: list[pb.EngineFrame] = []
        self._filled = asyncio.Event()

    @property
    def pending_rows(self) -> int:
        """Rows that have not been taken yet."""
        return self._rows

    @property
    def overflowed(self) -> bool:
        """Whether the front end does not keep up at all; its stream is to be ended."""
        return self._rows > self._max_rows

    def put(self, output: Output) -> None:
        """Adds the rows of one step; returns at once."""
        self._outputs.append(output)
        self._rows += len(output.handles) + len(output.token_ids) + sum(map(_weight, output.prompt_logprobs))
        if output.logprobs is not None:
            self._rows += len(output.logprobs.values.top_ids)
        self._filled.set()

    def put_frame(self, frame: pb.EngineFrame) -> None:
        """Adds a frame that is not about a step; it goes out after the rows that are already here."""
        self._frames.append(frame)
        self._rows += 1
        self._filled.set()

    def wake(self) -> None:
        """Lets `take` return at once, with whatever there is."""
        self._filled.set()

    async def take(self, timeout: float) -> list[pb.EngineFrame]:  # noqa: ASYNC109  # silence is a result, not an error
        """Waits for something to send, and returns all of it; returns nothing after ``timeout`` seconds."""
        if not self._filled.is_set():
            try:
                async with asyncio.timeout(timeout):
                    await self._filled.wait()
            except TimeoutError:
                return []
        self._filled.clear()
        outputs, self._outputs = self._outputs, []
        frames, self._frames = self._frames, []
        self._rows = 0
        if outputs:
            return [*step_frames(merged(outputs), max_bytes=FRAME_BYTES), *frames]
        return frames
