"""GGUF's names for architectures and tensors, and those of Hugging Face. A family is one entry in `FAMILIES`.

Source: ``gguf.tensor_mapping`` and llama.cpp's ``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

_Scalar = TypeVar("_Scalar", bound=np.generic)

ROPE_DIVISORS = "rope_freqs.weight"
"""The tensor of RoPE frequency divisors; it has no Hugging Face name and keeps this one."""

_LLAMA_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_STORED = re.compile(r"(?:blk\.(?P<block>\d+)\.)?(?P<part>.+)\.(?P<role>weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How GGUF stores one architecture.

    Attributes:
        architecture: The class name as Hugging Face writes it.
        shared: Tensors outside the blocks, GGUF stem to Hugging Face stem.
        block: Tensors of block n, GGUF stem after ``blk.n.`` to Hugging Face stem after ``model.layers.n.``.
        rope_permuted: Stems whose rows are permuted for interleaved RoPE, see `unpermute_rope_rows`.
    """

    architecture: str
    shared: Mapping[str, str]
    block: Mapping[str, str]
    rope_permuted: frozenset[str]

    def huggingface_name(self, stored: str) -> str:
        """Returns the Hugging Face name of a tensor; a tensor that is not known keeps its name."""
        match = _STORED.fullmatch(stored)
        if match is None:
            return stored
        block, part, role = match["block"], match["part"], match["role"]
        if block is None:
            known = self.shared.get(part)
            return f"{known}.{role}" if known else stored
        known = self.block.get(part)
        return f"model.layers.{int(block)}.{known}.{role}" if known else stored

    def is_rope_permuted(self, stored: str) -> bool:
        """Says whether the rows of a tensor have to go through `unpermute_rope_rows`."""
        match = _STORED.fullmatch(stored)
        return match is not None and match["block"] is not None and match["part"] in self.rope_permuted


FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("LlamaForCausalLM", _LLAMA_GLOBAL, _LLAMA_BLOCK, frozenset({"attn_q", "attn_k"})),
}
"""By ``general.architecture``."""


def unpermute_rope_rows(rows: npt.NDArray[_Scalar], num_heads: int) -> npt.NDArray[_Scalar]:
    """Undoes GGUF's row order of Llama's query and key projections.

    llama.cpp rotates neighbouring pairs of each head, Hugging Face pairs element i with i + head_dim / 2, so the
    converter interleaves the two halves of every head. Only whole rows move: quantized rows can be passed as bytes.

    Args:
        rows: ``[num_heads * head_dim, ...]``, or a bias ``[num_heads * head_dim]``.
        num_heads: Heads in ``rows``: those of the queries, or of keys and values.

    Returns:
        A copy of the same shape in Hugging Face's order.
    """
    rest = rows.shape[1:]
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rest)
    return pairs.swapaxes(1, 2).reshape(rows.shape)
