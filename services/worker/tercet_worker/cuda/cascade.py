"""Whether the rows of a step share so long a prefix that attention reads it once for all of them.

With a cascade, attention over the shared blocks is computed for all queries together, and merged with that over what
each row has alone. It saves reading the prefix again for every row, and costs a second pass, a merge, and the full
graph that a step of decodes would be. Pure: no device.

Legend: S rows, M blocks of a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

LEAST_ROWS = 8
LEAST_TOKENS = 512
LEAST_SAVING = 0.25
"""Below these a cascade is not worth its launches: rows, shared tokens, and the part of all reading that is saved."""


def shared_blocks(
    tables: npt.NDArray[np.int32], slots: npt.NDArray[np.int32], computed: npt.NDArray[np.int32], block_size: int
) -> int:
    """Returns how many leading blocks all rows have in common, of those that no row of the step writes to.

    Args:
        tables: ``[slots, M]``.
        slots: ``[S]``.
        computed: ``[S]``, tokens of each row before the step.
        block_size: tokens per block.
    """
    most = int(computed.min()) // block_size
    shared, width = 0, 1
    first = tables[slots[0]]
    # Twice as many blocks at a time: where nothing is shared one column is looked at.
    while shared < most:
        end = min(shared + width, most)
        alike = (tables[slots, shared:end] == first[shared:end]).all(axis=0)
        if not alike.all():
            return shared + int(alike.argmin())
        shared, width = end, 2 * width
    return shared


def pays(shared: int, seq_lens: npt.NDArray[np.int32], block_size: int) -> bool:
    """Returns whether a cascade over ``shared`` blocks is worth it for rows of these lengths ``[S]``."""
    rows, tokens = len(seq_lens), shared * block_size
    saved = (rows - 1) * tokens
    return rows >= LEAST_ROWS and tokens >= LEAST_TOKENS and saved >= LEAST_SAVING * int(seq_lens.sum(dtype=np.int64))


def worthwhile_blocks(
    tables: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int32],
    computed: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    block_size: int,
) -> int:
    """Returns `shared_blocks` where a cascade over them `pays`, else 0; looks at no table where it cannot."""
    if not pays(int(computed.min()) // block_size, seq_lens, block_size):
        return 0
    shared = shared_blocks(tables, slots, computed, block_size)
    return shared if pays(shared, seq_lens, block_size) else 0
