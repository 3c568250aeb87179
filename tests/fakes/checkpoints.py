"""Tiny random Llama checkpoints, written without torch and Transformers, so that tests have a model in milliseconds.

The weights are scaled so that logits spread (standard deviation about 3) and greedy output varies: the final norm has
weights of both signs, else a tied model would repeat its last token.
"""

from __future__ import annotations

import functools
import json
import struct
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

BOS, EOS = "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", BOS, EOS)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_SENTENCES = (
    "The capital of France is Paris, and the river that runs through it is the Seine.",
    "A tercet is a stanza of three lines; the lines of this one stand on their own.",
    "def add(a, b):\n    return a + b  # 1 2 3 4 5 6 7 8 9 0\n",
    "Der Zug fährt um zwölf Uhr ab. ¿Dónde está la biblioteca? Où est la gare?",
)

_SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

Arrays = dict[str, "npt.NDArray[np.float32]"]


@functools.lru_cache(maxsize=8)
def _tokenizer_json(vocab: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return str(tokenizer.to_str())


def tiny_weights(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    intermediate: int,
    tied: bool,
    biases: bool,
    seed: int,
) -> Arrays:
    """Returns the tensors of a Llama by Hugging Face name, float32."""
    rng = np.random.default_rng(seed)
    head_dim = hidden // heads

    def normal(shape: tuple[int, ...], std: float) -> npt.NDArray[np.float32]:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    weights: Arrays = {"model.embed_tokens.weight": normal((vocab, hidden), 1.0)}
    sizes = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in sizes.items():
            weights[f"{prefix}{name}.weight"] = normal((rows, columns), 1.5 / columns**0.5)
            if biases:
                weights[f"{prefix}{name}.bias"] = normal((rows,), 0.3)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = 1 + normal((hidden,), 0.1)
    weights["model.norm.weight"] = normal((hidden,), 3 / hidden**0.5)
    if not tied:
        weights["lm_head.weight"] = normal((vocab, hidden), 1.0)
    return weights


def write_tiny_llama(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 384,
    intermediate: int | None = None,
    tied: bool = True,
    biases: bool = False,
    shards: int = 1,
    dtype: str = "float32",
    seed: int = 0,
    rope_scaling: dict[str, Any] | None = None,
    rope_theta: float = 10_000.0,
    max_len: int = 2048,
    chat_template: str | None = CHAT_TEMPLATE,
    generation_config: dict[str, Any] | None = None,
) -> Path:
    """Writes a Hugging Face checkpoint (config, safetensors, tokenizer, chat template) and returns its directory.

    Args:
        path: The directory; made if need be.
        vocab: At least 260: 256 bytes and three special tokens (end of text 0, BOS 1, EOS 2); the rest are merges.
        rope_scaling: As in Transformers, e.g. ``{"rope_type": "llama3", "factor": 8.0, …}``.
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        shards: Number of safetensors files; more than one get an index.
    """
    path.mkdir(parents=True, exist_ok=True)
    intermediate = intermediate or 2 * hidden
    weights = tiny_weights(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        intermediate=intermediate,
        tied=tied,
        biases=biases,
        seed=seed,
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", **(rope_scaling or {}), "rope_theta": rope_theta},
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "attention_bias": biases,
        "mlp_bias": biases,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": dtype,
    }
    _write_json(path / "config.json", config)
    _write_shards(path, weights, shards, dtype)
    (path / "tokenizer.json").write_text(_tokenizer_json(vocab), encoding="utf-8")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": SPECIAL_TOKENS[0],
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_len,
    }
    _write_json(
        path / "tokenizer_config.json", tokenizer_config | ({"chat_template": chat_template} if chat_template else {})
    )
    if generation_config is not None:
        _write_json(path / "generation_config.json", generation_config)
    return path


def write_tiny_llama_gguf(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 384,
    tied: bool = True,
    biases: bool = False,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    seed: int = 0,
    rope_divisors: npt.NDArray[np.float32] | None = None,
    max_len: int = 2048,
    pre_tokenizer: str = "gpt-2",
    architecture: str = "llama",
    adds_bos: bool | None = False,
) -> Path:
    """Writes the same model as `write_tiny_llama` with the same seed as one GGUF file and returns its path."""
    weights = tiny_weights(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        intermediate=2 * hidden,
        tied=tied,
        biases=biases,
        seed=seed,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(max_len)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(vocab)
    _add_gguf_tokenizer(writer, vocab, pre_tokenizer)
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)
    for name, array in weights.items():
        stored = _gguf_name(name)
        count = {"attn_q": heads, "attn_k": kv_heads}.get(stored.split(".")[-2])
        rows = _permute_rope_rows(array, count) if count else array
        kind = quantization if rows.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quantize(rows, kind), raw_dtype=kind)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_gguf_tokenizer(writer: gguf.GGUFWriter, vocab: int, pre_tokenizer: str) -> None:
    stated = json.loads(_tokenizer_json(vocab))["model"]
    tokens = sorted(stated["vocab"], key=stated["vocab"].__getitem__)
    tokens += [f"[PAD{index}]" for index in range(len(tokens), vocab)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stated["merges"]]
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_name(name: str) -> str:
    stems = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    stem, role = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{stems[inner]}.{role}"
    return f"{stems[stem]}.{role}"


def _permute_rope_rows(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    # What llama.cpp's converter does: the two halves of each head become its even and odd rows.
    half = rows.shape[0] // heads // 2
    return np.stack(
        [rows.reshape(heads, 2, half, -1)[:, part] for part in range(2)],
        axis=2,
    ).reshape(rows.shape)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _write_shards(path: Path, weights: Arrays, shards: int, dtype: str) -> None:
    if shards == 1:
        _write_safetensors(path / "model.safetensors", weights, dtype)
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        _write_safetensors(path / file, part, dtype)
        weight_map |= dict.fromkeys(part, file)
    total = sum(array.nbytes for array in weights.values())
    _write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_safetensors(file: Path, weights: Arrays, dtype: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    end = 0
    for name, array in weights.items():
        parts.append(_as_bytes(array, dtype))
        start, end = end, end + len(parts[-1])
        header[name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    file.write_bytes(b"".join([struct.pack("<Q", len(text)), text, *parts]))


def _as_bytes(array: npt.NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "bfloat16":
        bits = array.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    return array.astype(np.dtype(dtype)).tobytes()
