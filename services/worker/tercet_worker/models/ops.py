"""The operations that models are written in.

A model says once which operations make up its step. ``eager.py`` executes them with torch as they come; ``program/``
records them and executes the record in one call.

Legend: T tokens of the step, H hidden size, R rows that need logits, V vocabulary, Hq query heads, Hkv key/value heads,
D head size.

Several ranks may compute one model. Then embedding and head hold some rows of the vocabulary, ``linear`` and
``gated_silu`` compute some of the columns, and what ``add_linear`` adds is the sum over all ranks of the stage: the
operations see to that, and a model is written as if it were alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from tercet_worker.layers.embedding import Embedding, Head
    from tercet_worker.layers.linear import Linear
    from tercet_worker.layers.norm import RMSNorm
    from tercet_worker.layers.rope import RotaryEmbedding

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of one attention layer."""

    query: int  # Hq
    kv: int  # Hkv
    size: int  # D


class HeadOps(Protocol[V]):
    """The operations after the hidden states, over the rows that sample."""

    def head(self, hidden: V, head: Head) -> V:
        """Returns float32 logits ``[R, V]`` for hidden states ``[R, H]``."""
        ...


class Ops(Protocol[V]):
    """Operations over values ``V``: activations of the step, one row per token.

    The residual stream is float32: bfloat16 would lose most of the small additions, and it is a small part of a step's
    memory traffic. All other values are in the dtype of the model.
    """

    def embed(self, embedding: Embedding) -> V:
        """Returns a residual stream ``[T, H]``: the embedding rows of the step's tokens."""
        ...

    def receive(self, hidden_size: int) -> V:
        """Returns the residual stream ``[T, H]`` of the stage before."""
        ...

    def send(self, stream: V) -> V:
        """Hands the residual stream ``[T, H]`` to the next stage, and returns it."""
        ...

    def norm(self, stream: V, norm: RMSNorm) -> V:
        """Returns ``[T, H]``, normalized."""
        ...

    def linear(self, x: V, linear: Linear) -> V:
        """Returns ``x Wᵀ + b``."""
        ...

    def gated_silu(self, x: V, gate_up: Linear) -> V:
        """Returns ``silu(gate) · up`` (SwiGLU, Shazeer 2020) of a gated linear layer's two parts."""
        ...

    def add_linear(self, stream: V, x: V, linear: Linear) -> V:
        """Returns ``stream + x Wᵀ + b``; ``stream`` is gone."""
        ...

    def attention(self, layer: int, qkv: V, heads: HeadShape, rope: RotaryEmbedding) -> V:
        """Rotates queries and keys, writes keys and values to the cache of ``layer``, and attends.

        Args:
            layer: 0-based.
            qkv: ``[T, (Hq + 2 Hkv) · D]``, queries, keys, values; gone afterwards.
            heads: of the layer.
            rope: the rotation.

        Returns:
            ``[T, Hq · D]``.
        """
        ...
