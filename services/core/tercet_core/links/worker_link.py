"""One worker, as the engine sees it: plans go out, results come back in order, and its end is noticed once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_shared.wire.frames import decode_result, encode_mask, encode_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_shared.ipc.link import CloseReason, FrameLink
    from tercet_shared.wire.step import GrammarMask, StepPlan, StepResult, WorkerHello


class WorkerLink:
    """Typed frames over a `FrameLink`, whatever its transport. All methods are called on its event loop.

    `submit` never waits: the engine bounds the plans in flight, so what waits for ring space is bounded by the depth.
    """

    def __init__(self, link: FrameLink, hello: WorkerHello) -> None:
        self._link = link
        self.hello = hello

    @property
    def num_blocks(self) -> int:
        """Blocks of the worker's KV pool."""
        return self.hello.num_blocks

    @property
    def close_reason(self) -> CloseReason | None:
        """Why the link is closed; None while it is open."""
        return self._link.close_reason

    def start(self, on_result: Callable[[StepResult], None], on_closed: Callable[[CloseReason], None]) -> None:
        """Hands every result to ``on_result``, and the end of the link once to ``on_closed``.

        A frame that is not a valid result closes the link with that reason. Raises `LinkError` when it is closed.
        """

        def deliver(frames: list[bytes]) -> None:
            for frame in frames:
                on_result(decode_result(frame))

        self._link.on_closed(on_closed)
        self._link.on_frames(deliver)

    def submit(self, plan: StepPlan) -> None:
        """Sends a plan after all earlier ones. Raises `LinkError` when the worker is gone."""
        self._link.send(encode_plan(plan))

    def submit_mask(self, mask: GrammarMask) -> None:
        """Sends the mask of a plan that was sent before. Raises `LinkError` when the worker is gone.

        Masks share the ring of the plans. The worker drains it also while a step waits for its mask, so the order of
        plans and masks blocks nobody; and there is one mask for a plan at most, so the depth bounds both.
        """
        self._link.send(encode_mask(mask))

    async def close(self, goodbye: str) -> None:
        """Ends the link and tells the worker why."""
        await self._link.close(goodbye)
