"""Drawing and penalties on the device, against the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tercet_worker.sampling.changes import Penalties
from tercet_worker.sampling.noise import RowKeys, gumbel
from tercet_worker.sampling.sampler import best_of

pytest.importorskip("triton", reason="the kernels are checked with Triton's interpreter")

from tercet_worker.cuda.kernels.sampling import draw_, penalize_, scan


def keys_of(rows: int, seed: int) -> RowKeys:
    words = torch.from_numpy(np.random.default_rng(seed).integers(-(2**31), 2**31, (3, rows), dtype=np.int32))
    return RowKeys.of(words[0], words[1], words[2])


@pytest.mark.parametrize("vocab", [7, 384, 4096, 4097, 9000])
def test_a_draw_takes_the_same_token_as_on_the_cpu(vocab: int) -> None:
    rows, generator = 24, torch.Generator().manual_seed(vocab)
    logits = torch.randn((rows, vocab), generator=generator) * 2
    highest = logits.max(dim=1).values
    temperature = torch.rand(rows, generator=generator) * 2 + 0.05
    log_min_p = torch.where(torch.rand(rows, generator=generator) < 0.5, -1.0, -torch.inf)
    keys = keys_of(rows, vocab)
    drawing = torch.arange(0, rows, 2)
    tokens = torch.full((rows,), -1)
    draw_(logits, highest, temperature, log_min_p, keys, drawing, tokens)
    scaled = (logits - highest.unsqueeze(1)) / temperature.unsqueeze(1)
    scaled = scaled.masked_fill(scaled < log_min_p.unsqueeze(1), -torch.inf)
    expected = (scaled + gumbel(keys, torch.arange(vocab, dtype=torch.int32))).argmax(dim=1)
    assert tokens[drawing].tolist() == expected[drawing].tolist()
    assert tokens[1::2].tolist() == [-1] * (rows // 2)


def test_noise_has_the_same_bits() -> None:
    """With all logits equal the draw is the argmax of the noise alone: 64 rows must agree on all of it."""
    rows, vocab = 64, 1000
    keys = keys_of(rows, 5)
    tokens = torch.empty(rows, dtype=torch.int64)
    ones = torch.ones(rows)
    draw_(torch.zeros((rows, vocab)), torch.zeros(rows), ones, -ones / 0, keys, torch.arange(rows), tokens)
    assert tokens.tolist() == gumbel(keys, torch.arange(vocab, dtype=torch.int32)).argmax(dim=1).tolist()


@pytest.mark.parametrize("vocab", [1, 5, 4096, 8200])
def test_the_scan_finds_the_best_the_lowest_of_equals_and_what_is_not_finite(vocab: int) -> None:
    logits = torch.randint(-3, 4, (8, vocab), generator=torch.Generator().manual_seed(vocab)).to(torch.float32)
    logits[5, vocab // 2], logits[6, vocab - 1], logits[7, 0] = torch.nan, torch.inf, -torch.inf
    highest, tokens, finite = scan(logits)
    expected = best_of(logits)
    assert finite.tolist() == expected[2].tolist() == [True] * 5 + [False] * 3
    assert highest[:5].tolist() == expected[0][:5].tolist()
    assert tokens[:5].tolist() == expected[1][:5].tolist()
    assert tokens.min() >= 0
    assert tokens.max() < vocab


@pytest.mark.parametrize("pairs", [1, 5, 700])
def test_penalties(pairs: int) -> None:
    rng = np.random.default_rng(pairs)
    asking, vocab = 5, 300
    owner = np.sort(rng.integers(0, asking, pairs))
    columns = {
        "rows": torch.tensor([6, 1, 0, 3, 4]),
        "owner": torch.from_numpy(owner),
        "tokens": torch.from_numpy(rng.integers(0, 40, pairs)),
        "output": torch.from_numpy((rng.random(pairs) < 0.6).astype(np.float32)),
        "repetition": torch.tensor([1.0, 1.3, 0.7, 2.0, 1.1]),
        "frequency": torch.tensor([0.5, 0.0, -0.25, 1.0, 0.1]),
        "presence": torch.tensor([0.0, 0.7, 0.3, -1.0, 0.2]),
    }
    logits = torch.from_numpy(rng.standard_normal((8, vocab)).astype(np.float32))
    expected, counts = logits.clone(), torch.zeros((asking, vocab))
    offsets = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=asking))))
    Penalties(offsets=offsets, **columns).apply_(expected, torch.zeros((asking, vocab)))
    penalize_(logits, counts, **columns)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    assert not counts.any()
