"""Reads the hyper-parameters of a checkpoint of either format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_shared.checkpoint import gguf_config, hf_config
from tercet_shared.checkpoint.config import check
from tercet_shared.checkpoint.source import CheckpointSource, SourceKind

if TYPE_CHECKING:
    from tercet_shared.checkpoint.config import ModelConfig


def read_architecture(source: CheckpointSource) -> str:
    """Returns `ModelConfig.architecture` without reading the rest, so that an unknown family is refused by its name.

    Raises:
        CheckpointError: The configuration is missing, damaged, or names no architecture.
    """
    if source.kind is SourceKind.GGUF:
        return gguf_config.architecture(source.gguf)
    return hf_config.read_names(source.file("config.json"))[0]


def read_config(source: CheckpointSource) -> ModelConfig:
    """Reads and checks the hyper-parameters.

    Raises:
        CheckpointError: Something is missing, of the wrong type, out of range, or of a kind that is not supported; the
            message names file and field.
    """
    config = gguf_config.read(source.gguf) if source.kind is SourceKind.GGUF else hf_config.read(source.path)
    check(config, source.path)
    return config
