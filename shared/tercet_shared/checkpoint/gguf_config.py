"""Hyper-parameters from GGUF metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf.constants import GGMLQuantizationType

from tercet_shared.checkpoint.config import Fields, ModelConfig, RopeConfig, RopeDivisors
from tercet_shared.checkpoint.gguf_file import LongArray
from tercet_shared.checkpoint.gguf_names import FAMILIES, ROPE_DIVISORS
from tercet_shared.errors import CheckpointError, bounded

if TYPE_CHECKING:
    from tercet_shared.checkpoint.gguf_file import GgufFile

_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
_EMBEDDING = "token_embd.weight"


def architecture(file: GgufFile) -> str:
    """Returns the Hugging Face class name of the file's architecture, or GGUF's own name if it is not known.

    Raises:
        CheckpointError: The file names no architecture.
    """
    family = _family(file)
    known = FAMILIES.get(family)
    if known is None:
        return family
    # Mixture-of-experts models of the same lineage are stored under the dense name.
    return "MixtralForCausalLM" if file.integer(f"{family}.expert_count") else known.architecture


def read(file: GgufFile) -> ModelConfig:
    """Reads the hyper-parameters. Ranges are checked by the caller.

    Raises:
        CheckpointError: A field or the embedding is missing, of the wrong type, or of a kind that is not supported.
    """
    family, name = _family(file), architecture(file)
    where = f"{file.path} ({name})"
    prefix = f"{family}."
    fields = Fields(
        {key.removeprefix(prefix): file.metadata[key] for key in file.metadata if key.startswith(prefix)}, where
    )
    embedding = file.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{where}: the tensor {_EMBEDDING!r} is missing or not a matrix.")
    hidden_size = fields.integer("embedding_length")
    vocab_size = fields.integer("vocab_size", embedding.shape[0])
    if embedding.shape != (vocab_size, hidden_size):
        raise CheckpointError(
            f"{where}: {_EMBEDDING!r} has shape {embedding.shape}, but vocabulary and hidden size are "
            f"{vocab_size} and {hidden_size}."
        )
    num_heads = _same_in_all_layers(file, fields, "attention.head_count")
    head_dim = _head_dim(fields, where, hidden_size, num_heads)
    return ModelConfig(
        architecture=name,
        family=family,
        hidden_size=hidden_size,
        intermediate_size=_same_in_all_layers(file, fields, "feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=_same_in_all_layers(file, fields, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, fields, where, head_dim),
        hidden_act="silu",
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        dtype=_DTYPES.get(embedding.type),
        bos_token_id=file.integer("tokenizer.ggml.bos_token_id"),
        eos_token_ids=eos_token_ids(file),
        raw=_raw(file),
    )


def _raw(file: GgufFile) -> dict[str, object]:
    return {
        key: value
        for key, value in file.metadata.items()
        if not key.startswith("tokenizer.") and not isinstance(value, LongArray)
    }


def eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Returns the ids that end generation: end of sequence, of turn, of message, each once.

    Chat models whose end of turn is not their end of sequence state it as ``eot`` (llama.cpp ends at all three).
    """
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [file.integer(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(item for item in ids if item is not None))


def _family(file: GgufFile) -> str:
    family = file.text("general.architecture")
    if not family:
        raise CheckpointError(f"{file.path}: metadata 'general.architecture' is missing.")
    return bounded(family, 100)


def _same_in_all_layers(file: GgufFile, fields: Fields, name: str, default: int | None = None) -> int:
    value = file.metadata.get(f"{_family(file)}.{name}")
    if not isinstance(value, tuple):
        return fields.integer(name, default)
    if len(set(value)) != 1 or type(value[0]) is not int:
        raise CheckpointError(f"{file.path}: {name!r} differs by layer, which is not supported.")
    return value[0]


def _head_dim(fields: Fields, where: str, hidden_size: int, num_heads: int) -> int:
    stated = fields.optional_integer("attention.key_length")
    if stated is None:
        if num_heads < 1 or hidden_size % num_heads:
            raise CheckpointError(f"{where}: {num_heads} heads do not divide the hidden size {hidden_size}.")
        stated = hidden_size // num_heads
    if fields.integer("attention.value_length", stated) != stated:
        raise CheckpointError(f"{where}: keys and values of different sizes are not supported.")
    return stated


def _rope(file: GgufFile, fields: Fields, where: str, head_dim: int) -> RopeConfig:
    kind = fields.text("rope.scaling.type", "none")
    if kind != "none":
        raise CheckpointError(f"{where}: rope scaling {bounded(kind, 40)!r} is not supported.")
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    divisors = file.tensors.get(ROPE_DIVISORS)
    if divisors is not None and (divisors.shape != (rotary_dim // 2,) or divisors.type != GGMLQuantizationType.F32):
        raise CheckpointError(f"{where}: {ROPE_DIVISORS!r} is not a vector of {rotary_dim // 2} float32.")
    return RopeConfig(
        theta=fields.number("rope.freq_base", 10_000.0),
        rotary_dim=rotary_dim,
        scaling=None if divisors is None else RopeDivisors(ROPE_DIVISORS),
    )
