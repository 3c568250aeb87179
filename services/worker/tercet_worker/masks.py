"""Grammar masks on their way from the event loop, which receives them, to the device thread, which waits for them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from tercet_shared.errors import LinkError, ProtocolError

if TYPE_CHECKING:
    from tercet_shared.wire.step import U32, GrammarMask, StepPlan
    from tercet_worker.sampling import GrammarSource


class Masks:
    """The masks of one link. All methods are called on the event loop; only what `expect` returns blocks.

    A core may send masks on the plans' stream or on one of their own, so a mask may overtake its plan.

    Args:
        vocab_size: tokens that a row of a mask covers.
        depth: plans that the core may have under way at once, and so masks that may come before their plans.
    """

    def __init__(self, vocab_size: int, depth: int) -> None:
        self._row_words = -(-vocab_size // 32)
        self._depth = depth
        self._awaited: dict[int, tuple[int, Future[U32]]] = {}  # step id -> words, and who waits
        self._early: dict[int, GrammarMask] = {}
        self._last_step: int | None = None

    def expect(self, plan: StepPlan) -> GrammarSource | None:
        """Takes note of a plan, in their order, and returns what waits for its mask; None where it has no gated rows.

        What is returned is called once, on the device thread. It raises `LinkError` when the masks are closed first.

        Raises:
            ProtocolError: its mask has come, and is none that the plan can have.
        """
        self._last_step = plan.step_id
        early = self._early.pop(plan.step_id, None)
        if not len(plan.gated):
            if early is not None:
                raise ProtocolError(f"A mask came for step {plan.step_id}, which has no gated rows.")
            return None
        mask: Future[U32] = Future()
        self._awaited[plan.step_id] = len(plan.gated) * self._row_words, mask
        while len(self._awaited) > 2 * self._depth:  # of steps that failed before they wanted their masks
            self._awaited.pop(next(iter(self._awaited)))
        if early is not None:
            self.put(early)
        return mask.result

    def put(self, mask: GrammarMask) -> None:
        """Hands a mask to the step that waits for it, or keeps it for the plan to come.

        Raises:
            ProtocolError: the mask has a wrong size, its step has had one or has no gated rows, or too many came early.
        """
        awaited = self._awaited.pop(mask.step_id, None)
        if awaited is not None:
            words, future = awaited
            if len(mask.words) != words:
                future.set_exception(LinkError("The mask of the step has a wrong size."))
                raise ProtocolError(
                    f"The mask of step {mask.step_id} has {len(mask.words)} words; its gated rows need {words}."
                )
            future.set_result(mask.words)
        elif mask.step_id in self._early or (self._last_step is not None and mask.step_id <= self._last_step):
            raise ProtocolError(f"A mask came for step {mask.step_id}, which waits for none.")
        elif len(self._early) >= self._depth:
            raise ProtocolError(f"More than {self._depth} masks came before their plans.")
        else:
            self._early[mask.step_id] = mask

    def close(self) -> None:
        """Ends all waiting: no mask will come any more."""
        for _, future in self._awaited.values():
            future.set_exception(LinkError("The link closed before the mask of the step came."))
        self._awaited.clear()
