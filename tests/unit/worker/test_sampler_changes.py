"""Bias, penalties, exclusions and grammars against the reference, in batches that mix rows with and without them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_shared.sampling_params import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORDS, SamplingParams
from tercet_worker.sampling import Sampler
from tercet_worker.sampling.changes import unpack
from tests.unit.worker.sampling_cases import CPU, Row, draw, fill, pack, reference, sample

V = 40
QUICK = settings(deadline=None, max_examples=150, derandomize=True, database=None)
FEW = st.integers(0, 5)  # of these tokens are texts and bad words, so that they meet
TOKENS = st.integers(0, V - 1)
PENALTIES = st.sampled_from([0.0, 0.0, 0.7, -1.3, 2.0])


@st.composite
def rows(draw_: st.DrawFn) -> Row:
    some = lambda values, default: draw_(st.one_of(st.just(default), values))  # noqa: E731  # most rows ask for little
    params = SamplingParams(
        temperature=draw_(st.sampled_from([0.0, 0.0, 0.4, 1.5])),
        top_k=draw_(st.sampled_from([0, 0, 3, 100])),
        top_p=draw_(st.sampled_from([1.0, 1.0, 0.6])),
        min_p=draw_(st.sampled_from([0.0, 0.0, 0.1])),
        seed=draw_(st.integers(0, 2**64 - 1)),
        max_tokens=30,
        min_tokens=draw_(st.sampled_from([0, 0, 3, 30])),
        stop_token_ids=tuple(draw_(st.lists(TOKENS, max_size=4))),
        eos_token_ids=tuple(draw_(st.sampled_from([(), (7,)]))),
        presence_penalty=draw_(PENALTIES),
        frequency_penalty=draw_(PENALTIES),
        repetition_penalty=draw_(st.sampled_from([1.0, 1.0, 1.3, 0.5])),
        logit_bias=some(
            st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=6).map(lambda d: tuple(d.items())), ()
        ),
        allowed_token_ids=some(st.lists(TOKENS, min_size=1, max_size=5).map(tuple), ()),
        bad_words=some(st.lists(st.lists(FEW, min_size=1, max_size=4).map(tuple), max_size=12).map(tuple), ()),
    )
    text = draw_(st.lists(FEW, min_size=1, max_size=20))
    grammar = draw_(st.one_of(st.none(), st.none(), st.frozensets(TOKENS, min_size=1, max_size=6)))
    return Row(params, draw_(st.integers(1, len(text))), text=tuple(text), grammar=grammar)


def noise(count: int, seed: int, vocab: int = V) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, vocab)) * 3).astype(np.float32)


@QUICK
@given(st.lists(rows(), min_size=1, max_size=7), st.integers(0, 2**32 - 1))
def test_tokens_are_those_of_the_reference(batch: list[Row], seed: int) -> None:
    logits = noise(len(batch), seed)
    expected = [reference(line, row) for line, row in zip(logits, batch, strict=True)]
    assert draw(logits, batch) == expected


@QUICK
@given(st.lists(rows(), min_size=2, max_size=6), st.integers(0, 2**32 - 1))
def test_a_row_draws_the_same_alone_and_in_a_batch(batch: list[Row], seed: int) -> None:
    logits = noise(len(batch), seed)
    alone = [draw(logits[index : index + 1], [row])[0] for index, row in enumerate(batch)]
    assert draw(logits, batch) == alone


def greedy(**params: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=30, **params)  # type: ignore[arg-type]  # names are checked there


def test_repetition_counts_prompt_and_output_and_the_others_output_only() -> None:
    # Token 1 is in the prompt, 2 in the output, 3 in the output twice, 4 nowhere.
    text = (1, 2, 3, 3)
    logits = np.array([[0.0, 8.0, 7.0, 6.0, 3.5]], np.float32)

    def best(**params: float) -> int:
        return draw(logits, [Row(greedy(**params), prompt_len=1, text=text)])[0]

    assert best() == 1
    assert best(repetition_penalty=2.0) == 1  # 4, 3.5, 3 and 3.5: equals, and the lowest id counts
    assert best(repetition_penalty=2.5) == 4
    assert best(presence_penalty=2.0, frequency_penalty=2.0) == 1
    assert draw(logits, [Row(greedy(presence_penalty=2.0), prompt_len=4, text=text)]) == [1]
    # With the prompt's token out of the way: 7 - 1.1 against 6 - 2.2, then 7 - 2 against 6 - 2.
    biased = {"logit_bias": ((1, -100.0),)}
    for params in ({"frequency_penalty": 1.1}, {"presence_penalty": 2.0}):
        assert draw(logits, [Row(greedy(**biased, **params), prompt_len=1, text=text)]) == [2]
    # 7 + 1 against 6 + 2 · 1, and a little more.
    assert draw(logits, [Row(greedy(**biased, frequency_penalty=-1.01), prompt_len=1, text=text)]) == [3]


def test_repetition_makes_negative_logits_more_negative() -> None:
    logits = np.array([[-2.0, -3.0]], np.float32)
    assert draw(logits, [Row(greedy(repetition_penalty=1.6), text=(0, 0, 0, 0))]) == [1]


def test_penalties_see_what_was_drawn_last_and_nothing_behind_it() -> None:
    table = fill([Row(greedy(presence_penalty=2.0), prompt_len=1, text=(1, 2, 3, 4))], np.array([0]))
    logits = torch.tensor([[0.0, 0.0, 5.0, 4.9, 4.8]])
    sampler = Sampler(5, CPU)
    # At position 3 the fourth token is not there yet, whatever the buffer holds.
    assert sampler(logits.clone(), table.batch(np.array([0]), np.array([3], np.int32))).token_ids.tolist() == [4]
    assert sampler(logits.clone(), table.batch(np.array([0]), np.array([4], np.int32))).token_ids.tolist() == [2]


def test_penalties_over_more_rows_than_are_counted_at_once() -> None:
    logits = noise(9, 4)
    batch = [
        Row(greedy(frequency_penalty=1.5, repetition_penalty=1.0 + index % 2), prompt_len=2, text=(1, 2, *range(index)))
        for index in range(9)
    ]
    table = fill(batch, np.arange(9))
    sampler = Sampler(V, CPU)
    sampler._rows_at_once = 2
    found = sampler(
        torch.from_numpy(logits.copy()), table.batch(np.arange(9), np.array([len(row.text) for row in batch], np.int32))
    )
    assert found.token_ids.tolist() == [reference(line, row) for line, row in zip(logits, batch, strict=True)]
    assert sampler._counts is not None
    assert not sampler._counts.any()


def test_bad_words_may_begin_in_the_prompt_and_a_text_may_be_shorter_than_they_are() -> None:
    logits = np.array([[5.0, 9.0, 8.0]], np.float32)
    words = ((0, 0, 1), (0, 0, 0, 0, 0, 2))
    assert draw(logits, [Row(greedy(bad_words=words), prompt_len=2, text=(0, 0))]) == [2]
    assert draw(logits, [Row(greedy(bad_words=words), prompt_len=2, text=(0, 2, 0))]) == [1]
    # One word of two that end alike is there, in either order.
    for pair in (((0, 1), (2, 1)), ((2, 1), (0, 1))):
        assert draw(logits, [Row(greedy(bad_words=pair), prompt_len=2, text=(0, 0))]) == [2]


def test_exclusions_that_leave_nothing_give_way_to_the_weightier_ones() -> None:
    logits = np.array([[9.0, 8.0, 7.0, 6.0]], np.float32)
    held = greedy(min_tokens=9, stop_token_ids=(0, 1))

    def best(params: SamplingParams, *grammar: int) -> int:
        return draw(logits, [Row(params, text=(0,) * 5, grammar=frozenset(grammar) if grammar else None)])[0]

    assert best(held) == 2
    assert best(held, 0, 3) == 3
    assert best(held, 0, 1) == 0, "a grammar that allows only the end wins over min_tokens"
    assert best(greedy(allowed_token_ids=(0, 1), min_tokens=9, stop_token_ids=(0, 1))) == 0
    assert best(greedy(allowed_token_ids=(0, 1)), 2, 3) == 2, "a grammar wins over allowed ids"
    assert best(greedy(bad_words=((2,), (0, 3))), 2, 3) == 2, "a grammar wins over bad words"
    assert best(greedy(logit_bias=((3, -100.0),)), 3) == 3, "a grammar wins over a bias"
    both = greedy(bad_words=((2,),), min_tokens=9, stop_token_ids=(3,))
    assert best(both, 2, 3) == 3, "bad words win over min_tokens"
    # What is lighter still chooses among what is left.
    assert best(greedy(allowed_token_ids=(0,), bad_words=((2,),)), 2, 3) == 3
    assert best(greedy(allowed_token_ids=(0, 2, 3), min_tokens=9, stop_token_ids=(2,)), 2, 3) == 3


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 4}, {"seed": 5, "top_p": 0.9, "top_k": 3}])
def test_a_mask_of_one_token_is_that_token(params: dict[str, float]) -> None:
    vocabulary = 1_000
    batch = [Row(SamplingParams(**params), grammar=frozenset([token])) for token in (0, 31, 32, 999)]  # type: ignore[arg-type]
    assert draw(noise(4, 1, vocabulary), batch) == [0, 31, 32, 999]


@pytest.mark.parametrize("vocabulary", [31, 32, 33, 100, 1_024])
def test_masks_are_unpacked(vocabulary: int) -> None:
    generator = np.random.default_rng(vocabulary)
    masks = [frozenset(np.flatnonzero(generator.random(vocabulary) < 0.5).tolist()) for _ in range(3)]
    words = torch.from_numpy(pack(masks, vocabulary).view(np.uint8)).view(3, -1)
    forbidden = unpack(words, vocabulary)
    assert forbidden.shape == (3, vocabulary)
    assert [set(np.flatnonzero(~row.numpy()).tolist()) for row in forbidden] == [set(mask) for mask in masks]


@pytest.mark.parametrize("grammar", [None, frozenset([1, 2])])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_is_said_of_raw_logits(bad: float, grammar: frozenset[int] | None) -> None:
    params = greedy(bad_words=((1,),), frequency_penalty=1.0, logit_bias=((3, 5.0),), allowed_token_ids=(1, 2, 3))
    batch = [Row(params, text=(0, 1, 2, 3, 3), grammar=grammar)] * 3
    logits = noise(3, 8)
    good = draw(logits, batch)
    logits[1, 3] = bad
    sampled = sample(logits, batch)
    assert sampled.finite.tolist() == [True, False, True]
    assert sampled.token_ids.tolist() == [good[0], 0, good[2]]


def test_as_much_as_a_request_may_ask_for() -> None:
    vocabulary = 20_000
    allowed = tuple(range(MAX_ALLOWED_TOKEN_IDS))
    words = tuple(((word % 7,) * (word % 64) + (word,)) for word in range(MAX_BAD_WORDS))
    params = greedy(
        allowed_token_ids=allowed, bad_words=words, logit_bias=tuple((token, token / 100) for token in range(1_024))
    )
    batch = [Row(params, text=(3,) * 500), Row(greedy()), Row(params, text=(5,) * 40)]
    logits = noise(3, 2, vocabulary)
    assert draw(logits, batch) == [reference(line, row) for line, row in zip(logits, batch, strict=True)]


def test_a_greedy_step_without_any_of_this_is_the_short_way() -> None:
    slots = np.arange(3)
    plain = [Row(greedy(min_tokens=1, stop_token_ids=(1,)), text=(0,) * 6) for _ in slots]
    assert fill(plain, slots).batch(slots, np.full(3, 6, np.int32)).changes is None
    drawing = [*plain[:2], Row(SamplingParams(seed=1), text=(0,) * 6)]
    assert fill(drawing, slots).batch(slots, np.full(3, 6, np.int32)).changes is None
    asking = [*plain[:2], Row(greedy(logit_bias=((1, 1.0),)), text=(0,) * 6)]
    changes = fill(asking, slots).batch(slots, np.full(3, 6, np.int32)).changes
    assert changes is not None
    assert changes.rows.tolist() == [2]
