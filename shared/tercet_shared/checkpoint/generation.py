"""What a checkpoint suggests for generation: ``generation_config.json``."""

from __future__ import annotations

from dataclasses import dataclass

from tercet_shared.checkpoint.config import Fields
from tercet_shared.checkpoint.jsonfile import read_object
from tercet_shared.checkpoint.source import CheckpointSource, SourceKind


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling parameters for requests that state none; None where the checkpoint states none either.

    ``do_sample`` is not looked at: a served request is greedy when its temperature is 0.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def read_generation_defaults(source: CheckpointSource) -> GenerationDefaults:
    """Reads the defaults; a GGUF file or a directory without ``generation_config.json`` gives empty ones.

    Raises:
        CheckpointError: The file is damaged, or a value is of the wrong type or out of range.
    """
    if source.kind is SourceKind.GGUF or not source.file("generation_config.json").is_file():
        return GenerationDefaults()
    path = source.file("generation_config.json")
    fields = Fields(read_object(path), str(path))
    defaults = GenerationDefaults(
        temperature=fields.optional_number("temperature"),
        top_p=fields.optional_number("top_p"),
        top_k=fields.optional_integer("top_k"),
        min_p=fields.optional_number("min_p"),
        repetition_penalty=fields.optional_number("repetition_penalty"),
        max_new_tokens=fields.optional_integer("max_new_tokens"),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )
    ranges = {
        "temperature": (0.0, 100.0),
        "top_p": (1e-9, 1.0),
        "top_k": (0, 1 << 31),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (1e-9, 100.0),
        "max_new_tokens": (1, 1 << 31),
    }
    for name, (low, high) in ranges.items():
        value = getattr(defaults, name)
        if value is not None and not low <= value <= high:
            raise fields.wrong(name, f"between {low} and {high}")
    return defaults
