"""Steps of attention for tests: random requests in a paged cache, and what they must give in float64."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tercet_worker.attention.interface import PADDING, AttentionBatch, AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from tercet_worker.attention.interface import AttentionBackend

LAYERS = 2


def make_spec(
    dtype: torch.dtype, *, q_heads: int = 6, kv_heads: int = 2, head_size: int = 64, **more: object
) -> AttentionSpec:
    return AttentionSpec(
        num_query_heads=q_heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        dtype=dtype,
        scale=head_size**-0.5,
        **{"block_size": 16, **more},
    )


@dataclass
class Sequence:
    """A request with everything it will ever be asked: q [L, n, Hq, D], k and v [L, n, Hkv, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    slot: int


class World:
    """Requests with lengths ``contexts`` in a cache that is poisoned with NaN.

    Blocks are dealt at random, or ``in_order`` as by a core that has hardly begun.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        contexts: list[int],
        *,
        seed: int = 0,
        spare_blocks: int = 3,
        layers: int = LAYERS,
        in_order: bool = False,
    ) -> None:
        self.spec = spec
        self.layers = layers
        self._expected: dict[tuple[int, tuple[int, int, int]], Tensor] = {}
        generator = torch.Generator().manual_seed(seed)
        size = spec.block_size
        needed = [math.ceil(n / size) for n in contexts]
        self.num_blocks = sum(needed) + spare_blocks
        ids = torch.randperm(self.num_blocks, generator=generator).tolist()
        if in_order:
            ids.sort(reverse=True)
        slots = torch.randperm(len(contexts) + 2, generator=generator).tolist()
        # Entries beyond a context are nonsense on purpose: they must not be read.
        self.block_table = torch.full((len(slots), max(needed) + 1), 2**30, dtype=torch.int32)
        self.sequences: list[Sequence] = []
        for n, blocks, slot in zip(contexts, needed, slots, strict=False):
            self.block_table[slot, :blocks] = torch.tensor([ids.pop() for _ in range(blocks)], dtype=torch.int32)

            def draw(heads: int, n: int = n) -> Tensor:
                x = torch.randn(layers, n, heads, spec.head_size, generator=generator)
                return (x * 1.5).to(spec.dtype)

            self.sequences.append(
                Sequence(draw(spec.num_query_heads), draw(spec.num_kv_heads), draw(spec.num_kv_heads), slot)
            )

    def attach(self, backend: AttentionBackend) -> None:
        storage = backend.allocate_kv(self.layers, self.num_blocks)
        storage.memory.view(self.spec.dtype).fill_(torch.nan)

    def places(self, index: int, begin: int, end: int) -> Tensor:
        size = self.spec.block_size
        positions = torch.arange(begin, end)
        return self.block_table[self.sequences[index].slot][positions // size].long() * size + positions % size

    def batch(self, parts: list[tuple[int, int, int]], *, padding: int = 0) -> AttentionBatch:
        """Returns the step that computes tokens [begin, end) of each (sequence, begin, end)."""
        lengths = [end - begin for _, begin, end in parts]
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        mapping = [self.places(i, begin, end) for i, begin, end in parts]
        mapping.append(torch.full((padding,), PADDING, dtype=torch.int64))
        return AttentionBatch(
            query_start_loc=starts,
            seq_lens=torch.tensor([end for _, _, end in parts], dtype=torch.int32),
            slots=torch.tensor([self.sequences[i].slot for i, _, _ in parts], dtype=torch.int32),
            block_table=self.block_table,
            slot_mapping=torch.cat(mapping),
            max_query_len=max(lengths),
            num_tokens=sum(lengths) + padding,
        )

    def step(
        self, backend: AttentionBackend, parts: list[tuple[int, int, int]], *, padding: int = 0
    ) -> list[list[Tensor]]:
        """Runs one step; returns the outputs [n, Hq, D] per layer and part. The output is poisoned before."""
        batch = self.batch(parts, padding=padding)
        backend.plan(batch)
        results = []
        for layer in range(self.layers):
            q, k, v = (self._rows(parts, layer, name, padding) for name in ("q", "k", "v"))
            out = torch.full_like(q, torch.nan)
            backend.forward(layer, q, k, v, out)
            if padding:
                assert torch.equal(out[-padding:], torch.zeros_like(out[-padding:]))
            results.append(list(out[: batch.num_tokens - padding].split([end - begin for _, begin, end in parts])))
        return results

    def _rows(self, parts: list[tuple[int, int, int]], layer: int, name: str, padding: int) -> Tensor:
        rows = [getattr(self.sequences[i], name)[layer, begin:end] for i, begin, end in parts]
        return torch.cat([*rows, torch.full((padding, *rows[0].shape[1:]), torch.nan, dtype=self.spec.dtype)])

    def expected(self, layer: int, part: tuple[int, int, int]) -> Tensor:
        """Returns float64[n, Hq, D]; computed once."""
        if (layer, part) not in self._expected:
            self._expected[layer, part] = self._compute(layer, part)
        return self._expected[layer, part]

    def _compute(self, layer: int, part: tuple[int, int, int]) -> Tensor:
        index, begin, end = part
        spec, sequence = self.spec, self.sequences[index]
        group = spec.num_query_heads // spec.num_kv_heads
        q = sequence.q[layer, begin:end].double()
        k, v = (x[layer, :end].double().repeat_interleave(group, dim=1) for x in (sequence.k, sequence.v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        if spec.logit_soft_cap:
            scores = torch.tanh(scores / spec.logit_soft_cap) * spec.logit_soft_cap
        position, key = torch.arange(begin, end).unsqueeze(1), torch.arange(end)
        hidden = key > position
        if spec.window(layer):
            hidden |= key <= position - spec.window(layer)
        return torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(hidden, -torch.inf), -1), v)


@functools.lru_cache(maxsize=32)
def shared_world(spec: AttentionSpec, contexts: tuple[int, ...], *, seed: int = 0, layers: int = LAYERS) -> World:
    """Returns a world that tests of several backends share, with what it expects. Not to be changed."""
    return World(spec, list(contexts), seed=seed, layers=layers)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Float32: 2e-5 of the values' scale. bfloat16: the rounding of the output and of the probabilities."""
    assert torch.isfinite(got).all()
    tolerance = 2e-5 if got.dtype == torch.float32 else 2**-7
    error = (got.double() - expected).abs()
    limit = tolerance * (1 + expected.abs())
    assert (error <= limit).all(), f"off by {error.max().item():.3g}, allowed {limit.min().item():.3g}"
