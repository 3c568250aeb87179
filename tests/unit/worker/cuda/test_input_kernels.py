"""The layout of a step on the device, against the CPU's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tercet_worker.state.mirror import ragged_index

if TYPE_CHECKING:
    import numpy.typing as npt

pytest.importorskip("triton", reason="the kernels are checked with Triton's interpreter")

from tercet_worker.cuda.kernels.inputs import hand_over, lay_out, list_pages

BLOCK = 16


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("counts", "computed", "unwritten", "pad"),
    [
        ([1], [0], [0], 0),
        ([1, 1], [540, 127], [0, 1], 6),
        ([1, 1, 298], [540, 129, 0], [0, 0, 0], 4),
        ([1, 257, 256, 255], [1023, 0, 17, 500], [1, 0, 256, 2], 31),
        ([700], [16], [0], 300),
        ([1] * 40, list(range(40)), [0, 1] * 20, 24),
    ],
)
def test_every_token_gets_its_id_position_and_place(
    counts: list[int], computed: list[int], unwritten: list[int], pad: int
) -> None:
    rng = np.random.default_rng(len(counts) + pad)
    slots = rng.permutation(64)[: len(counts)].astype(np.int32)
    tokens = torch.from_numpy(rng.integers(0, 50_000, (64, 2048), dtype=np.int32))
    tables = torch.from_numpy(rng.integers(0, 900, (64, 128), dtype=np.int32))
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    total = int(starts[-1])
    padded = total + pad
    ids = torch.full((padded + 5,), -7, dtype=torch.int32)
    positions, places = torch.full((padded + 5,), -7), torch.full((padded + 5,), -7)
    lay_out(
        slots=torch.from_numpy(slots),
        starts=torch.from_numpy(starts),
        computed=i32(*computed),
        unwritten=i32(*unwritten),
        tokens=tokens,
        block_tables=tables,
        block_size=BLOCK,
        longest=max(counts),
        padded=padded,
        total=total,
        token_ids=ids,
        positions=positions,
        slot_mapping=places,
    )
    row, place = ragged_index(np.array(counts))
    position = place + np.array(computed)[row]
    assert ids[:total].tolist() == tokens[slots[row], position].tolist()
    assert positions[:total].tolist() == position.tolist()
    page = tables[slots[row], position // BLOCK].numpy().astype(np.int64)
    written = place >= np.array(unwritten)[row]
    assert places[:total].tolist() == np.where(written, page * BLOCK + position % BLOCK, -1).tolist()
    assert ids[total:padded].tolist() == positions[total:padded].tolist() == [0] * pad
    assert places[total:padded].tolist() == [-1] * pad
    assert {*ids[padded:].tolist(), *positions[padded:].tolist(), *places[padded:].tolist()} == {-7}


@pytest.mark.parametrize(
    ("lengths", "firsts"),
    [([3], [0]), ([1, 0, 5], [2, 0, 1]), ([300, 1, 256, 257], [0, 7, 3, 0]), ([0, 0], [0, 0])],
)
def test_pages_of_all_rows_end_to_end(lengths: list[int], firsts: list[int]) -> None:
    tables = torch.from_numpy(np.random.default_rng(1).integers(0, 9000, (8, 400), dtype=np.int32))
    slots = i32(*(5, 0, 7, 2)[: len(lengths)])
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    pages = torch.full((int(offsets[-1]) + 3,), -7, dtype=torch.int32)
    list_pages(
        slots=slots,
        firsts=i32(*firsts),
        offsets=torch.from_numpy(offsets),
        block_tables=tables,
        most=max(lengths),
        pages=pages,
    )
    wanted: list[int] = []
    for slot, first, length in zip(slots.tolist(), firsts, lengths, strict=True):
        wanted += tables[slot, first : first + length].tolist()
    assert pages.tolist() == [*wanted, -7, -7, -7]


@pytest.mark.parametrize("rows", [0, 1, 3, 300])
def test_drawn_tokens_reach_the_token_buffer(rows: int) -> None:
    rng = np.random.default_rng(rows)
    tokens = torch.full((400, 64), -1, dtype=torch.int32)
    slots: npt.NDArray[np.int64] = rng.permutation(400)[:rows]
    positions = rng.integers(0, 64, rows, dtype=np.int32)
    drawn = torch.from_numpy(rng.integers(0, 50_000, rows))
    expected = tokens.clone()
    expected[slots, positions] = drawn.to(torch.int32)
    hand_over(tokens, torch.from_numpy(slots), torch.from_numpy(positions), drawn)
    assert torch.equal(tokens, expected)
