"""Hyper-parameters from ``config.json`` as Transformers writes it (version 4 and 5 spell RoPE differently)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tercet_shared.checkpoint.config import Fields, Llama3RopeScaling, ModelConfig, RopeConfig
from tercet_shared.checkpoint.jsonfile import read_object
from tercet_shared.checkpoint.quantization import read_scheme
from tercet_shared.errors import CheckpointError, bounded

if TYPE_CHECKING:
    from pathlib import Path

    from tercet_shared.checkpoint.quantization import Scheme

_DEFAULT_THETA = 10_000.0


def read_names(path: Path) -> tuple[str, str]:
    """Returns (architecture, family) from the ``config.json`` at ``path``.

    Raises:
        CheckpointError: The file is missing or damaged, or names neither architecture nor model type.
    """
    return _names(read_object(path), path)


def read(directory: Path) -> ModelConfig:
    """Reads ``config.json`` in ``directory``. Ranges are checked by the caller.

    Raises:
        CheckpointError: The file or a field is missing, of the wrong type, or of a kind that is not supported.
    """
    path = directory / "config.json"
    raw = read_object(path)
    architecture, family = _names(raw, path)
    where = f"{path} ({architecture})"
    fields = Fields(raw, where)
    quantized = read_scheme(raw, where) is not None
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        if num_heads < 1 or hidden_size % num_heads:
            raise CheckpointError(
                f"{where}: num_attention_heads ({num_heads}) does not divide hidden_size ({hidden_size})."
            )
        head_dim = hidden_size // num_heads
    return ModelConfig(
        architecture=architecture,
        family=family,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=_rope(fields, where, head_dim),
        hidden_act=fields.text("hidden_act", "silu"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        dtype=None if quantized else fields.optional_text("dtype") or fields.optional_text("torch_dtype"),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=fields.token_ids("eos_token_id"),
        raw=raw,
    )


def scheme_of(directory: Path) -> Scheme | None:
    """Returns how the weights of the checkpoint in ``directory`` are quantized; None where they are not.

    Raises:
        CheckpointError: ``config.json`` is missing or damaged, or they are quantized in a way that is not read.
    """
    path = directory / "config.json"
    raw = read_object(path)
    return read_scheme(raw, f"{path} ({_names(raw, path)[0]})")


def _names(raw: dict[str, Any], path: Path) -> tuple[str, str]:
    family = raw.get("model_type")
    architectures = raw.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else family
    if not isinstance(named, str) or not named:
        raise CheckpointError(f"{path}: 'architectures' names no model class.")
    return bounded(named, 100), bounded(family, 100) if isinstance(family, str) else named


def _rope(fields: Fields, where: str, head_dim: int) -> RopeConfig:
    # Transformers 5 puts everything into `rope_parameters`; before, theta and the partial factor stood beside
    # `rope_scaling`, whose type was called `type` before it was called `rope_type`.
    name = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    stated = fields.mapping(name) or {}
    if any(isinstance(value, dict) for value in stated.values()):
        raise CheckpointError(f"{where}: {name!r} differs by layer type, which is not supported.")
    scaling = Fields(stated, f"{where}, {name}")
    theta = scaling.optional_number("rope_theta")
    if theta is None:
        theta = fields.number("rope_theta", _DEFAULT_THETA)
    partial = scaling.optional_number("partial_rotary_factor")
    if partial is None:
        partial = fields.number("partial_rotary_factor", 1.0)
    if not 0 < partial <= 1:
        raise fields.wrong("partial_rotary_factor", "between 0 and 1")
    kind = scaling.optional_text("rope_type") or scaling.text("type", "default")
    rotary_dim = int(head_dim * partial)
    if kind == "default":
        return RopeConfig(theta, rotary_dim)
    if kind == "llama3":
        return RopeConfig(
            theta,
            rotary_dim,
            Llama3RopeScaling(
                factor=scaling.number("factor"),
                low_freq_factor=scaling.number("low_freq_factor"),
                high_freq_factor=scaling.number("high_freq_factor"),
                original_max_position_embeddings=scaling.integer("original_max_position_embeddings"),
            ),
        )
    raise CheckpointError(f"{where}: rope type {bounded(kind, 40)!r} is not supported (default and llama3 are).")
