"""Llama (Touvron et al., 2023; Grattafiori et al., 2024): RMSNorm, RoPE, grouped-query attention, SwiGLU.

Reference: ``modeling_llama.py`` of Transformers.

Legend: T tokens of the step, H hidden size, I intermediate size, Hq query heads, Hkv key/value heads, D head size, V
    vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tercet_shared.errors import CheckpointError, bounded
from tercet_worker.layers.embedding import Embedding, Head
from tercet_worker.layers.linear import Linear
from tercet_worker.layers.norm import RMSNorm
from tercet_worker.layers.rope import RotaryEmbedding
from tercet_worker.models.ops import HeadOps, HeadShape, Ops

if TYPE_CHECKING:
    from tercet_shared.checkpoint import ModelConfig
    from tercet_worker.layers.parameters import Destination, Placement

V = TypeVar("V")


class LlamaLayer:
    """One decoder layer: attention and SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, rope: RotaryEmbedding, place: Placement) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._layer = layer
        self._rope = rope
        self._heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self._input_norm = RMSNorm(hidden, config.rms_norm_eps, place)
        self._qkv = Linear(hidden, (query, kv, kv), bias=config.attention_bias, place=place)
        self._output = Linear(query, (hidden,), bias=config.attention_bias, place=place)
        self._post_norm = RMSNorm(hidden, config.rms_norm_eps, place)
        self._gate_up = Linear(hidden, (inner, inner), bias=config.mlp_bias, place=place, gated=True)
        self._down = Linear(inner, (hidden,), bias=config.mlp_bias, place=place)

    def destinations(self, prefix: str) -> dict[str, Destination]:
        """Returns where the tensors under ``prefix`` go."""
        heads = (f"{prefix}.self_attn.{name}_proj" for name in "qkv")
        return (
            self._input_norm.destinations(f"{prefix}.input_layernorm")
            | self._qkv.destinations(*heads)
            | self._output.destinations(f"{prefix}.self_attn.o_proj")
            | self._post_norm.destinations(f"{prefix}.post_attention_layernorm")
            | self._gate_up.destinations(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj")
            | self._down.destinations(f"{prefix}.mlp.down_proj")
        )

    def __call__(self, ops: Ops[V], x: V) -> V:
        """Returns the residual stream ``[T, H]`` after this layer; ``x`` is gone."""
        qkv = ops.linear(ops.norm(x, self._input_norm), self._qkv)
        x = ops.add_linear(x, ops.attention(self._layer, qkv, self._heads, self._rope), self._output)
        return ops.add_linear(x, ops.gated_silu(ops.norm(x, self._post_norm), self._gate_up), self._down)


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
        self._rope = RotaryEmbedding(config.rope, place.device)
        self._layers = [LlamaLayer(config, layer, self._rope, place) for layer in range(config.num_layers)]
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self._embedding = Embedding(config.vocab_size, config.hidden_size, place)
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

    def hidden(self, ops: Ops[V]) -> V:  # noqa: D102  # see CausalLM
        x = ops.embed(self._embedding)
        for layer in self._layers:
            x = layer(ops, x)
        return ops.norm(x, self._norm)

    def logits(self, ops: HeadOps[V], hidden: V) -> V:  # noqa: D102  # see CausalLM
        return ops.head(hidden, self._head)
