"""Executes a model's operations with torch, one after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # the customary name

from tercet_worker.parallel.communicator import ALONE

if TYPE_CHECKING:
    from tercet_worker.layers.embedding import Embedding, Head
    from tercet_worker.layers.linear import Linear
    from tercet_worker.layers.norm import RMSNorm
    from tercet_worker.layers.rope import RotaryEmbedding, Rotation
    from tercet_worker.models.interface import CausalLM, LayerAttention
    from tercet_worker.models.ops import HeadShape
    from tercet_worker.parallel.communicator import Communicator


class EagerModel:
    """A model whose weights are dense; implements ``StepModel``.

    Args:
        model: with its weights.
        communicator: to the other ranks that hold the rest of it.
    """

    def __init__(self, model: CausalLM, communicator: Communicator = ALONE) -> None:
        self._model = model
        self._communicator = communicator

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: LayerAttention) -> torch.Tensor:
        """See ``StepModel``."""
        return self._model.hidden(TorchOps(token_ids, positions, attention, self._communicator))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``StepModel``."""
        return self._model.logits(TorchHeadOps(self._communicator), hidden)


class TorchHeadOps:
    """Implements ``HeadOps`` over tensors."""

    def __init__(self, communicator: Communicator = ALONE) -> None:
        self._communicator = communicator

    def head(self, hidden: torch.Tensor, head: Head) -> torch.Tensor:
        """See ``HeadOps``."""
        logits = head(hidden)
        return self._communicator.gather_logits(logits, head.vocab) if head.partial else logits


class TorchOps:
    """Implements ``Ops`` over tensors, for one step.

    Args:
        token_ids: ``[T]``, int32 or int64.
        positions: int64 ``[T]``.
        attention: with the plan of the step.
        communicator: to the other ranks that compute the model.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: LayerAttention,
        communicator: Communicator = ALONE,
    ) -> None:
        self._communicator = communicator
        self._token_ids = token_ids
        self._positions = positions
        self._attention = attention
        self._rotations: dict[int, Rotation] = {}

    def embed(self, embedding: Embedding) -> torch.Tensor:
        """See ``Ops``."""
        stream = embedding(self._token_ids).to(torch.float32)
        if embedding.partial:
            self._communicator.all_reduce_(stream)
        return stream

    def receive(self, hidden_size: int) -> torch.Tensor:
        """See ``Ops``."""
        stream = torch.empty((len(self._token_ids), hidden_size), device=self._positions.device)
        self._communicator.receive_stream(stream)
        return stream

    def send(self, stream: torch.Tensor) -> torch.Tensor:
        """See ``Ops``."""
        self._communicator.send_stream(stream)
        return stream

    def norm(self, stream: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """See ``Ops``."""
        return norm(stream)

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """See ``Ops``."""
        return linear(x)

    def gated_silu(self, x: torch.Tensor, gate_up: Linear) -> torch.Tensor:
        """See ``Ops``."""
        gate, up = gate_up(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def add_linear(self, stream: torch.Tensor, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """See ``Ops``."""
        if not linear.partial:
            stream += linear(x)
            return stream
        # The sum takes no memory of its own: one rank adds its part to the stream, the others put theirs in its place.
        if self._communicator.topology.tp_rank == 0:
            stream += linear(x)
        else:
            stream.copy_(linear(x))
        self._communicator.all_reduce_(stream)
        return stream

    def attention(self, layer: int, qkv: torch.Tensor, heads: HeadShape, rope: RotaryEmbedding) -> torch.Tensor:
        """See ``Ops``."""
        rotation = self._rotations.get(id(rope))
        if rotation is None:
            rotation = self._rotations[id(rope)] = rope.rotation(self._positions)
        tokens = qkv.shape[0]
        each = qkv.view(tokens, -1, heads.size)  # [T, Hq + 2 Hkv, D]
        rope.rotate_(each[:, : heads.query + heads.kv], rotation)  # queries and keys at once
        query, key, value = torch.split(each, [heads.query, heads.kv, heads.kv], dim=1)
        attended = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._attention.forward(layer, query, key, value, attended)
        return attended.view(tokens, -1)
