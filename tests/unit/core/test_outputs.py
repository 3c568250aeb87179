"""What front ends hear of a step, and several steps' outputs as one."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_core.scheduling import outputs as outputs_module
from tercet_core.scheduling.outputs import End, Output, merged
from tercet_core.scheduling.request import Ending, FrontEnd
from tercet_core.scheduling.scheduler import Scheduler
from tercet_shared.wire.step import offsets_of
from tests.unit.core.support import answer, apply, make_limits, make_request, next_plan, rows_of


def _output(rows: list[tuple[int, int, list[int]]], ends: dict[int, Ending] | None = None) -> Output:
    """Returns an output of rows (handle, attempt, tokens); ``ends`` by row."""
    return Output(
        FrontEnd(3),
        np.array([handle for handle, _, _ in rows], np.uint64),
        np.array([attempt for _, attempt, _ in rows], np.uint32),
        offsets_of([len(ids) for _, _, ids in rows]),
        np.array([token for _, _, ids in rows for token in ids], np.int32),
        [End(row, ending, stop_id=row, cached_tokens=5) for row, ending in (ends or {}).items()],
    )


def test_each_front_end_hears_its_own_rows_in_order() -> None:
    scheduler = Scheduler(make_limits(max_slots=6))
    for handle, front_end in enumerate([2, 0, 2, 1, 0]):
        scheduler.submit(make_request(handle, [1], max_tokens=2, front_end=front_end, attempt=handle + 1, stops=(4,)))
    outputs = apply(scheduler, answer(next_plan(scheduler), [4], [1], [2], [3], [4]))
    assert [(output.front_end, rows_of(output)) for output in outputs] == [
        (0, [(1, [1]), (4, [4])]),
        (1, [(3, [3])]),
        (2, [(0, [4]), (2, [2])]),
    ]
    assert [output.attempts.tolist() for output in outputs] == [[2, 5], [4], [1, 3]]
    assert [[(end.row, end.ending, end.stop_id) for end in output.ends] for output in outputs] == [
        [(1, Ending.STOP, 4)],
        [],
        [(0, Ending.STOP, 4)],
    ]
    for output in outputs:
        assert output.handles.dtype == np.uint64
        assert output.attempts.dtype == np.uint32
        assert output.token_offsets.dtype == output.token_ids.dtype == np.int32


def test_rows_with_several_tokens_are_split_by_front_end_too() -> None:
    scheduler = Scheduler(make_limits(max_slots=3))
    requests = [make_request(handle, [1], max_tokens=20, front_end=handle % 2) for handle in range(3)]
    for request in requests:
        scheduler.submit(request)
    apply(scheduler, answer(next_plan(scheduler)))
    scheduler.propose(requests[0], np.array([1, 2], np.int32))
    scheduler.propose(requests[2], np.array([3], np.int32))
    outputs = apply(scheduler, answer(next_plan(scheduler), [1, 2, 5], [6], [3, 7]))
    assert [rows_of(output) for output in outputs] == [[(0, [1, 2, 5]), (2, [3, 7])], [(1, [6])]]


def test_chunks_are_not_heard() -> None:
    scheduler = Scheduler(make_limits(max_batched_tokens=4))
    scheduler.submit(make_request(0, [1] * 10))
    assert apply(scheduler, answer(next_plan(scheduler))) == []


def test_merging_one_output_returns_it() -> None:
    output = _output([(1, 0, [4])])
    assert merged([output]) is output


def test_merging_joins_the_tokens_of_a_request() -> None:
    outcome = merged(
        [
            _output([(7, 0, [1]), (2**63 + 1, 0, [2])]),
            _output([(2**63 + 1, 0, [3, 4]), (7, 0, [])], {0: Ending.LENGTH}),
            _output([(8, 1, [6]), (7, 0, [5])], {1: Ending.STOP}),
        ]
    )
    assert rows_of(outcome) == [(7, [1, 5]), (2**63 + 1, [2, 3, 4]), (8, [6])]
    assert [(end.row, end.ending, end.stop_id, end.cached_tokens) for end in outcome.ends] == [
        (0, Ending.STOP, 1, 5),
        (1, Ending.LENGTH, 0, 5),
    ]


def test_merging_keeps_attempts_apart() -> None:
    outcome = merged([_output([(7, 0, [1])]), _output([(7, 1, [2])])])
    assert rows_of(outcome) == [(7, [1]), (7, [2])]
    assert outcome.attempts.tolist() == [0, 1]


def _seen(output: Output) -> tuple[object, ...]:
    columns = (output.handles, output.attempts, output.token_offsets, output.token_ids, output.start_rows)
    return output.ends, *((column.dtype, column.tolist()) for column in (*columns, output.start_cached))


@pytest.mark.parametrize(
    "second",
    [
        _output([(7, 0, [3])]),
        _output([(7, 0, [3]), (9, 0, [4])]),
        _output([(7, 0, [3]), (8, 2, [4])]),
        _output([(8, 1, [3]), (7, 0, [4])]),
        _output([(7, 0, [3, 4]), (8, 1, [])]),
        _output([]),
    ],
)
def test_other_rows_or_tokens_are_merged_one_by_one(second: Output) -> None:
    outputs = [_output([(7, 0, [1]), (8, 1, [2])]), second]
    assert _seen(merged(outputs)) == _seen(outputs_module._merged_rows(outputs))
    assert outputs_module._succession(outputs) is None


@settings(max_examples=80, derandomize=True, database=None, deadline=None)
@given(st.integers(0, 6), st.integers(2, 5), st.randoms(use_true_random=False))
def test_merging_steps_of_the_same_requests_keeps_tokens_starts_and_ends(rows: int, steps: int, chance: Random) -> None:
    ids = [[chance.randrange(100) for _ in range(rows)] for _ in range(steps)]
    ends = {row: chance.choice(list(Ending)) for row in range(rows) if chance.random() < 0.4}
    started = np.array([row for row in range(rows) if chance.random() < 0.5], np.int32)
    outputs = [
        _output([(9 - row, row % 2, [token]) for row, token in enumerate(step)], ends if number == steps - 1 else None)
        for number, step in enumerate(ids)
    ]
    outputs[0].start_rows, outputs[0].start_cached = started, started + 7
    outcome = merged(outputs)
    assert _seen(outcome) == _seen(outputs_module._merged_rows(outputs)), "as any outputs are merged"
    assert outputs_module._succession(outputs) is not None, "without sorting"
    assert rows_of(outcome) == [(9 - row, [step[row] for step in ids]) for row in range(rows)]
    assert outcome.attempts.tolist() == [row % 2 for row in range(rows)]
    assert [(end.row, end.ending, end.stop_id) for end in outcome.ends] == [(row, ends[row], row) for row in ends]
    assert (outcome.start_rows.tolist(), outcome.start_cached.tolist()) == (started.tolist(), (started + 7).tolist())
    assert outcome.token_offsets.dtype == outcome.token_ids.dtype == np.int32


@settings(max_examples=80, derandomize=True, database=None, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.lists(st.integers(0, 99), max_size=3)), max_size=5),
        min_size=1,
        max_size=5,
    )
)
def test_merging_loses_nothing_and_keeps_the_order(steps: list[list[tuple[int, int, list[int]]]]) -> None:
    expected: dict[tuple[int, int], list[int]] = {}
    outputs = []
    for step in steps:
        rows = list({(handle, attempt): (handle, attempt, ids) for handle, attempt, ids in step}.values())
        outputs.append(_output(rows))
        for handle, attempt, ids in rows:
            expected.setdefault((handle, attempt), []).extend(ids)
    outcome = merged(outputs)
    got = {
        (handle, attempt): ids
        for (handle, ids), attempt in zip(rows_of(outcome), outcome.attempts.tolist(), strict=True)
    }
    assert got == expected
    assert list(got) == list(expected), "requests stand where they first appeared"
    assert outcome.handles.dtype == np.uint64
    assert outcome.attempts.dtype == np.uint32
    assert outcome.token_offsets.dtype == outcome.token_ids.dtype == np.int32
