"""Persistent slots and the flat batch: known answers, and ragged copies against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.step import NewSlot, NewSlots, Slot, StepPlan, empty_i32, offsets_of
from tercet_worker.state.batch import InputBatch
from tercet_worker.state.mirror import MirroredTable, RaggedTable, ragged_index
from tercet_worker.state.slots import SlotState

CPU = torch.device("cpu")
BLOCK = 16


def state_of(slots: int = 8, max_model_len: int = 1024) -> SlotState:
    return SlotState(slots=slots, max_model_len=max_model_len, block_size=BLOCK, device=CPU)


def new_slot(slot: int, tokens: list[int], epoch: int = 1, cached: int = 0) -> NewSlot:
    return NewSlot(Slot(slot), epoch, len(tokens), np.array(tokens, np.int32), SamplingParams(), cached=cached)


def plan_of(
    rows: list[tuple[int, int, int, bool, list[int]]],
    *,
    new: list[NewSlot] | None = None,
    freed: list[int] | None = None,
) -> StepPlan:
    """Rows are (slot, tokens, computed before, samples, new block ids)."""
    return StepPlan(
        step_id=1,
        freed=np.array(freed or [], np.int32),
        new=NewSlots.build(new or []),
        slots=np.array([row[0] for row in rows], np.int32),
        num_tokens=np.array([row[1] for row in rows], np.int32),
        computed=np.array([row[2] for row in rows], np.int32),
        samples=np.array([row[3] for row in rows], np.bool_),
        block_offsets=offsets_of([len(row[4]) for row in rows]),
        block_ids=np.array([block for row in rows for block in row[4]], np.int32),
    )


def test_known_answer_of_a_mixed_step() -> None:
    """Two decodes with 540 and 129 tokens computed, and a new prompt of 298: the layout can be worked out by hand."""
    state = state_of()
    prompts = {3: list(range(1000, 1541)), 2: list(range(5000, 5130)), 1: list(range(9000, 9298))}
    blocks = {3: list(range(100, 134)), 2: list(range(40, 49)), 1: list(range(60, 79))}
    state.apply(plan_of([(3, 540, 0, False, blocks[3])], new=[new_slot(3, prompts[3])]))
    state.apply(plan_of([(2, 129, 0, False, blocks[2])], new=[new_slot(2, prompts[2])]))
    plan = plan_of(
        # The prompt comes first in the plan, and last in the batch.
        [(1, 298, 0, True, blocks[1]), (3, 1, 540, True, []), (2, 1, 129, True, [])],
        new=[new_slot(1, prompts[1])],
    )
    state.apply(plan)
    batch = InputBatch.build(plan, state, block_size=BLOCK, pad_to=16)
    assert batch.plan_rows.tolist() == [1, 2, 0]
    assert batch.slots.tolist() == [3, 2, 1]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 300]
    assert batch.seq_lens.tolist() == [541, 130, 298]
    assert batch.max_query_len == 298
    assert batch.num_tokens == 300
    assert len(batch.input_ids) == 304
    assert batch.positions.tolist() == [540, 129, *range(298), 0, 0, 0, 0]
    assert batch.input_ids.tolist() == [1540, 5129, *range(9000, 9298), 0, 0, 0, 0]
    assert batch.slot_mapping[:2].tolist() == [133 * 16 + 12, 48 * 16 + 1]
    assert batch.slot_mapping[2:300].tolist() == [60 * 16 + position for position in range(298)]
    assert batch.slot_mapping[300:].tolist() == [-1] * 4
    assert batch.logits_rows.tolist() == [0, 1, 299]
    assert batch.samples.plan_rows.tolist() == [1, 2, 0]
    assert batch.samples.slots.tolist() == [3, 2, 1]
    assert batch.samples.positions.tolist() == [541, 130, 298]
    assert {batch.input_ids.dtype, batch.seq_lens.dtype, batch.query_start_loc.dtype, batch.slots.dtype} == {
        torch.int32
    }
    assert {batch.positions.dtype, batch.slot_mapping.dtype, batch.logits_rows.dtype} == {torch.int64}


def test_the_sampled_token_is_the_input_of_the_next_step() -> None:
    state = state_of()
    first = plan_of([(5, 3, 0, True, [7]), (4, 2, 0, False, [8])], new=[new_slot(5, [1, 2, 3]), new_slot(4, [4, 5, 6])])
    state.apply(first)
    batch = InputBatch.build(first, state, block_size=BLOCK)
    state.write_drawn(batch.samples, torch.tensor([99]))
    state.advance(first)
    assert state.known[[5, 4]].tolist() == [4, 3]
    assert state.computed[[5, 4]].tolist() == [3, 2]
    second = plan_of([(5, 1, 3, True, []), (4, 1, 2, True, [])])
    state.apply(second)
    assert InputBatch.build(second, state, block_size=BLOCK).input_ids.tolist() == [99, 6]


def test_a_resumed_slot_begins_with_an_empty_block_table() -> None:
    state = state_of()
    state.apply(plan_of([(0, 20, 0, True, [1, 2])], new=[new_slot(0, [5] * 20)]))
    state.apply(plan_of([(0, 4, 16, False, [9, 6])], new=[new_slot(0, list(range(22)))]))
    assert state.blocks[0] == 2
    assert state.block_tables[0, :2].tolist() == [9, 6]
    assert state.tokens[0, :22].tolist() == list(range(22))
    assert state.computed[0] == 16


def test_nothing_is_written_to_blocks_that_came_from_the_cache() -> None:
    """Slot 0 has its whole prompt there and computes its last token, slot 1 the first block; slot 2 has nothing."""
    state = state_of()
    prompts = {slot: list(range(100 * slot, 100 * slot + 32)) for slot in range(3)}
    first = plan_of(
        [(1, 16, 16, True, [3, 7]), (0, 1, 31, True, [3, 5]), (2, 20, 0, False, [8, 9])],
        new=[new_slot(0, prompts[0], cached=32), new_slot(1, prompts[1], cached=16), new_slot(2, prompts[2])],
    )
    state.apply(first)
    batch = InputBatch.build(first, state, block_size=BLOCK, pad_to=8)
    assert batch.slots.tolist() == [0, 1, 2]
    assert batch.input_ids[:2].tolist() == [31, 116]
    assert batch.positions[:2].tolist() == [31, 16]
    assert batch.seq_lens.tolist() == [32, 32, 20]
    wanted = [-1, *range(7 * 16, 8 * 16), *range(8 * 16, 9 * 16), *range(9 * 16, 9 * 16 + 4), -1, -1, -1]
    assert batch.slot_mapping.tolist() == wanted
    state.advance(first)
    second = plan_of([(0, 1, 32, True, [6])])
    state.apply(second)
    assert InputBatch.build(second, state, block_size=BLOCK).slot_mapping.tolist() == [6 * 16]
    resumed = plan_of([(0, 4, 0, False, [2])], new=[new_slot(0, prompts[0], epoch=1)])
    state.apply(resumed)
    assert InputBatch.build(resumed, state, block_size=BLOCK).slot_mapping.tolist() == list(range(32, 36))


def test_blocks_are_appended_behind_those_that_are_there() -> None:
    state = state_of()
    state.apply(
        plan_of([(0, 16, 0, False, [3]), (1, 8, 0, False, [4])], new=[new_slot(0, [1] * 50), new_slot(1, [1] * 50)])
    )
    state.apply(plan_of([(1, 20, 8, False, [7]), (0, 30, 16, False, [5, 6])]))
    assert state.block_tables[0, :3].tolist() == [3, 5, 6]
    assert state.block_tables[1, :2].tolist() == [4, 7]


@given(st.lists(st.integers(0, 5), max_size=8))
def test_ragged_index_is_the_double_loop(counts: list[int]) -> None:
    row, place = ragged_index(np.array(counts, np.int32))
    pairs = list(zip(row.tolist(), place.tolist(), strict=True))
    assert pairs == [(index, number) for index, count in enumerate(counts) for number in range(count)]


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), max_size=4)), max_size=8))
def test_a_ragged_table_holds_what_was_put_last(puts: list[tuple[int, list[int]]]) -> None:
    table, expected = RaggedTable(4, 4), {row: [] for row in range(4)}
    for row, values in puts:
        table.put(np.array([row]), np.array([0, len(values)]), np.array(values, np.int32))
        expected[row] = values
    row, values = table.gather(np.array([2, 0, 3]))
    assert list(zip(row.tolist(), values.tolist(), strict=True)) == [
        (place, value) for place, row in enumerate((2, 0, 3)) for value in expected[row]
    ]


def test_the_copy_on_another_device_follows_the_host() -> None:
    table = MirroredTable(4, 2, CPU)
    # As on a device with memory of its own.
    table.device, table._shared = torch.zeros(4, 2, dtype=torch.int32), False
    table.put(np.array([3, 0], np.int32), np.array([[1, 2], [3, 4]], np.int32))
    assert table.device.tolist() == table.host.tolist() == [[3, 4], [0, 0], [0, 0], [1, 2]]


@pytest.mark.parametrize("length", [1, 131_072])
def test_long_limits_take_no_memory_before_they_are_used(length: int) -> None:
    state = SlotState(slots=4096, max_model_len=length, block_size=BLOCK, device=CPU)
    assert state.tokens.shape == (4096, length)
    state.reset()
    assert empty_i32().size == 0
