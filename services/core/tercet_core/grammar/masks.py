"""Masks of all gated rows of a step at once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par

from tercet_core.grammar.guide import GrammarGuide

if TYPE_CHECKING:
    from tercet_core.scheduling.guides import Guide
    from tercet_shared.wire.step import U32

MAX_THREADS: Final = 8
"""A mask takes 10 to 100 µs; more threads than this would wait for one another."""


class Masks:
    """See `tercet_core.scheduling.guides.MaskMaker`. One call at a time."""

    def __init__(self) -> None:
        self._executor = LLExecutor(max(min(len(os.sched_getaffinity(0)) // 2, MAX_THREADS), 1))

    def fill(self, guides: list[Guide], words: U32) -> None:
        """Writes the masks ``[n, words per row]``, which are all zero."""
        due = []
        for row, guide in enumerate(guides):
            if not isinstance(guide, GrammarGuide):
                raise TypeError("not a guide of this package")
            if guide.open:
                due.append((guide, row))
            elif guide.error is None:
                guide.write_closed(words[row])
        if not due:
            return
        fill_next_token_bitmask_par(self._executor, [(guide.matcher, row) for guide, row in due], words.view(np.int32))
        for guide, row in due:
            guide.finish_open(words[row])
