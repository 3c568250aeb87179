"""Requests whose output a grammar guides: when the grammar is asked, and what follows from its answers.

A guide depends on the tokens of its request that have landed and on nothing else, so preemption, failed steps and a
lost worker do not touch it. What it computes may take milliseconds; it is collected as `GuideWork`, which runs on any
thread while nobody plans or applies, and is settled afterwards:

    outputs = scheduler.apply(result)
    work = scheduler.guide_work()
    ... work.run(masks) on another thread ...
    settled = scheduler.settle(work)    # masks for the worker, tokens and ends for the front ends

**Masks.** A row that samples under a guide is gated: it samples when the mask of its step arrives. The mask is due as
soon as every token of the gated rows that comes before has landed.

**Forced tokens.** Where the grammar leaves no choice for a while, drawing is a waste. Such a row is not planned while
it has tokens in flight; once they have landed, the forced tokens are taken without a step each, and the next plan
tells the worker. Whether a token is forced is a matter of the tokens before it, not of this: drawn under the mask,
they would come out the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tercet_core.scheduling.outputs import End, Output, row_of
from tercet_core.scheduling.request import Ending
from tercet_shared.wire.step import GrammarMask, Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_core.scheduling.request import Request
    from tercet_core.scheduling.state import SchedulerState
    from tercet_shared.errors import TercetError
    from tercet_shared.wire.step import I32, U32

MIN_FORCED = 3
"""Forced tokens from which on they are taken without a step each; fewer are not worth an emptied pipeline."""


class Guide(Protocol):
    """What keeps one request's output in its grammar. Used by one thread at a time."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The model's end-of-sequence ids, which end the request even where its parameters name none."""

    @property
    def forced(self) -> Sequence[int]:
        """The tokens that must follow those that were taken, as far as is known; empty where there is a choice."""

    @property
    def error(self) -> TercetError | None:
        """Why the request cannot go on; None while it can."""

    def advance(self, tokens: list[int]) -> None:
        """Takes tokens of the output, in order; what the grammar does not allow sets `error`."""


class MaskMaker(Protocol):
    """Computes masks."""

    def fill(self, guides: list[Guide], words: U32) -> None:
        """Writes the masks ``[n, words per row]`` of what each guide allows next; a guide that fails sets its error."""


@dataclass(slots=True)
class Gate:
    """The gated rows of a step in flight.

    Attributes:
        slots: [G] in the order of `StepPlan.gated`.
        epochs: [G] owners at the time of planning.
        needed: [G] known tokens of each at which its mask can be computed.
        due: whether the mask has not been computed yet.
    """

    slots: I32
    epochs: I32
    needed: I32
    due: bool = True


@dataclass(slots=True)
class Landed:
    """Output of one guided request that its guide has not taken yet.

    Attributes:
        slot: where the request is.
        epoch: of the slot.
        request: the request.
        guide: its guide.
        tokens: in their order.
        room: forced tokens that may be taken without a step each; 0: none, they are drawn.
        taken: those that were.
    """

    slot: Slot
    epoch: int
    request: Request
    guide: Guide
    tokens: list[int]
    room: int = 0
    taken: list[int] = field(default_factory=list)

    def run(self) -> None:
        """Lets the guide take the tokens, and takes what it forces then."""
        self.guide.advance(self.tokens)
        while self.room and self.guide.error is None and len(self.guide.forced) >= MIN_FORCED:
            forced = list(self.guide.forced[: self.room])
            ends = self.request.stop_ids
            last = next((i for i, token in enumerate(forced) if token in ends), None)
            if last is not None:
                forced = forced[: last + 1]
            self.guide.advance(forced)
            self.taken += forced
            self.room = 0 if last is not None else self.room - len(forced)


@dataclass(slots=True)
class DueMask:
    """A mask to compute: the rows of a step's gate, None where the request has ended meanwhile."""

    step_id: int
    slots: list[tuple[Slot, int]]  # with the epoch
    guides: list[Guide | None]
    words: U32  # [G, words per row]; all ones until it was computed

    def run(self, masks: MaskMaker) -> None:
        """Computes the rows that still matter."""
        rows = [row for row, guide in enumerate(self.guides) if guide is not None and guide.error is None]
        if not rows:
            return
        words = np.zeros((len(rows), self.words.shape[1]), np.uint32)
        guides = [guide for row in rows if (guide := self.guides[row]) is not None]
        masks.fill(guides, words)
        for row, guide, own in zip(rows, guides, words, strict=True):
            if guide.error is None:
                self.words[row] = own


@dataclass(slots=True)
class GuideWork:
    """What the guides are to compute; see the module."""

    landed: list[Landed]
    due: list[DueMask]

    def run(self, masks: MaskMaker) -> None:
        """Computes it; the only part that takes time. Nobody else may use the guides meanwhile."""
        for item in self.landed:
            item.run()
        for mask in self.due:
            mask.run(masks)


@dataclass(slots=True)
class Settled:
    """What came of `GuideWork`.

    Attributes:
        masks: for the worker, in the order of their steps.
        outputs: what the front ends are to hear: forced tokens, and ends.
    """

    masks: list[GrammarMask] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)


class Guidance:
    """Collects and settles the work of a scheduler's guides."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._words = -(-state.limits.vocab_size // 32)

    def work(self) -> GuideWork | None:
        """Returns what is to be computed now, or None. It must be settled before anything is planned or applied."""
        state = self._state
        if not (state.landed or state.loose or any(record.gate is not None for record in state.flight)):
            return None
        landed, due = self._landed(), self._due()
        return GuideWork(landed, due) if landed or due else None

    def settle(self, work: GuideWork) -> Settled:
        """Takes over what was computed; requests that ended meanwhile hear nothing."""
        settled = Settled()
        for item in work.landed:
            if self._owns(item.slot, item.epoch) and (output := self._follow(item)) is not None:
                settled.outputs.append(output)
        for mask in work.due:
            for (slot, epoch), guide in zip(mask.slots, mask.guides, strict=True):
                if guide is not None and guide.error is not None and self._owns(slot, epoch):
                    settled.outputs.append(self._fail(slot, guide.error))
            settled.masks.append(GrammarMask(mask.step_id, mask.words.reshape(-1)))
        return settled

    # ---------------------------------------------------------------------------------------- collecting

    def _landed(self) -> list[Landed]:
        state, table = self._state, self._state.table
        items = [item for item in state.landed.values() if self._owns(item.slot, item.epoch)]
        state.landed = {}
        for item in items:
            if item.request.takes_forced and not table.in_flight[item.slot]:
                item.room = int(table.limit[item.slot]) - int(table.known[item.slot])
        return items

    def _due(self) -> list[DueMask]:
        state, table = self._state, self._state.table
        due = [DueMask(step_id, [], [], self._ones(rows)) for step_id, rows in state.loose]
        state.loose = []
        for record in state.flight:
            gate = record.gate
            if gate is None or not gate.due:
                continue
            live = table.epoch[gate.slots] == gate.epochs
            if (live & (table.known[gate.slots] < gate.needed)).any():
                continue
            gate.due = False
            owners = [
                table.requests[slot] if alive else None
                for slot, alive in zip(gate.slots.tolist(), live.tolist(), strict=True)
            ]
            slots = [(Slot(slot), epoch) for slot, epoch in zip(gate.slots.tolist(), gate.epochs.tolist(), strict=True)]
            guides = [owner.guide if owner is not None else None for owner in owners]
            due.append(DueMask(record.step_id, slots, guides, self._ones(len(slots))))
        return due

    def _ones(self, rows: int) -> U32:
        return np.full((rows, self._words), 0xFFFFFFFF, np.uint32)

    def _owns(self, slot: Slot, epoch: int) -> bool:
        return int(self._state.table.epoch[slot]) == epoch

    # ---------------------------------------------------------------------------------------- settling

    def _follow(self, item: Landed) -> Output | None:
        """Takes the forced tokens into the table, and ends the request where they or its guide end it."""
        state, table, slot = self._state, self._state.table, item.slot
        if item.guide.error is not None:
            return self._fail(slot, item.guide.error)
        table.forced[slot] = item.request.takes_forced and len(item.guide.forced) >= MIN_FORCED
        if not item.taken:
            return None
        known = int(table.known[slot])
        table.tokens[slot, known : known + len(item.taken)] = item.taken
        table.known[slot] = known + len(item.taken)
        state.counters.output_tokens += len(item.taken)
        if table.running[slot]:  # one that resumes comes again with all that it knows
            state.appends.setdefault(slot, known)
        end: End | None = None
        if item.taken[-1] in item.request.stop_ids:
            end = End(0, Ending.STOP, item.taken[-1], item.request.cached_tokens)
        elif table.known[slot] >= table.limit[slot]:
            end = End(0, Ending.LENGTH, -1, item.request.cached_tokens)
        if end is not None:
            state.end([slot])
        return row_of(item.request, item.taken, end)

    def _fail(self, slot: Slot, error: TercetError) -> Output:
        (request,) = self._state.end([slot])
        return row_of(request, [], End(0, Ending.ERROR, error=error))
