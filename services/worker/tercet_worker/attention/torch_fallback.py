"""Attention in plain torch, for machines without a C++ compiler and as a second opinion in tests.

Slow: a loop over requests.

Scores, softmax and sums are float32 whatever the dtype, so results differ from the kernels only by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tercet_shared.errors import ConfigurationError
from tercet_worker.attention import checks
from tercet_worker.attention.interface import AttentionBatch, AttentionPlanError, AttentionSpec, KvStorage

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Request:
    begin: int
    end: int
    context: int
    places: Tensor  # int64[context], where keys and values lie: block id * B + offset


@dataclass(frozen=True, slots=True)
class _Plan:
    tokens: int
    requests: list[_Request]
    written: Tensor  # int64[W], tokens whose key and value are written
    destinations: Tensor  # int64[W], and where


class TorchAttention:
    """Implements ``AttentionBackend`` with torch operators. Any head size and block size."""

    name = "cpu-torch"

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._storage: KvStorage | None = None
        self._cache: Tensor | None = None  # [layers, 2, N * B, Hkv, D]
        self._plan: _Plan | None = None

    def bytes_per_block(self, num_layers: int) -> int:
        """Returns the bytes of one block in all layers."""
        return self.spec.bytes_per_block(num_layers)

    def allocate_kv(self, num_layers: int, num_blocks: int) -> KvStorage:
        """Allocates the cache, zeroed."""
        spec = self.spec
        if num_layers < 1 or num_blocks < 1:
            raise ConfigurationError(f"a KV cache of {num_layers} layers and {num_blocks} blocks makes no sense")
        if spec.sliding_windows and len(spec.sliding_windows) != num_layers:
            raise ConfigurationError(f"{len(spec.sliding_windows)} sliding windows were given for {num_layers} layers")
        self._plan = None
        memory = torch.zeros(num_blocks * self.bytes_per_block(num_layers), dtype=torch.uint8)
        shape = (num_layers, 2, num_blocks * spec.block_size, spec.num_kv_heads, spec.head_size)
        self._cache = memory.view(spec.dtype).view(shape)
        self._storage = KvStorage(memory, num_layers, num_blocks, huge_pages=False, run_blocks=num_blocks, parts=2)
        return self._storage

    def plan(self, batch: AttentionBatch) -> None:
        """Validates the step and resolves its block table to places in the cache."""
        self._plan = None
        if self._storage is None:
            raise checks.no_plan_error()
        checks.check_layout(batch)
        checks.check_values(self.spec, batch, self._storage.num_blocks)
        size = self.spec.block_size
        starts = batch.query_start_loc.tolist()
        requests = []
        for row, (context, slot) in enumerate(zip(batch.seq_lens.tolist(), batch.slots.tolist(), strict=True)):
            positions = torch.arange(context)
            places = batch.block_table[slot].long()[positions // size] * size + positions % size
            requests.append(_Request(starts[row], starts[row + 1], context, places))
        written = (batch.slot_mapping >= 0).nonzero().squeeze(1)
        self._plan = _Plan(batch.num_tokens, requests, written, batch.slot_mapping[written])

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Writes K and V and attends, one request after the other."""
        plan, cache = self._plan, self._cache
        if plan is None or cache is None:
            raise checks.no_plan_error()
        if not 0 <= layer < cache.shape[0]:
            raise AttentionPlanError(f"layer {layer} was refused: LAYER", row=None)
        checks.check_tensors(self.spec, plan.tokens, q, k, v, out)
        keys, values = cache[layer]
        keys[plan.destinations] = k[plan.written]
        values[plan.destinations] = v[plan.written]
        end = 0
        for request in plan.requests:
            end = request.end
            rows = slice(request.begin, request.end)
            out[rows] = self._attend(layer, q[rows], keys[request.places], values[request.places]).to(out.dtype)
        out[end:] = 0

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends for one request: q [n, Hq, D], k and v [context, Hkv, D]; returns float32[n, Hq, D]."""
        spec = self.spec
        queries, context = q.shape[0], k.shape[0]
        group = spec.num_query_heads // spec.num_kv_heads
        grouped = q.float().view(queries, spec.num_kv_heads, group, spec.head_size)
        scores = torch.einsum("qhgd,khd->hgqk", grouped, k.float()) * spec.scale
        if spec.logit_soft_cap:
            scores = torch.tanh(scores / spec.logit_soft_cap) * spec.logit_soft_cap
        position = torch.arange(context - queries, context).unsqueeze(1)
        key = torch.arange(context)
        seen = key <= position
        window = spec.window(layer)
        if window:
            seen &= key > position - window
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        return torch.einsum("hgqk,khd->qhgd", weights, v.float()).reshape(queries, spec.num_query_heads, spec.head_size)
