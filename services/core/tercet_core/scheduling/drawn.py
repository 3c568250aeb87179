"""The rows of a step that drew tokens, and how they become one output per front end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tercet_core.scheduling.logprobs import ranges
from tercet_core.scheduling.outputs import End, Output, RowLogProbs
from tercet_core.scheduling.request import FrontEnd
from tercet_shared.wire.step import empty_i32

if TYPE_CHECKING:
    import numpy.typing as npt

    from tercet_core.scheduling.logprobs import TokenLogProbs
    from tercet_core.scheduling.table import RequestTable
    from tercet_shared.wire.step import I32


@dataclass(slots=True)
class DrawnLogProbs:
    """Log-probabilities of the tokens of l rows; more tokens than were kept may be among them."""

    rows: I32  # [l] ascending
    first: I32  # [l] where the tokens of each row begin in `values`
    values: TokenLogProbs


@dataclass(slots=True)
class Drawn:
    """The tokens that n rows keep.

    Attributes:
        slots: [n]
        kept: [n] tokens of each row, at least 1.
        ids: the tokens.
        starts: [n] where each row begins in `ids`.
        ends: of rows, ascending.
        fresh: rows whose request yields its first token here, ascending.
        fresh_cached: prompt tokens of theirs that the prefix cache had.
        logprobs: of the rows that asked; None where nobody did.
    """

    slots: I32
    kept: I32
    ids: I32
    starts: I32
    ends: dict[int, End] = field(default_factory=dict)
    fresh: I32 = field(default_factory=empty_i32)
    fresh_cached: I32 = field(default_factory=empty_i32)
    logprobs: DrawnLogProbs | None = None

    def outputs(self, table: RequestTable) -> list[Output]:
        """Returns the rows per front end; the requests that end must still be in the table."""
        return [
            self._all(FrontEnd(front_end), table) if rows is None else self._some(FrontEnd(front_end), rows, table)
            for front_end, rows in grouped(table.front_end[self.slots])
        ]

    def _all(self, front_end: FrontEnd, table: RequestTable) -> Output:
        offsets = np.zeros(len(self.slots) + 1, np.int32)
        np.cumsum(self.kept, out=offsets[1:])
        output = Output(
            front_end, table.handle[self.slots], table.attempt[self.slots], offsets, self.ids, list(self.ends.values())
        )
        output.start_rows, output.start_cached = self.fresh, self.fresh_cached
        if (own := self.logprobs) is not None:
            tokens = ranges(own.first, self.kept[own.rows])
            output.logprobs = RowLogProbs(own.rows, own.values.pick(tokens))
        return output

    def _some(self, front_end: FrontEnd, rows: I32, table: RequestTable) -> Output:
        slots, lengths = self.slots[rows], self.kept[rows]
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        ends = [
            End(i, end.ending, end.stop_id, end.cached_tokens)
            for i, row in enumerate(rows.tolist() if self.ends else [])
            if (end := self.ends.get(row)) is not None
        ]
        ids = self.ids[ranges(self.starts[rows], lengths)]
        output = Output(front_end, table.handle[slots], table.attempt[slots], offsets, ids, ends)
        if len(self.fresh):
            mine = np.isin(self.fresh, rows)
            output.start_rows = np.searchsorted(rows, self.fresh[mine]).astype(np.int32)
            output.start_cached = self.fresh_cached[mine]
        if (own := self.logprobs) is not None and (asked := np.isin(own.rows, rows)).any():
            tokens = ranges(own.first[asked], self.kept[own.rows[asked]])
            local = np.searchsorted(rows, own.rows[asked]).astype(np.int32)
            output.logprobs = RowLogProbs(local, own.values.pick(tokens))
        return output


def grouped(values: npt.NDArray[np.int32]) -> list[tuple[int, I32 | None]]:
    """Returns each distinct value with the rows that hold it; None stands for all rows when there is only one value."""
    if not len(values):
        return []
    first = int(values[0])
    if (values == first).all():
        return [(first, None)]
    order = np.argsort(values, kind="stable").astype(np.int32)
    ranked = values[order]
    cuts = np.flatnonzero(np.diff(ranked)) + 1
    return [(int(values[rows[0]]), rows) for rows in np.split(order, cuts)]
