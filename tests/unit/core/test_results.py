"""What results carry besides tokens: log-probabilities, vectors; checked, and handed to those who asked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tercet_core.scheduling.request import Ending, Request
from tercet_core.scheduling.scheduler import Scheduler
from tercet_shared.errors import ContextLengthError, InvalidRequestError, ProtocolError
from tercet_shared.pooling import Pooling
from tercet_shared.wire.step import LogProbColumns, offsets_of
from tests.unit.core.support import answer, apply, make_limits, make_request, next_plan, rows_of

if TYPE_CHECKING:
    from tercet_core.scheduling.logprobs import TokenLogProbs
    from tercet_core.scheduling.outputs import Output


def columns(*rows: tuple[int, int, list[float]], alternatives: int = 2) -> LogProbColumns:
    """Returns log-probabilities of rows: (row, position of the first token, log-probabilities of its tokens)."""
    values = [value for _, _, own in rows for value in own]
    return LogProbColumns(
        np.array([row for row, _, _ in rows], np.int32),
        np.array([first for _, first, _ in rows], np.int32),
        offsets_of([len(own) for _, _, own in rows]),
        np.array(values, np.float32),
        np.array([int(-value) for value in values], np.int32),
        offsets_of([alternatives] * len(values)),
        np.array([10 * int(-value) + i for value in values for i in range(alternatives)], np.int32),
        np.array([value - i for value in values for i in range(alternatives)], np.float32),
    )


def told(values: TokenLogProbs) -> list[tuple[float, int, list[int], list[float]]]:
    """Returns, per token, its log-probability, its rank and its alternatives with theirs."""
    bounds = values.top_offsets.tolist()
    return [
        (own, rank, values.top_ids[a:b].tolist(), values.top_logprobs[a:b].tolist())
        for own, rank, a, b in zip(
            values.logprobs.tolist(), values.ranks.tolist(), bounds[:-1], bounds[1:], strict=True
        )
    ]


def of_token(value: float) -> tuple[float, int, list[int], list[float]]:
    return value, int(-value), [10 * int(-value), 10 * int(-value) + 1], [value, value - 1]


def by_handle(output: Output) -> dict[int, list[tuple[float, int, list[int], list[float]]]]:
    """Returns the log-probabilities of each request that has any."""
    assert output.logprobs is not None
    found = iter(told(output.logprobs.values))
    rows = rows_of(output)
    return {rows[row][0]: [next(found) for _ in rows[row][1]] for row in output.logprobs.rows.tolist()}


def asking(handle: int, *, front_end: int = 0, stops: tuple[int, ...] = (), max_tokens: int = 8) -> Request:
    request = make_request(handle, [1, 2, 3], front_end=front_end, stops=stops, max_tokens=max_tokens)
    request.params = replace(request.params, logprobs=2, prompt_logprobs=1)
    return request


def test_log_probabilities_reach_the_front_ends_that_asked() -> None:
    scheduler = Scheduler(make_limits(max_slots=6))
    for handle, front_end in enumerate([1, 0, 1, 0, 1]):
        scheduler.submit(asking(handle, front_end=front_end))
    result = answer(next_plan(scheduler))
    result.logprobs = columns((0, 3, [-1.0]), (1, 3, [-2.0]), (4, 3, [-5.0]))
    zero, one = apply(scheduler, result)
    assert by_handle(zero) == {1: [of_token(-2.0)]}
    assert by_handle(one) == {0: [of_token(-1.0)], 4: [of_token(-5.0)]}


def test_those_of_tokens_behind_a_stop_and_of_stale_rows_are_dropped() -> None:
    scheduler = Scheduler(make_limits(max_slots=3, prefix_caching=False))
    requests = [asking(handle, stops=(7,), max_tokens=20) for handle in range(3)]
    for request in requests:
        scheduler.submit(request)
    apply(scheduler, answer(next_plan(scheduler)))
    for request in requests:
        scheduler.propose(request, np.array([1, 2], np.int32))
    plan = next_plan(scheduler)
    scheduler.end([requests[1]])
    result = answer(plan, [1, 7, 9], [1, 2, 3], [1, 2, 4])
    result.logprobs = columns((0, 4, [-1.0, -2.0, -3.0]), (1, 4, [-4.0] * 3), (2, 4, [-5.0, -6.0, -7.0]))
    (output,) = apply(scheduler, result)
    assert rows_of(output) == [(0, [1, 7]), (2, [1, 2, 4])]
    assert by_handle(output) == {
        0: [of_token(-1.0), of_token(-2.0)],
        2: [of_token(-5.0), of_token(-6.0), of_token(-7.0)],
    }


def test_nobody_who_asks_costs_nothing() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.submit(make_request(0))
    (output,) = apply(scheduler, answer(next_plan(scheduler)))
    assert output.logprobs is None
    assert output.prompt_logprobs == output.pooled == []


@pytest.mark.parametrize(
    "wrong",
    [
        columns((2, 3, [-1.0])),
        columns((-1, 3, [-1.0])),
        columns((1, 3, [-1.0]), (0, 3, [-1.0])),
        columns((0, 3, [-1.0]), (0, 3, [-1.0])),
        columns((0, 3, [-1.0, -2.0])),
    ],
)
def test_log_probabilities_of_wrong_rows_break_the_protocol(wrong: LogProbColumns) -> None:
    scheduler = Scheduler(make_limits())
    for handle in range(2):
        scheduler.submit(asking(handle))
    result = answer(next_plan(scheduler))
    result.logprobs = wrong
    with pytest.raises(ProtocolError, match="log-probabilities of wrong rows"):
        scheduler.apply(result)


def test_prompt_log_probabilities_come_chunk_by_chunk_to_those_who_live() -> None:
    scheduler = Scheduler(make_limits(max_batched_tokens=6, max_slots=2))
    first, second = asking(0), asking(1, front_end=1)
    scheduler.submit(first)
    scheduler.submit(second)
    plan = next_plan(scheduler)
    assert plan.num_tokens.tolist() == [3, 3]
    scheduler.end([second])
    result = answer(plan)
    result.prompt_logprobs = columns((0, 1, [-1.0, -2.0]), (1, 1, [-3.0, -4.0]))
    about, output = apply(scheduler, result)
    (run,) = about.prompt_logprobs
    assert (run.handle, run.attempt, run.first) == (0, 0, 1)
    assert told(run.values) == [of_token(-1.0), of_token(-2.0)]
    assert len(about.handles) == 0
    assert rows_of(output) == [(0, [0])]


def test_who_asks_about_the_prompt_does_not_read_the_cache_but_fills_it() -> None:
    scheduler = Scheduler(make_limits())
    prompt = list(range(12))
    asker = make_request(0, prompt, max_tokens=1)
    asker.params = replace(asker.params, prompt_logprobs=0)
    again = make_request(1, prompt, max_tokens=1)
    again.params = asker.params
    for request, computed, cached in ((asker, 0, 0), (again, 0, 0), (make_request(2, prompt, max_tokens=1), 11, 11)):
        scheduler.submit(request)
        plan = next_plan(scheduler)
        assert plan.computed.tolist() == [computed]
        (output,) = apply(scheduler, answer(plan))
        assert (output.start_rows.tolist(), output.start_cached.tolist()) == ([0], [cached])


def test_the_first_token_is_told_once_also_after_resumption() -> None:
    scheduler = Scheduler(make_limits(max_slots=3))
    scheduler.submit(make_request(0, [1, 2, 3], resumed=[4, 5], max_tokens=8))
    scheduler.submit(make_request(1, [1] * 40, max_tokens=3))
    starts = []
    while (plan := scheduler.plan()) is not None:
        for output in apply(scheduler, answer(plan)):
            handles = output.handles.tolist()
            starts.append([handles[row] for row in output.start_rows.tolist()])
    assert starts[:3] == [[0], [1], []]
    assert [handle for step in starts for handle in step] == [0, 1]


def pooling(handle: int, kind: Pooling, prompt: list[int], **more: Any) -> Request:
    request = make_request(handle, prompt, **more)
    request.pooling = kind
    return request


def vectors(result: Any, *rows: tuple[int, list[float]]) -> Any:
    result.pooled_rows = np.array([row for row, _ in rows], np.int32)
    result.pooled = np.array([value for _, own in rows for value in own], np.float32)
    return result


def test_a_vector_ends_its_request_as_stopped() -> None:
    scheduler = Scheduler(make_limits(max_slots=4))
    scheduler.submit(pooling(0, Pooling.LAST, [1, 2, 3], front_end=1))
    scheduler.submit(make_request(1, [4, 5], max_tokens=1))
    scheduler.submit(pooling(2, Pooling.MEAN, [6]))
    plan = next_plan(scheduler)
    assert plan.samples.tolist() == [True, True, True]
    assert plan.new.pooling.tolist() == [1, 0, 2]
    assert scheduler.plan() is None, "nothing follows a prompt that is pooled"
    outputs = apply(scheduler, vectors(answer(plan, [], [9], []), (0, [0.5, 1.5]), (2, [2.5, 3.5])))
    assert [rows_of(output) for output in outputs] == [[(1, [9])], [(0, [])], [(2, [])]]
    assert [(output.ends[0].ending, output.ends[0].stop_id) for output in outputs[1:]] == [(Ending.STOP, -1)] * 2
    found = [(row, vector.tolist()) for output in outputs for row, vector in output.pooled]
    assert found == [(0, [0.5, 1.5]), (0, [2.5, 3.5])]
    assert scheduler.num_running == 0
    assert scheduler.counters.output_tokens == 1


def test_a_prompt_as_long_as_the_context_is_pooled_in_chunks() -> None:
    scheduler = Scheduler(make_limits(max_model_len=64, max_batched_tokens=40))
    scheduler.submit(pooling(0, Pooling.MEAN, [1] * 64))
    first, second = next_plan(scheduler), next_plan(scheduler)
    assert [plan.samples.tolist() for plan in (first, second)] == [[False], [True]]
    assert apply(scheduler, answer(first)) == []
    (output,) = apply(scheduler, vectors(answer(second, []), (0, [1.0])))
    assert output.ends[0].ending is Ending.STOP


@pytest.mark.parametrize(("kind", "computed"), [(Pooling.LAST, 11), (Pooling.MEAN, 0)])
def test_only_the_last_state_may_be_behind_cached_blocks(kind: Pooling, computed: int) -> None:
    scheduler = Scheduler(make_limits())
    prompt = list(range(12))
    scheduler.submit(make_request(0, prompt, max_tokens=1))
    apply(scheduler, answer(next_plan(scheduler)))
    scheduler.submit(pooling(1, kind, prompt))
    plan = next_plan(scheduler)
    assert plan.computed.tolist() == [computed]
    (output,) = apply(scheduler, vectors(answer(plan, []), (0, [1.0])))
    assert output.ends[0].cached_tokens == computed
    assert len(output.start_rows) == 0


def test_a_vector_of_a_request_that_ended_or_is_not_finite_is_dropped() -> None:
    scheduler = Scheduler(make_limits())
    gone, broken = pooling(0, Pooling.LAST, [1]), pooling(1, Pooling.LAST, [2])
    scheduler.submit(gone)
    scheduler.submit(broken)
    plan = next_plan(scheduler)
    scheduler.end([gone])
    (output,) = apply(scheduler, vectors(answer(plan, [], [], not_finite=[1]), (0, [1.0])))
    assert [(end.ending, output.handles.tolist()) for end in output.ends] == [(Ending.ERROR, [1])]
    assert output.pooled == []


@pytest.mark.parametrize(
    ("rows", "tokens"),
    [
        ([(0, [1.0])], ([], [])),
        ([(0, [1.0]), (1, [1.0]), (2, [1.0])], ([], [])),
        ([(1, [1.0]), (0, [1.0])], ([], [])),
        ([(0, [1.0]), (1, [])], ([], [])),
        ([(0, []), (1, [])], ([], [])),
        ([(0, [1.0]), (1, [1.0])], ([3], [])),
    ],
)
def test_vectors_of_wrong_rows_or_sizes_break_the_protocol(
    rows: list[tuple[int, list[float]]], tokens: tuple[list[int], list[int]]
) -> None:
    scheduler = Scheduler(make_limits())
    for handle in range(2):
        scheduler.submit(pooling(handle, Pooling.LAST, [1]))
    with pytest.raises(ProtocolError, match=r"vectors of|wrong number of tokens"):
        scheduler.apply(vectors(answer(next_plan(scheduler), *tokens), *rows))


def test_vectors_keep_their_size() -> None:
    scheduler = Scheduler(make_limits())
    for width in (2, 2, 3):
        scheduler.submit(pooling(width, Pooling.LAST, [1]))
        result = vectors(answer(next_plan(scheduler), []), (0, [1.0] * width))
        if width == 3:
            with pytest.raises(ProtocolError, match="wrong size"):
                scheduler.apply(result)
        else:
            apply(scheduler, result)


def test_what_cannot_be_pooled_is_refused() -> None:
    scheduler = Scheduler(make_limits(max_model_len=16))
    with pytest.raises(ContextLengthError):
        scheduler.submit(pooling(0, Pooling.LAST, [1] * 17))
    with pytest.raises(InvalidRequestError, match="no output"):
        scheduler.submit(pooling(0, Pooling.LAST, [1], resumed=[2]))
    with pytest.raises(InvalidRequestError, match="at least one token"):
        scheduler.submit(pooling(0, Pooling.LAST, []))
