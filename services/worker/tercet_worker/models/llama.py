"""Llama (Touvron et al., 2023; Grattafiori et al., 2024): RMSNorm, RoPE, grouped-query attention, SwiGLU.

Reference: ``modeling_llama.py`` of Transformers.

Legend: T tokens of the step, H hidden size, I intermediate size, Hq query heads, Hkv key/value heads, D head size, V
    vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tercet_shared.errors import CheckpointError, InternalError, bounded
from tercet_worker.layers.embedding import Embedding, Head
from tercet_worker.layers.linear import Linear
from tercet_worker.layers.norm import RMSNorm
from tercet_worker.layers.rope import RotaryEmbedding
from tercet_worker.models.ops import HeadOps, HeadShape, Ops

if TYPE_CHECKING:
    from tercet_shared.checkpoint import ModelConfig
    from tercet_worker.layers.parameters import Destination, Placement
    from tercet_worker.parallel.topology import Share

V = TypeVar("V")


class LlamaLayer:
    """One decoder layer: attention and SwiGLU, each behind a norm and added to the residual stream.

    Args:
        config: of the whole model.
        layer: 0 for the first one that this rank holds.
        share: what this rank holds.
        rope: the rotation.
        place: where the tensors are made.
    """

    def __init__(self, config: ModelConfig, layer: int, share: Share, rope: RotaryEmbedding, place: Placement) -> None:
        hidden, inner = config.hidden_size, share.inner
        query, kv = share.query_heads.times(config.head_dim), share.kv_heads.times(config.head_dim)
        self._layer = layer
        self._rope = rope
        self._heads = HeadShape(len(share.query_heads), len(share.kv_heads), config.head_dim)
        self._input_norm = RMSNorm(hidden, config.rms_norm_eps, place)
        self._qkv = Linear(hidden, (query, kv, kv), bias=config.attention_bias, place=place)
        self._output = Linear(query, (hidden,), bias=config.attention_bias and share.leads, place=place)
        self._post_norm = RMSNorm(hidden, config.rms_norm_eps, place)
        self._gate_up = Linear(hidden, (inner, inner), bias=config.mlp_bias, place=place, gated=True)
        self._down = Linear(inner, (hidden,), bias=config.mlp_bias and share.leads, place=place)

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
    """The whole model, or the share of it that one rank holds. See `CausalLM` for its methods.

    Raises:
        CheckpointError: an activation function other than SiLU.
    """

    def __init__(self, config: ModelConfig, place: Placement, share: Share) -> None:
        if config.hidden_act != "silu":
            raise CheckpointError(
                f"The activation {bounded(config.hidden_act, 40)!r} is not supported in {config.architecture}."
            )
        self._share = share
        self._hidden_size = config.hidden_size
        self._tied = config.tie_word_embeddings
        self._rope = RotaryEmbedding(config.rope, place.device)
        self._layers = [LlamaLayer(config, layer, share, self._rope, place) for layer in range(len(share.layers))]
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place) if share.last else None
        # A tied matrix is held by the first stage and by the last.
        embeds = share.first or (self._tied and share.last)
        self._embedding = Embedding(share.vocab, config.hidden_size, place) if embeds else None
        tied = self._embedding if self._tied else None
        self._head = Head(share.vocab, config.hidden_size, place, tied=tied) if share.last else None

    def destinations(self) -> dict[str, Destination]:  # noqa: D102  # see CausalLM
        found = self._rope.destinations()
        if self._embedding is not None:
            found |= self._embedding.destinations("model.embed_tokens")
        for number, layer in zip(self._share.layers, self._layers, strict=True):
            found |= layer.destinations(f"model.layers.{number}")
        if self._norm is not None:
            found |= self._norm.destinations("model.norm")
        return found if self._head is None else found | self._head.destinations("lm_head")

    def ignores(self, name: str) -> bool:  # noqa: D102  # see CausalLM
        # Old checkpoints carry the (derivable) rotary frequencies of every layer; tied ones may carry the head again.
        return name.endswith(".rotary_emb.inv_freq") or (self._tied and name == "lm_head.weight")

    def hidden(self, ops: Ops[V]) -> V:  # noqa: D102  # see CausalLM
        if self._share.first and self._embedding is not None:
            x = ops.embed(self._embedding)
        else:
            x = ops.receive(self._hidden_size)
        for layer in self._layers:
            x = layer(ops, x)
        return ops.send(x) if self._norm is None else ops.norm(x, self._norm)

    def logits(self, ops: HeadOps[V], hidden: V) -> V:  # noqa: D102  # see CausalLM
        if self._head is None:
            raise InternalError("logits were asked of a stage that has no output head")
        return ops.head(hidden, self._head)
