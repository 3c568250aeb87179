"""Log-probabilities, ranks and alternatives against a plain reference, ties included, and the columns made of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_worker.sampling.logprobs import Scored, Scorer, Scores, columns
from tercet_worker.sampling.order import best_in_order, few_in_order

CPU = torch.device("cpu")
QUICK = settings(deadline=None, max_examples=100, derandomize=True, database=None)


@QUICK
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([1, 2, 30, 60]), st.booleans(), st.data())
def test_scores_are_those_of_the_reference(seed: int, rows: int, vocab: int, ties: bool, data: st.DataObject) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.standard_normal((rows, vocab)).astype(np.float32) * 4
    if ties:
        logits = np.round(logits / 3)
    tokens = generator.integers(0, vocab, rows)
    count = data.draw(st.integers(0, min(vocab, 20)))
    found = Scorer(vocab, CPU)(torch.from_numpy(logits), torch.from_numpy(tokens), count)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found.logprobs.numpy(), exact[np.arange(rows), tokens], atol=1e-5, rtol=0)
    for row in range(rows):
        order = sorted(range(vocab), key=lambda token, row=row: (-logits[row, token], token))
        assert found.ranks[row] == order.index(tokens[row]) + 1
        assert found.top_ids[row].tolist() == order[:count]
        np.testing.assert_allclose(found.top_logprobs[row].numpy(), exact[row, order[:count]], atol=1e-5, rtol=0)
        if 0 < found.ranks[row] <= count:
            assert found.top_logprobs[row, found.ranks[row] - 1] == found.logprobs[row]


@QUICK
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 12))
def test_few_in_order_are_the_first_of_all_in_order(seed: int, count: int, levels: int) -> None:
    values = torch.from_numpy(np.random.default_rng(seed).integers(-levels, levels, (4, 12)).astype(np.float32))
    ids = torch.arange(12, dtype=torch.int32)
    every_id, every_value = best_in_order(values, 12, ids)
    found_ids, found_values = few_in_order(values, count, ids)
    assert torch.equal(found_ids, every_id[:, :count])
    assert torch.equal(found_values, every_value[:, :count])


def test_a_row_is_scored_the_same_alone_and_in_a_batch() -> None:
    logits = torch.randn(16, 5_000, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(16) * 300
    scorer = Scorer(5_000, CPU)
    together = scorer(logits, tokens, 5)
    for row in range(16):
        alone = scorer(logits[row : row + 1], tokens[row : row + 1], 5)
        assert torch.equal(alone.logprobs[0], together.logprobs[row])
        assert torch.equal(alone.top_logprobs[0], together.top_logprobs[row])


def scores(tokens: list[int], count: int) -> Scores:
    """Scores whose numbers say which token they belong to."""
    base = torch.tensor(tokens, dtype=torch.float32)
    tops = torch.arange(count)
    return Scores(-base, base.long() + 1, base.long()[:, None] * 10 + tops, -base[:, None] - tops / 10)


def test_columns_are_in_the_order_of_the_plan_with_what_each_row_asked_for() -> None:
    # Rows 4, 0 and 2 in two runs; row 2 is left out. Row 4 has three tokens over two pieces.
    one = Scored(
        np.array([4, 0]), np.array([7, 1], np.int32), np.array([3, 1], np.int32), np.array([1, 2], np.int32),
        [scores([1, 2], 2), scores([3, 4], 2)],
    )  # fmt: skip
    two = Scored(
        np.array([2, 3]), np.array([5, 6], np.int32), np.ones(2, np.int32), np.zeros(2, np.int32), [scores([5, 6], 0)]
    )
    found = columns([one, two], np.array([2]))
    assert found is not None
    assert (found.rows.tolist(), found.first.tolist()) == ([0, 3, 4], [1, 6, 7])
    assert found.token_offsets.tolist() == [0, 1, 2, 5]
    assert found.logprobs.tolist() == [-4, -6, -1, -2, -3]
    assert found.ranks.tolist() == [5, 7, 2, 3, 4]
    assert found.top_offsets.tolist() == [0, 2, 2, 3, 4, 5]
    assert found.top_ids.tolist() == [40, 41, 10, 20, 30]
    np.testing.assert_allclose(found.top_logprobs, [-4, -4.1, -1, -2, -3], rtol=1e-6)
    for name, dtype in {
        "rows": "<i4",
        "logprobs": "<f4",
        "ranks": "<i4",
        "top_ids": "<i4",
        "top_logprobs": "<f4",
    }.items():
        assert getattr(found, name).dtype == np.dtype(dtype)
    assert columns([two], np.array([2, 3])) is None
    assert columns([], np.array([], np.int64)) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_known(bad: float) -> None:
    logits = torch.zeros(4, 9)
    logits[2, 5] = bad
    found = Scorer(9, CPU)(logits, torch.zeros(4, dtype=torch.int64), 2)
    run = Scored(
        np.array([6, 3]), np.array([1, 1], np.int32), np.array([2, 2], np.int32), np.full(2, 2, np.int32), [found]
    )
    assert run.broken().tolist() == [3]
