"""A group of ranks, as the engine sees it: one worker, whose plans reach every rank and whose results come from one.

The end of any rank is the end of all: what they compute together cannot be trusted any more.
"""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from typing import TYPE_CHECKING

from tercet_shared.errors import ProtocolError
from tercet_shared.ipc.errors import LinkClosedError
from tercet_shared.ipc.link import CloseKind, CloseReason
from tercet_shared.wire.frames import decode_result, encode_mask, encode_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from tercet_shared.ipc.link import FrameLink
    from tercet_shared.wire.step import GrammarMask, StepPlan, StepResult, WorkerHello


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """One process of a group: its link, and what it said when it came."""

    link: FrameLink
    hello: WorkerHello

    @property
    def name(self) -> str:
        """What to call it in sentences."""
        return f"rank {self.hello.rank} of {self.hello.ranks}"


class GroupLink:
    """The ranks of one group; see `WorkerLink` for the meaning of its methods.

    Args:
        ranks: all of them, by number; exactly one answers. Their links are owned from now on.
        spawn: runs a coroutine in a task that somebody awaits.
    """

    def __init__(self, ranks: Mapping[int, Rank], spawn: Callable[[Coroutine[None, None, None]], None]) -> None:
        self._ranks = [ranks[number] for number in sorted(ranks)]
        self._spawn = spawn
        (answering,) = (rank for rank in self._ranks if rank.hello.answers)
        # Who supervises the core supervises what started the ranks of this host; these share a ring.
        local = (rank.hello.pid for rank in self._ranks if rank.link.audience is not rank.link)
        self.hello = dataclasses.replace(answering.hello, pid=next(local, answering.hello.pid))
        self._senders = list({id(rank.link.audience): rank.link for rank in self._ranks}.values())
        self._reason: CloseReason | None = None
        self._on_closed: Callable[[CloseReason], None] | None = None
        for rank in self._ranks:
            rank.link.on_closed(partial(self._on_end, rank))

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool, the same in every rank."""
        return self.hello.num_blocks

    @property
    def close_reason(self) -> CloseReason | None:
        """Why the group is closed; None while it is open."""
        if self._reason is None:  # one may be closed of which we are told in the loop's next turn
            closed = ((rank, reason) for rank in self._ranks if (reason := rank.link.close_reason) is not None)
            return next((_named(rank, reason) for rank, reason in closed), None)
        return self._reason

    def start(self, on_result: Callable[[StepResult], None], on_closed: Callable[[CloseReason], None]) -> None:
        """Hands every result to ``on_result``, and the end of the group once to ``on_closed``.

        A frame that is not a valid result, or does not come from the rank that answers, ends the group with that
        reason. Raises `LinkError` when it is closed.
        """

        def deliver(frames: list[bytes]) -> None:
            for frame in frames:
                on_result(decode_result(frame))

        def refuse(rank: Rank, _: list[bytes]) -> None:
            raise ProtocolError(f"rank {self.hello.rank} answers for its group, but {rank.name} sent a result")

        self._check_open()
        self._on_closed = on_closed
        for rank in self._ranks:
            rank.link.on_frames(deliver if rank.hello.answers else partial(refuse, rank))

    def submit(self, plan: StepPlan) -> None:
        """Sends a plan to all ranks after all earlier ones. Raises `LinkError` when one is gone."""
        self._send(encode_plan(plan))

    def submit_mask(self, mask: GrammarMask) -> None:
        """Sends the mask of a plan that was sent before to all ranks. Raises `LinkError` when one is gone."""
        self._send(encode_mask(mask))

    async def close(self, goodbye: str) -> None:
        """Ends the links to all ranks and tells them why."""
        if self._reason is None:
            self._reason = self.close_reason or CloseReason(CloseKind.LOCAL, goodbye)
        await asyncio.gather(*(rank.link.close(goodbye) for rank in self._ranks))

    def _send(self, frame: bytes) -> None:
        self._check_open()
        for link in self._senders:
            link.send(frame)

    def _check_open(self) -> None:
        if (reason := self.close_reason) is not None:
            raise LinkClosedError(reason.text)

    def _on_end(self, rank: Rank, reason: CloseReason) -> None:
        if self._reason is not None:
            return
        self._reason = _named(rank, reason)
        for other in self._ranks:
            if other is not rank:
                self._spawn(other.link.close(self._reason.text))
        if self._on_closed is not None:
            self._on_closed(self._reason)


def _named(rank: Rank, reason: CloseReason) -> CloseReason:
    return CloseReason(reason.kind, f"{rank.name}: {reason.text}")
