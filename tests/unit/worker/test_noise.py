"""The random numbers of sampling: the documented integers, in any batch, strictly inside (0, 1)."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tercet_worker.sampling import noise

_MASK = 2**32 - 1


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def _word(seed: int, position: int, token: int) -> int:
    """The docstring of `noise` in Python integers."""
    a = _mix(_mix(seed & _MASK) ^ position)
    b = _mix((_mix((seed >> 32) ^ 0x85A308D3) + position * 0x9E3779B9) & _MASK)
    return _mix(_mix(token ^ a) ^ b)


def _keys(seeds: list[int], positions: list[int]) -> noise.RowKeys:
    halves = torch.from_numpy(np.array(seeds, np.uint64).view(np.int32).reshape(-1, 2).copy())
    return noise.RowKeys.of(halves[:, 0], halves[:, 1], torch.tensor(positions, dtype=torch.int32))


def test_known_answers() -> None:
    keys = _keys([0, 0x0123456789ABCDEF], [0, 7])
    words = noise.words(keys, torch.tensor([0, 49151], dtype=torch.int32)).numpy().view(np.uint32)
    assert words[0, 0] == 0x42F99747
    assert words[1, 1] == 0x51B28DC6


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=4),
    st.lists(st.integers(0, 2**24), min_size=1, max_size=40),
)
def test_words_are_those_of_the_docstring(rows: list[tuple[int, int]], tokens: list[int]) -> None:
    keys = _keys([seed for seed, _ in rows], [position for _, position in rows])
    words = noise.words(keys, torch.tensor(tokens, dtype=torch.int32)).numpy().view(np.uint32)
    assert words.tolist() == [[_word(seed, position, token) for token in tokens] for seed, position in rows]


def test_keys_leave_their_arguments_alone() -> None:
    low, high, at = (torch.arange(3, dtype=torch.int32) for _ in range(3))
    noise.RowKeys.of(low, high, at)
    assert low.tolist() == high.tolist() == at.tolist() == [0, 1, 2]


def test_uniform_stays_strictly_inside_and_is_spread_evenly() -> None:
    drawn = noise.uniform(_keys([1, 2**63], [5, 6]), torch.arange(200_000, dtype=torch.int32))
    assert float(drawn.min()) > 0
    assert float(drawn.max()) < 1
    counts = torch.histc(drawn, bins=64, min=0, max=1)
    expected = 400_000 / 64
    # Chi-square with 63 degrees of freedom: above 120 has a probability of one in a hundred thousand.
    assert float(((counts - expected) ** 2 / expected).sum()) < 120


def test_extreme_words_give_finite_noise() -> None:
    for word in (0, -1, 2**31 - 1, -(2**31)):
        bits = torch.tensor([[word]], dtype=torch.int32)
        u = ((bits >> 9) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
        assert 0 < float(u) < 1
        assert torch.isfinite(-torch.log(-torch.log(u))).all()


def test_neighbouring_seeds_positions_and_ids_are_unrelated() -> None:
    ids = torch.arange(50_000, dtype=torch.int32)
    base, seed, high, position = noise.uniform(_keys([8, 9, 8 + 2**32, 8], [3, 3, 3, 4]), ids).to(torch.float64)
    for other in (seed, high, position, torch.roll(base, 1)):
        correlation = torch.corrcoef(torch.stack([base, other]))[0, 1]
        assert abs(float(correlation)) < 0.025  # five standard deviations
