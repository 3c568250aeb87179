"""Headers of safetensors files, single or sharded, without touching tensor data.

Format: https://github.com/huggingface/safetensors#format. Every size is checked against the length of its file,
because a download that broke off leaves a file with a perfect header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Any

from tercet_shared.checkpoint.jsonfile import INDEX_LIMIT, parse_object, read_object
from tercet_shared.errors import CheckpointError, bounded

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000
"""Bytes of a header; the reference implementation has the same limit."""

ITEM_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes per element by safetensors' dtype names."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file; ``offset`` counts from the start of the file, in bytes."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_directory(directory: Path) -> dict[str, StoredTensor]:
    """Returns all tensors of a checkpoint directory by name.

    ``model.safetensors`` counts before ``model.safetensors.index.json``, as in Transformers; a lone file of another
    name is taken when there is neither.

    Raises:
        CheckpointError: A file or tensor is missing, truncated or damaged.
    """
    single, index = directory / _SINGLE, directory / _INDEX
    if single.is_file():
        return read_file(single)
    if index.is_file():
        return _read_shards(directory, index)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return read_file(files[0])
    if files:
        raise CheckpointError(f"{directory} holds {len(files)} safetensors files but no {_INDEX}.")
    raise CheckpointError(f"{directory} holds no safetensors.")


def _read_shards(directory: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_object(index, INDEX_LIMIT).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' is missing or empty.")
    shards: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, shard in weight_map.items():
        # The index comes from strangers: a shard is a file beside it, of the kind that is read.
        if not isinstance(shard, str) or PurePath(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {bounded(repr(shard), 100)} is not the name of a safetensors file.")
        if shard not in shards:
            if not (directory / shard).is_file():
                raise CheckpointError(f"{directory / shard} is missing: the checkpoint is incomplete.")
            shards[shard] = read_file(directory / shard)
        tensor = shards[shard].get(name)
        if tensor is None:
            raise CheckpointError(
                f"{directory / shard} lacks tensor {bounded(name, 200)!r}, which the index puts there."
            )
        tensors[name] = tensor
    return tensors


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one file by name.

    Raises:
        CheckpointError: The file cannot be read, is truncated or damaged.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path} is truncated: it has {size} bytes.")
            (length,) = struct.unpack("<Q", prefix)
            if length > _HEADER_LIMIT:
                raise CheckpointError(f"{path} is not a safetensors file: its header would have {length} bytes.")
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    if len(header) < length:
        raise CheckpointError(f"{path} is truncated: it ends inside its header, after {size} bytes.")
    entries = parse_object(header, f"The header of {path}")
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_layout(path, tensors, 8 + length, size)
    return tensors


def _check_layout(path: Path, tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    end = start
    for tensor in sorted(tensors.values(), key=lambda item: (item.offset, item.nbytes)):
        if tensor.offset != end:
            raise CheckpointError(
                f"{path} is damaged: tensor {bounded(tensor.name, 200)!r} does not follow the one before."
            )
        end += tensor.nbytes
    if end > size:
        raise CheckpointError(f"{path} is truncated: it has {size} of {end} bytes.")


def _tensor(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    shown = bounded(name, 200)
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path} is damaged: the entry of tensor {shown!r} is not an object.")
    dtype, shape, offsets = entry.get("dtype"), _naturals(entry.get("shape")), _naturals(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise CheckpointError(f"{path}: tensor {shown!r} has dtype {bounded(repr(dtype), 40)}, which is not read.")
    if shape is None or offsets is None or len(offsets) != 2:
        raise CheckpointError(f"{path} is damaged: tensor {shown!r} has no valid shape or offsets.")
    nbytes = prod(shape) * ITEM_SIZES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(f"{path} is damaged: tensor {shown!r} of {nbytes} bytes has {offsets[1] - offsets[0]}.")
    return StoredTensor(name, path, dtype, shape, start + offsets[0], nbytes)


def _naturals(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None
