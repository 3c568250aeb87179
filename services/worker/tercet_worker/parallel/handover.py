"""Drawn tokens on their way from the last stage of a pipeline to the first, which embeds them.

The first stage does not wait for a token until a step has a row that needs it: chunks of prompts, and requests whose
last token has come, go on meanwhile.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from tercet_shared.wire.step import StepPlan
    from tercet_worker.parallel.communicator import Communicator, Incoming
    from tercet_worker.state.batch import SampleRows
    from tercet_worker.state.slots import SlotState


@dataclass(slots=True)
class _Awaited:
    """Tokens of one step."""

    rows: SampleRows
    wanted: npt.NDArray[np.bool_]  # [R] whether the row's slot still has the request that drew
    message: Incoming


class TokenHandover:
    """Keeps the token buffers of the first stage and the last one alike.

    Args:
        communicator: of this rank.
        state: of the slots.
    """

    def __init__(self, communicator: Communicator, state: SlotState) -> None:
        topology = communicator.topology
        self._communicator = communicator
        self._state = state
        self._sends = topology.last and not topology.first
        self._receives = topology.first and not topology.last
        self._awaited: deque[_Awaited] = deque()

    def before(self, plan: StepPlan) -> None:
        """Takes in the tokens that a checked plan needs; called before the plan is applied to the state."""
        if not self._awaited:
            return
        # What was drawn for a request that has left its slot must not be written over its successor's tokens.
        for awaited in self._awaited:
            gone = np.isin(awaited.rows.slots, plan.freed) | np.isin(awaited.rows.slots, plan.new.slots)
            awaited.wanted &= ~gone
        needed = 0
        for number, awaited in enumerate(self._awaited, start=1):
            if np.isin(awaited.rows.slots[awaited.wanted], plan.slots).any():
                needed = number
        while self._awaited and (needed > 0 or self._awaited[0].message.come()):
            self._take(self._awaited.popleft())
            needed -= 1

    def after(self, rows: SampleRows) -> None:
        """Sends the tokens that a step has drawn for ``rows``, or asks for them."""
        if not len(rows):
            return
        if self._sends:
            self._communicator.send_tokens(self._state.read_drawn(rows))
        elif self._receives:
            message = self._communicator.receive_tokens(len(rows))
            self._awaited.append(_Awaited(rows, np.ones(len(rows), np.bool_), message))

    def _take(self, awaited: _Awaited) -> None:
        tokens: torch.Tensor = awaited.message.wait()
        index = np.flatnonzero(awaited.wanted)
        if len(index) == len(awaited.rows):
            self._state.write_drawn(awaited.rows, tokens)
        elif len(index):
            self._state.write_drawn(awaited.rows.take(index), tokens.index_select(0, self._state.there(index)))
