"""How FlashInfer sees a step: which pages each row reads. Computed on the host, where all lengths are known.

Legend: S rows, P rows with padding, B tokens per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Pages:
    """Lists of pages, one per row."""

    query_starts: I32  # [P + 1] first query of each row
    offsets: I32  # [P + 1] where each row's pages begin
    firsts: I32  # [P] page of the block table with which the list begins
    last_lens: I32  # [P] tokens in the last page
    lengths: I32  # [P] tokens in all pages
    most: int  # pages of the longest list

    @property
    def total(self) -> int:
        """Pages of all rows."""
        return int(self.offsets[-1])


def pages_of(query_starts: I32, seq_lens: I32, block_size: int, *, skip: int = 0, rows: int | None = None) -> Pages:
    """Returns the pages that rows read.

    Args:
        query_starts: ``[S + 1]``.
        seq_lens: ``[S]``, at least 1 beyond what is skipped.
        block_size: B.
        skip: leading blocks that another pass reads.
        rows: P. Rows of the padding have one query and one page with one token in it, the first page of their table:
            that a row reads nothing is a case which no kernel needs to know.
    """
    count = len(seq_lens)
    padded = count if rows is None else rows
    lengths = np.ones(padded, np.int32)
    lengths[:count] = seq_lens - skip * block_size
    blocks = -(-lengths // block_size)
    firsts = np.zeros(padded, np.int32)
    firsts[:count] = skip
    offsets = np.zeros(padded + 1, np.int32)
    np.cumsum(blocks, out=offsets[1:])
    starts = np.empty(padded + 1, np.int32)
    starts[: count + 1] = query_starts
    starts[count + 1 :] = query_starts[-1] + np.arange(1, padded - count + 1)
    return Pages(starts, offsets, firsts, (lengths - 1) % block_size + 1, lengths, int(blocks.max()))


def alike(counts: I32, group: int) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Returns rows in groups for which FlashInfer takes the same tile of queries, each with the largest it holds.

    It takes one tile for all rows that are planned together, by their mean length: of 16, 64 or 128 pairs of a query
    and one of the query heads that share a key/value head. How keys are added up depends on the tile. The mean of rows
    that are in one of these ranges is in it, too. Rows of one token are a group of their own, of 1.

    Args:
        counts: ``[S]`` queries of each row.
        group: query heads per key/value head.
    """
    pairs = counts.astype(np.int64) * group
    tiles = np.where(counts == 1, 1, np.where(pairs <= 16, 16, np.where(pairs <= 64, 64, 128)))
    return [(int(tile), np.flatnonzero(tiles == tile)) for tile in np.unique(tiles)]
