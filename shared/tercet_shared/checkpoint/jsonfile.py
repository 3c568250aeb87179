"""JSON files of a checkpoint, read with limits: they come from strangers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from tercet_shared.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

CONFIG_LIMIT = 8 << 20
"""Bytes of a configuration file; real ones have a few kilobytes, a tokenizer's configuration at most a megabyte."""

INDEX_LIMIT = 64 << 20
"""Bytes of a shard index; the largest known ones have about ten megabytes."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """Returns the JSON object in ``text``; ``what`` names its place in errors.

    Raises:
        CheckpointError: It is not UTF-8, not JSON, nested too deeply, or not an object.
    """
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply.") from None
    except ValueError as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} holds a JSON {type(value).__name__} where an object is expected.")
    return value


def read_text(path: Path, limit: int = CONFIG_LIMIT) -> bytes:
    """Returns the bytes of a small file.

    Raises:
        CheckpointError: It is missing, unreadable, or larger than ``limit`` bytes.
    """
    try:
        with path.open("rb") as file:
            text = file.read(limit + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    if len(text) > limit:
        raise CheckpointError(f"{path} is larger than {limit} bytes, too large for a file of its kind.")
    return text


def read_object(path: Path, limit: int = CONFIG_LIMIT) -> dict[str, Any]:
    """Returns the JSON object in the file at ``path``; errors as `read_text` and `parse_object`."""
    return parse_object(read_text(path, limit), str(path))
