"""The sampler, by torch and with the kernels, against a plain reference: one row, one token at a time, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_shared.sampling_params import SamplingParams
from tercet_worker.kernels.library import Isa, KernelLibrary
from tercet_worker.kernels.logits import LogitDraw, LogitScan
from tercet_worker.sampling import SamplerParts
from tests.unit.worker.sampling_cases import Row, draw, reference, sample

ROWS = st.builds(
    Row,
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        top_k=st.sampled_from([0, 0, 1, 3, 40, 500]),
        top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.999]),
        min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
        seed=st.integers(0, 2**64 - 1),
        max_tokens=st.just(100),
        min_tokens=st.sampled_from([0, 5, 6]),
        stop_token_ids=st.sampled_from([(), (3,), (0, 7, 299)]),
        eos_token_ids=st.sampled_from([(), (11, 12)]),
    ),
    position=st.integers(4, 12),
)


@pytest.fixture(scope="module", params=[None, *Isa], ids=lambda isa: "torch" if isa is None else isa.name)
def parts(request: pytest.FixtureRequest, library: KernelLibrary) -> SamplerParts:
    isa: Isa | None = request.param
    if isa is None:
        return SamplerParts()
    if isa not in library.isas():
        pytest.skip(f"this machine has no {isa.name}")
    draw = LogitDraw(library, threads=2, isa=isa)
    return SamplerParts(scan=LogitScan(library, threads=2, isa=isa), draw=draw, truncated=draw)


@settings(deadline=None, max_examples=150)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    first_candidates=st.sampled_from([None, 4]),
)
def test_draws_are_those_of_the_reference(
    rows: list[Row], seed: int, first_candidates: int | None, parts: SamplerParts
) -> None:
    logits = (np.random.default_rng(seed).standard_normal((len(rows), 300)) * 3).astype(np.float32)
    expected = [reference(line, row) for line, row in zip(logits, rows, strict=True)]
    assert draw(logits, rows, first_candidates=first_candidates, parts=parts) == expected


@settings(deadline=None, max_examples=50)
@given(rows=st.lists(ROWS, min_size=2, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_a_row_draws_the_same_alone_and_in_a_batch(rows: list[Row], seed: int, parts: SamplerParts) -> None:
    logits = (np.random.default_rng(seed).standard_normal((len(rows), 300)) * 3).astype(np.float32)
    alone = [draw(logits[index : index + 1], [row], parts=parts)[0] for index, row in enumerate(rows)]
    assert draw(logits, rows, parts=parts) == alone


@pytest.mark.parametrize("row", [Row(SamplingParams(temperature=0)), Row(SamplingParams(top_k=1, seed=5))])
def test_equal_logits_give_the_lowest_id(row: Row, parts: SamplerParts) -> None:
    logits = np.full((3, 5_000), -2, np.float32)
    logits[0, [4_999, 17, 2_500]] = 4
    logits[1, [31, 30, 29]] = 0.5
    assert draw(logits, [row] * 3, parts=parts) == [17, 29, 0]


def test_equal_logits_at_the_border_of_top_k_keep_the_lowest_ids(parts: SamplerParts) -> None:
    logits = np.zeros((200, 50), np.float32)
    rows = [Row(SamplingParams(top_k=3, seed=seed)) for seed in range(200)]
    assert set(draw(logits, rows, parts=parts)) == {0, 1, 2}


def test_top_p_of_one_and_a_large_top_k_keep_everything(parts: SamplerParts) -> None:
    logits = np.zeros((600, 8), np.float32)
    plain = [Row(SamplingParams(seed=seed)) for seed in range(600)]
    all_of_k = [Row(SamplingParams(seed=seed, top_k=8)) for seed in range(600)]
    assert draw(logits, plain, parts=parts) == draw(logits, all_of_k, parts=parts)
    assert set(draw(logits, plain, parts=parts)) == set(range(8))


def test_frequencies_follow_the_probabilities(parts: SamplerParts) -> None:
    count = 20_000
    logits = np.tile(np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32)), (count, 1))
    rows = [Row(SamplingParams(seed=9), position=position) for position in range(count)]
    seen = np.bincount(draw(logits, rows, parts=parts), minlength=4) / count
    np.testing.assert_allclose(seen, [0.5, 0.3, 0.15, 0.05], atol=0.012)  # over three standard deviations
    rows = [Row(SamplingParams(seed=9, top_p=0.75), position=position) for position in range(count)]
    seen = np.bincount(draw(logits, rows, parts=parts), minlength=4) / count
    np.testing.assert_allclose(seen, [0.625, 0.375, 0, 0], atol=0.012)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 100.0])
def test_extreme_temperatures(temperature: float, parts: SamplerParts) -> None:
    logits = np.array([[-80.0, 90.0, 20.0, 89.0]], np.float32)
    token = draw(logits, [Row(SamplingParams(temperature=temperature, seed=1))], parts=parts)[0]
    assert token == 1 or temperature == 100.0


def test_stop_ids_are_masked_until_min_tokens_are_out(parts: SamplerParts) -> None:
    logits = np.array([[0.0, 9.0, 8.0, 1.0]], np.float32)
    params = SamplingParams(temperature=0, min_tokens=3, max_tokens=9, stop_token_ids=(1,), eos_token_ids=(2,))
    # The prompt has 4 tokens: positions 4, 5 and 6 are the first three of the output.
    drawn = [draw(logits, [Row(params, position=position)], parts=parts)[0] for position in (4, 6, 7)]
    assert drawn == [3, 3, 1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(seed=3), SamplingParams(top_p=0.9)])
def test_a_row_that_is_not_finite_is_told_apart_and_harms_no_other(
    bad: float, params: SamplingParams, parts: SamplerParts
) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 400)).astype(np.float32)
    good = draw(logits, [Row(params)] * 3, parts=parts)
    logits[1, 77] = bad
    sampled = sample(logits, [Row(params)] * 3, parts=parts)
    assert sampled.finite.tolist() == [True, False, True]
    assert sampled.token_ids.tolist() == [good[0], 0, good[2]]


def test_a_masked_row_is_finite(parts: SamplerParts) -> None:
    logits = np.zeros((1, 4), np.float32)
    params = SamplingParams(temperature=0, min_tokens=9, max_tokens=9, eos_token_ids=(0, 1))
    sampled = sample(logits, [Row(params)], parts=parts)
    assert sampled.finite.tolist() == [True]
    assert sampled.token_ids.tolist() == [2]


def test_rows_beyond_one_piece(parts: SamplerParts) -> None:
    vocabulary = 50_000
    logits = np.random.default_rng(1).standard_normal((90, vocabulary)).astype(np.float32)
    rows = [Row(SamplingParams(seed=seed, top_p=0.9 if seed % 2 else 1.0)) for seed in range(90)]
    drawn = draw(logits, rows, parts=parts)
    for index in (0, 1, 44, 88, 89):
        assert drawn[index] == reference(logits[index], rows[index])
