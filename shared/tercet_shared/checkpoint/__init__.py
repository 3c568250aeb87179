"""Reading checkpoints without torch: configuration, weights, tokenizer, chat template, generation defaults.

`Checkpoint.open` finds a model; its parts are read when they are first asked for. Hugging Face directories, GGUF files
and hub ids look the same from outside. Files come from strangers: whatever is wrong with one becomes a
`CheckpointError` of one sentence, and pickles are never opened.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tercet_shared.checkpoint.config import (
    Llama3RopeScaling,
    ModelConfig,
    RopeConfig,
    RopeDivisors,
)
from tercet_shared.checkpoint.config_reader import read_architecture, read_config
from tercet_shared.checkpoint.fingerprint import model_fingerprint
from tercet_shared.checkpoint.generation import GenerationDefaults, read_generation_defaults
from tercet_shared.checkpoint.gguf_names import unpermute_rope_rows
from tercet_shared.checkpoint.packed import PackedWeight
from tercet_shared.checkpoint.quantization import Layout, Scheme
from tercet_shared.checkpoint.source import CheckpointSource, SourceKind, resolve
from tercet_shared.checkpoint.template import ChatTemplate
from tercet_shared.checkpoint.template_files import read_chat_template
from tercet_shared.checkpoint.tokenizer import SpecialTokens, Tokenizer
from tercet_shared.checkpoint.tokenizer_files import read_tokenizer
from tercet_shared.checkpoint.weights import TensorEntry, WeightIndex, read_stored, read_weights, to_float32

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "ChatTemplate",
    "Checkpoint",
    "CheckpointSource",
    "GenerationDefaults",
    "Layout",
    "Llama3RopeScaling",
    "ModelConfig",
    "PackedWeight",
    "RopeConfig",
    "RopeDivisors",
    "Scheme",
    "SourceKind",
    "SpecialTokens",
    "TensorEntry",
    "Tokenizer",
    "WeightIndex",
    "model_fingerprint",
    "read_architecture",
    "read_chat_template",
    "read_config",
    "read_generation_defaults",
    "read_stored",
    "read_tokenizer",
    "read_weights",
    "resolve",
    "to_float32",
    "unpermute_rope_rows",
]


class Checkpoint:
    """One checkpoint. Every property is read on first use, kept, and raises `CheckpointError` when it cannot be read.

    Attributes:
        source: What was found, and where.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source

    @classmethod
    def open(
        cls,
        model: str,
        *,
        revision: str | None = None,
        cache_dir: Path | None = None,
        offline: bool | None = None,
        text_only: bool = False,
    ) -> Checkpoint:
        """Finds ``model``; arguments and errors are those of `resolve`. Nothing else is read yet."""
        return cls(resolve(model, revision=revision, cache_dir=cache_dir, offline=offline, text_only=text_only))

    @property
    def served_name(self) -> str:
        """The name to serve under unless the user chose another."""
        return self.source.served_name

    @functools.cached_property
    def architecture(self) -> str:
        """`ModelConfig.architecture`, readable even where the rest of the configuration is not."""
        return read_architecture(self.source)

    @functools.cached_property
    def config(self) -> ModelConfig:
        """Hyper-parameters."""
        return read_config(self.source)

    @functools.cached_property
    def weights(self) -> WeightIndex:
        """Where every tensor is."""
        return read_weights(self.source)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return read_tokenizer(self.source)

    @functools.cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template; None where there is none."""
        return read_chat_template(self.source, self.tokenizer.special)

    @functools.cached_property
    def generation_defaults(self) -> GenerationDefaults:
        """Sampling parameters for requests that state none."""
        return read_generation_defaults(self.source)

    @functools.cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends generation: those of generation defaults, configuration and tokenizer, each once."""
        named = self.tokenizer.special.eos_id
        stated = (*self.generation_defaults.eos_token_ids, *self.config.eos_token_ids)
        return tuple(dict.fromkeys((*stated, *(() if named is None else (named,)))))

    @functools.cached_property
    def fingerprint(self) -> str:
        """128 bits in hexadecimal that stand for configuration and weights."""
        return model_fingerprint(self.config, self.weights)
