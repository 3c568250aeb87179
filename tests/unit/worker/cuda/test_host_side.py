"""What the CUDA worker decides on the host: page lists, cascades, memory, staged columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tercet_shared.errors import ConfigurationError, InternalError
from tercet_worker.cuda.cascade import pays, shared_blocks, worthwhile_blocks
from tercet_worker.cuda.layout import pages_of
from tercet_worker.cuda.memory import Measured, exhausted, for_kv
from tercet_worker.cuda.staging import Staging, room_for

GIB = 1024**3


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_pages_of_a_mixed_step() -> None:
    pages = pages_of(i32(0, 1, 2, 300), i32(541, 130, 298), 16)
    assert pages.query_starts.tolist() == [0, 1, 2, 300]
    assert pages.offsets.tolist() == [0, 34, 43, 62]
    assert pages.last_lens.tolist() == [13, 2, 10]
    assert pages.lengths.tolist() == [541, 130, 298]
    assert pages.firsts.tolist() == [0, 0, 0]
    assert (pages.most, pages.total) == (34, 62)


def test_rows_of_padding_read_one_token_of_one_page() -> None:
    pages = pages_of(i32(0, 1, 2), i32(16, 17), 16, rows=4)
    assert pages.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert pages.offsets.tolist() == [0, 1, 3, 4, 5]
    assert pages.last_lens.tolist() == [16, 1, 1, 1]
    assert pages.lengths.tolist() == [16, 17, 1, 1]


def test_what_another_pass_reads_is_left_out() -> None:
    pages = pages_of(i32(0, 1, 2), i32(65, 80), 16, skip=4)
    assert pages.firsts.tolist() == [4, 4]
    assert pages.offsets.tolist() == [0, 1, 2]
    assert pages.last_lens.tolist() == [1, 16]


@given(
    lens=st.lists(st.integers(1, 400), min_size=1, max_size=8),
    block=st.sampled_from([1, 8, 16, 64]),
    padding=st.integers(0, 4),
)
def test_every_token_of_a_row_is_in_its_pages(lens: list[int], block: int, padding: int) -> None:
    starts = np.arange(len(lens) + 1, dtype=np.int32)
    pages = pages_of(starts, np.array(lens, np.int32), block, rows=len(lens) + padding)
    held = (np.diff(pages.offsets) - 1) * block + pages.last_lens
    assert held.tolist() == [*lens, *[1] * padding]
    assert pages.last_lens.min() >= 1
    assert pages.last_lens.max() <= block


def test_shared_blocks_end_where_a_row_differs_or_writes() -> None:
    tables = np.tile(np.arange(100, dtype=np.int32), (4, 1))
    slots = i32(0, 1, 3)
    assert shared_blocks(tables, slots, i32(1600, 1600, 1600), 16) == 100
    assert shared_blocks(tables, slots, i32(1600, 79, 1600), 16) == 4  # block 4 is written to by slot 1
    tables[3, 37] = 7
    assert shared_blocks(tables, slots, i32(1600, 1600, 1600), 16) == 37
    tables[1, 0] = 7
    assert shared_blocks(tables, slots, i32(1600, 1600, 1600), 16) == 0


@given(
    differs=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    computed=st.lists(st.integers(0, 900), min_size=6, max_size=6),
)
def test_shared_blocks_are_those_that_a_loop_finds(differs: list[int], computed: list[int]) -> None:
    tables = np.tile(np.arange(60, dtype=np.int32), (6, 1))
    for row, place in enumerate(differs):
        tables[row, place:] += 100 * (row + 1)
    most = min(min(computed) // 16, 60)
    expected = 0
    while expected < most and len(set(tables[:, expected].tolist())) == 1:
        expected += 1
    capped = np.minimum(np.array(computed, np.int32), 960)
    assert shared_blocks(tables, np.arange(6, dtype=np.int32), capped, 16) == expected


@pytest.mark.parametrize(
    ("shared", "rows", "length", "worth"),
    [
        (128, 256, 2100, True),
        (32, 8, 600, True),
        (32, 7, 600, False),  # few rows
        (31, 64, 600, False),  # a short prefix
        (32, 64, 4000, False),  # most of the reading is each row's own
    ],
)
def test_when_a_cascade_pays(shared: int, rows: int, length: int, worth: bool) -> None:
    assert pays(shared, np.full(rows, length, np.int32), 16) is worth


def test_no_table_is_read_where_a_cascade_cannot_pay() -> None:
    nothing = np.empty((0, 0), np.int32)
    assert worthwhile_blocks(nothing, i32(0, 1), i32(5000, 5000), i32(5001, 5001), 16) == 0


def test_the_cache_takes_what_is_left() -> None:
    measured = Measured(total=80 * GIB, free=62 * GIB, reserved=17 * GIB, peak=16 * GIB)
    # 72 GiB may be used, others have one, the model and a step sixteen, ten graphs a little.
    assert for_kv(measured, 0.9, 10) == 55 * GIB - 10 * 4 * 1024**2
    with pytest.raises(ConfigurationError, match=r"or raise --gpu-memory-utilization\."):
        for_kv(measured, 0.2, 0)


def test_out_of_memory_is_one_sentence() -> None:
    error = exhausted("capturing graphs", GIB // 2, 80 * GIB)
    assert error.message == "The GPU ran out of memory while capturing graphs: 0.5 of 80.0 GiB are free."


class Events:
    """Counts what is waited for."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def event(self) -> Events:
        return self

    def record(self) -> None:
        self.order.append("record")

    def synchronize(self) -> None:
        self.order.append("wait")

    def pinned(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32)


def test_columns_are_staged_apart_and_live_for_some_steps() -> None:
    streams = Events()
    staging = Staging(room_for(3, 1, 20), torch.device("cpu"), streams)  # type: ignore[arg-type]  # what is used of them
    first, host = staging.put((i32(1, 2, 3), i32(4), np.arange(20, dtype=np.int32)))
    assert [column.tolist() for column in first] == [column.tolist() for column in host]
    assert all(column.data_ptr() % 64 == first[0].data_ptr() % 64 for column in first)
    staging.put((i32(9, 9, 9),))
    assert first[0].tolist() == [1, 2, 3]
    assert streams.order == ["wait", "record"] * 2
    with pytest.raises(InternalError):
        staging.put((np.zeros(65, np.int32),))
