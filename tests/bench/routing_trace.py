"""A made-up day at a large fleet, squeezed into seconds: who asks what, and what it shares with what was asked before.

Three kinds, as they come to a server of chats: conversations of several turns, each of which repeats all before it;
calls of programs, which share a template and differ behind it; and questions about long documents. The same seed gives
the same trace.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tercet_shared.hashing import chain, root_key

if TYPE_CHECKING:
    import numpy.typing as npt

    from tercet_shared.hashing import BlockKey

BLOCK_SIZE = 16
FINGERPRINT = "model"
VOCABULARY = 50_000
THINK_S = 4.0
"""Mean time between an answer and the next question."""


class Text:
    """All tokens of a conversation, the answers among them; its prompts are its beginnings.

    Attributes:
        ids: int32[n].
        session: its name.
    """

    def __init__(self, ids: npt.NDArray[np.int32], session: str) -> None:
        self.ids = ids
        self.session = session

    @cached_property
    def keys(self) -> list[BlockKey]:
        """Of its whole blocks."""
        return chain(root_key(FINGERPRINT), self.ids, BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: at ``at`` (seconds), with the first ``prompt`` tokens of ``text``, ``output`` of which follow."""

    at: float
    text: Text
    prompt: int
    output: int


def make_trace(requests: int, rate: float, seed: int) -> list[Asked]:
    """Returns ``requests`` requests in the order of time; ``rate`` of them come per second, on average."""
    rng = np.random.default_rng(seed)
    duration = requests / rate

    def words(low: int, high: int) -> npt.NDArray[np.int32]:
        return rng.integers(0, VOCABULARY, rng.integers(low, high), dtype=np.int32)

    systems = [words(200, 1_500) for _ in range(60)]
    templates = [words(600, 2_500) for _ in range(30)]
    names = itertools.count()
    asked: list[Asked] = []

    def converse(start: npt.NDArray[np.int32], turns: int, question: tuple[int, int], answer: tuple[int, int]) -> None:
        pieces, length = [start], len(start)
        ends: list[tuple[float, int, int]] = []
        at = float(rng.uniform(0.0, duration))
        for _ in range(turns):
            pieces += [words(*question), words(*answer)]
            prompt = length + len(pieces[-2])
            length = prompt + len(pieces[-1])
            ends.append((at, prompt, length - prompt))
            at += float(rng.exponential(THINK_S)) + 0.5
        text = Text(np.concatenate(pieces), f"session-{next(names)}")
        asked.extend(Asked(when, text, prompt, output) for when, prompt, output in ends)

    while len(asked) < 1.2 * requests:
        kind = rng.random()
        if kind < 0.25:
            converse(systems[min(int(rng.zipf(1.3)) - 1, 59)], int(rng.integers(2, 9)), (20, 250), (50, 300))
        elif kind < 0.9:
            converse(templates[min(int(rng.zipf(1.3)) - 1, 29)], 1, (30, 400), (10, 150))
        else:
            converse(words(3_000, 9_000), int(rng.integers(2, 6)), (20, 60), (50, 200))
    # Conversations that began early make the end of the trace denser than its beginning: what is late is left out.
    asked.sort(key=lambda one: one.at)
    return asked[:requests]
