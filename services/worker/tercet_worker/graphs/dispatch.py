"""How the device runs a step: as one graph, as graphs between the attention calls, or operation by operation.

A graph is captured for one number of tokens, so a step is padded to the next size that there is one for. Imports no
torch.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from dataclasses import dataclass

from tercet_shared.errors import ConfigurationError

LARGEST = 512
"""Tokens of the largest graph by default. Beyond, launching takes a small part of a step's time."""


class Mode(enum.Enum):
    """Ways to run a step."""

    FULL = "full"  # one graph, attention included; every row has one token
    PIECEWISE = "piecewise"  # a graph for what lies between two attention calls, and these as they come
    EAGER = "eager"  # no graph


@dataclass(frozen=True, slots=True)
class Choice:
    """How one step is run."""

    mode: Mode
    tokens: int  # with padding


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the choice depends on."""

    tokens: int  # at least 1
    rows: int
    longest: int  # tokens of the longest row
    cascade: bool = False  # whether attention takes a shared prefix apart, which no full graph does

    @property
    def uniform(self) -> bool:
        """Whether every row computes one token."""
        return self.longest == 1


def capture_sizes(largest: int) -> tuple[int, ...]:
    """Returns the sizes that graphs are captured for, up to ``largest``: dense where steps are short.

    1, 2, 4, then every eighth up to 256, and every sixteenth up to 512, beyond every 64th. (At most a few percent of a
    step is padding, and a few dozen graphs are captured.)
    """
    if largest < 1:
        return ()
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, largest + 1, 64)]
    kept = [size for size in sizes if size <= largest]
    if kept[-1] < largest:
        kept.append(largest)
    return tuple(kept)


class Dispatcher:
    """Chooses.

    Args:
        full: sizes of full graphs, ascending.
        piecewise: sizes of piecewise graphs, ascending.
    """

    def __init__(self, full: tuple[int, ...], piecewise: tuple[int, ...]) -> None:
        for sizes in (full, piecewise):
            if list(sizes) != sorted(set(sizes)) or (sizes and sizes[0] < 1):
                raise ConfigurationError(f"Capture sizes must ascend from 1 on, not {sizes}.")
        self.full = full
        self.piecewise = piecewise

    @classmethod
    def up_to(cls, *, max_rows: int, max_tokens: int, largest: int = LARGEST) -> Dispatcher:
        """Returns the usual one for steps of at most ``max_tokens`` tokens and ``max_rows`` rows."""
        return cls(
            full=capture_sizes(min(max_rows, max_tokens, largest)), piecewise=capture_sizes(min(max_tokens, largest))
        )

    @classmethod
    def eager(cls) -> Dispatcher:
        """Returns one that knows no graphs."""
        return cls((), ())

    def choose(self, shape: StepShape) -> Choice:
        """Returns how a step is run: a full graph before a piecewise one, and no padding where there is no graph."""
        if shape.uniform and not shape.cascade and (size := _next(self.full, shape.tokens)):
            return Choice(Mode.FULL, size)
        if size := _next(self.piecewise, shape.tokens):
            return Choice(Mode.PIECEWISE, size)
        return Choice(Mode.EAGER, shape.tokens)


def _next(sizes: tuple[int, ...], tokens: int) -> int | None:
    """Returns the smallest size that holds ``tokens``."""
    index = bisect_left(sizes, tokens)
    return sizes[index] if index < len(sizes) else None
