"""Hyper-parameters of a decoder-only model, the same for every checkpoint format.

`ModelConfig` is the core that all families share; what only one family has stays in ``raw``. Readers: `hf_config` for
``config.json``, `gguf_config` for GGUF metadata; `config_reader` chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tercet_shared.errors import CheckpointError, bounded

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_T = TypeVar("_T")

MAX_TOKEN_ID = 1 << 24
_MAX_SIZE = 1 << 24
_MAX_LAYERS = 4_096
_MAX_POSITIONS = 1 << 30


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1's frequency scaling: long wavelengths are divided by ``factor``, short ones kept, blended in between.

    Source: ``_compute_llama3_parameters`` in Transformers' ``modeling_rope_utils``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class RopeDivisors:
    """Frequency scaling stored as a tensor, as GGUF does: inverse frequency i is divided by element i.

    Attributes:
        tensor: Name in the `WeightIndex`; float32, ``rotary_dim / 2`` elements.
    """

    tensor: str


RopeScaling = Llama3RopeScaling | RopeDivisors


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: Base of the frequencies.
        rotary_dim: Leading dimensions of each head that are rotated; even; the whole head unless the model says less.
        scaling: None means plain frequencies.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Hyper-parameters. Sizes are counts of elements.

    Attributes:
        architecture: The class name as Hugging Face writes it, e.g. ``LlamaForCausalLM``. A GGUF architecture that has
            no entry in `gguf_names` keeps its own name, so that it can be refused by name.
        family: Short name: ``model_type``, or GGUF's ``general.architecture``; e.g. ``llama``.
        head_dim: Size of one head of queries, keys and values.
        dtype: The dtype that the checkpoint states for its weights (``bfloat16`` …); None if it states none, or if
            the weights are quantized.
        eos_token_ids: As stated here; see `Checkpoint.eos_token_ids` for the union that ends generation.
        raw: The whole ``config.json``, or GGUF's metadata without tokenizer and long arrays.
    """

    architecture: str
    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    hidden_act: str
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    raw: Mapping[str, Any]


def check(config: ModelConfig, path: Path) -> None:
    """Checks what must hold between fields, whatever format they came from.

    Raises:
        CheckpointError: A field is out of range or does not fit another.
    """

    def refuse(field: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{path} ({config.architecture}): {field} {reason}.")

    limits = {
        "hidden_size": _MAX_SIZE,
        "intermediate_size": _MAX_SIZE,
        "num_layers": _MAX_LAYERS,
        "num_heads": _MAX_SIZE,
        "num_kv_heads": _MAX_SIZE,
        "head_dim": _MAX_SIZE,
        "vocab_size": MAX_TOKEN_ID,
        "max_position_embeddings": _MAX_POSITIONS,
    }
    for field, limit in limits.items():
        value = getattr(config, field)
        if not 1 <= value <= limit:
            raise refuse(field, f"is {value}, not between 1 and {limit}")
    if config.num_heads % config.num_kv_heads:
        raise refuse("num_kv_heads", f"({config.num_kv_heads}) does not divide num_heads ({config.num_heads})")
    if not 0 < config.rms_norm_eps < 1:
        raise refuse("rms_norm_eps", f"is {config.rms_norm_eps}, not between 0 and 1")
    if not 0 < config.rope.theta < float("inf"):
        raise refuse("rope theta", f"is {config.rope.theta}, not positive and finite")
    if config.rope.rotary_dim % 2 or not 0 < config.rope.rotary_dim <= config.head_dim:
        raise refuse("rotary dimension", f"is {config.rope.rotary_dim}: not even, or not within head_dim")
    if isinstance(config.rope.scaling, Llama3RopeScaling):
        scaling = config.rope.scaling
        if not (1 <= scaling.factor < float("inf") and 0 < scaling.low_freq_factor < scaling.high_freq_factor):
            raise refuse("rope scaling", "needs factor of at least 1 and 0 < low_freq_factor < high_freq_factor")
        if not 1 <= scaling.original_max_position_embeddings <= _MAX_POSITIONS:
            raise refuse("rope scaling", "has an original_max_position_embeddings out of range")
    for token in (*config.eos_token_ids, *(() if config.bos_token_id is None else (config.bos_token_id,))):
        if not 0 <= token < config.vocab_size:
            raise refuse("bos or eos token id", f"{token} is not in the vocabulary of {config.vocab_size}")


class Fields:
    """Typed access to a mapping whose values nobody has checked; every error names the file and the field."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """Returns an integer; without a default the field must be there."""
        value = self.optional_integer(name)
        if value is None:
            return self._default(name, default)
        return value

    def optional_integer(self, name: str) -> int | None:
        """Returns an integer, or None where the field is absent or null."""
        value = self._values.get(name)
        if value is not None and type(value) is not int:
            raise self.wrong(name, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a number; without a default the field must be there."""
        value = self.optional_number(name)
        return self._default(name, default) if value is None else value

    def optional_number(self, name: str) -> float | None:
        """Returns a number, or None where the field is absent or null."""
        value = self._values.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not abs(value) < 1e300:
            raise self.wrong(name, "a number")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Returns a boolean."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Returns a string; without a default the field must be there."""
        value = self.optional_text(name)
        return self._default(name, default) if value is None else value

    def optional_text(self, name: str) -> str | None:
        """Returns a string, or None where the field is absent or null."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def raw(self, name: str) -> Any:
        """Returns whatever the field is; None where it is absent."""
        return self._values.get(name)

    def mapping(self, name: str) -> dict[str, Any] | None:
        """Returns an object, or None where the field is absent or null."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return value

    def nested(self, name: str) -> Fields | None:
        """Returns the fields of an object, or None where it is absent or null."""
        value = self.mapping(name)
        return None if value is None else Fields(value, f"{self._where}, {bounded(name, 40)}")

    def names(self) -> tuple[str, ...]:
        """Returns the names of all fields."""
        return tuple(self._values)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Returns token ids given as one integer, a list of integers, or not at all."""
        value = self._values.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if len(ids) > 1_024 or any(type(item) is not int or not 0 <= item < MAX_TOKEN_ID for item in ids):
            raise self.wrong(name, "a token id or a list of them")
        return tuple(dict.fromkeys(ids))

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """Returns the error for a field that is not what it should be."""
        shown = bounded(repr(self._values.get(name)), 80)
        return CheckpointError(f"{self._where}: {name!r} is {shown}, which is not {expected}.")

    def _default(self, name: str, default: _T | None) -> _T:
        if default is None:
            raise CheckpointError(f"{self._where}: {name!r} is missing.")
        return default
