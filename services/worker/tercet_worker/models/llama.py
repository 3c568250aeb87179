"""Llama (Touvron et al., 2023; Grattafiori et al., 2024): RMSNorm, RoPE, grouped-query attention, SwiGLU.

Reference: ``modeling_llama.py`` of Transformers.

Legend: T tokens of the step, H hidden size, I intermediate size, Hq query heads, Hkv key/value heads, D head size, V
    vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tercet_shared.errors import CheckpointError, bounded
from tercet_worker.layers.activation import silu_and_multiply
from tercet_worker.layers.embedding import Embedding, Head
from tercet_worker.layers.linear import Linear
from tercet_worker.layers.norm import RMSNorm
from tercet_worker.layers.rope import RotaryEmbedding, Rotation

if TYPE_CHECKING:
    from tercet_shared.checkpoint import ModelConfig
    from tercet_worker.layers.parameters import Destination, Placement
    from tercet_worker.models.interface import LayerAttention


class LlamaAttention:
    """Self-attention of one layer."""

    def __init__(self, config: ModelConfig, layer: int, place: Placement) -> None:
        self._layer = layer
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._head_dim = config.head_dim
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self._qkv = Linear(config.hidden_size, (query, kv, kv), bias=bias, place=place)
        self._output = Linear(query, (config.hidden_size,), bias=bias, place=place)

    def destinations(self, prefix: str) -> dict[str, Destination]:
        """Returns where the tensors under ``prefix`` go."""
        names = (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        return self._qkv.destinations(*names) | self._output.destinations(f"{prefix}.o_proj")

    def __call__(
        self, x: torch.Tensor, rope: RotaryEmbedding, rotation: Rotation, attention: LayerAttention
    ) -> torch.Tensor:
        """Returns ``[T, H]`` for ``x [T, H]``."""
        tokens = x.shape[0]
        heads = self._qkv(x).view(tokens, -1, self._head_dim)  # [T, Hq + 2 Hkv, D]
        query, key, value = torch.split(heads, self._heads, dim=1)
        rope.rotate_(heads[:, : self._heads[0] + self._heads[1]], rotation)  # queries and keys at once
        attended = torch.empty_like(query, memory_format=torch.contiguous_format)
        attention.forward(self._layer, query, key, value, attended)
        return self._output(attended.view(tokens, -1))


class LlamaLayer:
    """One decoder layer: attention and SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, place: Placement) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self._input_norm = RMSNorm(hidden, config.rms_norm_eps, place)
        self._attention = LlamaAttention(config, layer, place)
        self._post_norm = RMSNorm(hidden, config.rms_norm_eps, place)
        self._gate_up = Linear(hidden, (inner, inner), bias=bias, place=place)
        self._down = Linear(inner, (hidden,), bias=bias, place=place)

    def destinations(self, prefix: str) -> dict[str, Destination]:
        """Returns where the tensors under ``prefix`` go."""
        return (
            self._input_norm.destinations(f"{prefix}.input_layernorm")
            | self._attention.destinations(f"{prefix}.self_attn")
            | self._post_norm.destinations(f"{prefix}.post_attention_layernorm")
            | self._gate_up.destinations(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj")
            | self._down.destinations(f"{prefix}.mlp.down_proj")
        )

    def __call__(
        self, x: torch.Tensor, rope: RotaryEmbedding, rotation: Rotation, attention: LayerAttention
    ) -> torch.Tensor:
        """Returns the residual stream ``[T, H]``, float32, after this layer; ``x`` is overwritten."""
        x += self._attention(self._input_norm(x), rope, rotation, attention)
        x += self._down(silu_and_multiply(self._gate_up(self._post_norm(x))))
        return x


class LlamaForCausalLM:
    """The whole model. See `CausalLM` for its methods.

    Raises:
        CheckpointError: an activation function other than SiLU.
    """

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        if config.hidden_act != "silu":
            raise CheckpointError(
                f"The activation {bounded(config.hidden_act, 40)!r} is not supported in {config.architecture}."
            )
        self._embedding = Embedding(config.vocab_size, config.hidden_size, place)
        self._rope = RotaryEmbedding(config.rope, place.device)
        self._layers = [LlamaLayer(config, layer, place) for layer in range(config.num_layers)]
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        tied = self._embedding if config.tie_word_embeddings else None
        self._head = Head(config.vocab_size, config.hidden_size, place, tied=tied)
        self._tied = config.tie_word_embeddings

    def destinations(self) -> dict[str, Destination]:  # noqa: D102  # see CausalLM
        found = self._embedding.destinations("model.embed_tokens") | self._rope.destinations()
        for number, layer in enumerate(self._layers):
            found |= layer.destinations(f"model.layers.{number}")
        return found | self._norm.destinations("model.norm") | self._head.destinations("lm_head")

    def ignores(self, name: str) -> bool:  # noqa: D102  # see CausalLM
        # Old checkpoints carry the (derivable) rotary frequencies of every layer; tied ones may carry the head again.
        return name.endswith(".rotary_emb.inv_freq") or (self._tied and name == "lm_head.weight")

    def forward(  # noqa: D102  # see CausalLM
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: LayerAttention
    ) -> torch.Tensor:
        # The stream that all layers add to is kept in float32: bfloat16 would lose most of the small additions, and it
        # is a small part of a step's memory traffic.
        x = self._embedding(token_ids).to(torch.float32)  # [T, H]
        rotation = self._rope.rotation(positions)
        for layer in self._layers:
            x = layer(x, self._rope, rotation, attention)
        return self._norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:  # noqa: D102  # see CausalLM
        return self._head(hidden)
