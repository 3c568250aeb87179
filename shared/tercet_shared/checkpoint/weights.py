"""Where every tensor is, and access to one at a time, whatever the format.

Arrays are mapped from the file, never read ahead: an index over hundreds of gigabytes costs what its headers cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tercet_shared.checkpoint import hf_config, safetensors_file
from tercet_shared.checkpoint.gguf_names import FAMILIES
from tercet_shared.checkpoint.packed import gather
from tercet_shared.checkpoint.source import CheckpointSource, SourceKind
from tercet_shared.errors import CheckpointError, InternalError, bounded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import numpy.typing as npt

    from tercet_shared.checkpoint.packed import PackedWeight

_NUMPY = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "BOOL": np.bool_,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
    "F8_E4M3": np.uint8, "F8_E5M2": np.uint8,
}  # fmt: skip
"""What `WeightIndex.read` returns by dtype; formats that NumPy lacks come as unsigned integers of their size."""

_QUANTIZED = {kind.name for kind in GGMLQuantizationType} - set(_NUMPY)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor.

    Attributes:
        name: Hugging Face's name, e.g. ``model.layers.0.self_attn.q_proj.weight``; unknown names are as stored.
        stored_name: The name in the file.
        file: The file that holds it.
        offset: First byte, from the start of the file.
        nbytes: Bytes in the file; of all tensors that stand for a packed weight.
        shape: Elements, slowest dimension first; for a projection ``[out, in]``.
        dtype: ``F32``, ``F16``, ``BF16`` … as safetensors spells them, a ggml type such as ``Q4_1``, or `Scheme.label`.
        rope_permuted: Rows are in GGUF's order for interleaved RoPE; `unpermute_rope_rows` undoes it.
        packed: The tensors that stand for this one, where several do.
    """

    name: str
    stored_name: str
    file: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    rope_permuted: bool = False
    packed: PackedWeight | None = None

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        """The tensors of the file: this one, or those that stand for it."""
        return (self,) if self.packed is None else self.packed.stored

    @property
    def kept_nbytes(self) -> int | None:
        """About what the worker's memory takes where it keeps the tensor quantized; None where it cannot."""
        if self.packed is not None:
            return self.packed.kept_nbytes(self.shape)
        return self.nbytes if self.quantized else None

    @property
    def quantized(self) -> bool:
        """Whether the tensor is stored in ggml blocks, so that `WeightIndex.read` gives rows of bytes."""
        return self.dtype in _QUANTIZED

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class WeightIndex:
    """All tensors of a checkpoint by name. Iterates over names; holds no file open.

    Attributes:
        entries: The tensors by Hugging Face name, in the order of the file.
        total_bytes: Size of all tensors as stored.
        total_elements: Number of elements of all tensors: times the size of a dtype, what they take once loaded.
        unused: Names of tensors that are no entries, since nothing is computed with them.
    """

    def __init__(self, entries: Mapping[str, TensorEntry], unused: tuple[str, ...] = ()) -> None:
        self.entries = entries
        self.unused = unused
        self.total_bytes = sum(entry.nbytes for entry in entries.values())
        self.total_elements = sum(entry.elements for entry in entries.values())

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> TensorEntry:
        """Returns where a tensor is.

        Raises:
            CheckpointError: There is no such tensor.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"The checkpoint lacks the tensor {bounded(name, 200)!r}.")
        return entry

    def read(self, name: str) -> npt.NDArray[Any]:
        """Returns a tensor as stored: a read-only array, mapped from its file as long as the array lives.

        Returns:
            ``entry.shape`` in the NumPy dtype of ``entry.dtype`` (bfloat16 as uint16 bit patterns, float8 as uint8);
            for quantized types uint8 ``[*shape[:-1], bytes per row]``.

        Raises:
            CheckpointError: There is no such tensor, or its file has gone.
        """
        return read_stored(self[name])

    def read_float32(self, name: str) -> npt.NDArray[np.float32]:
        """Returns a tensor as float32 ``entry.shape``: dequantized if need be; a mapping if stored so, else a copy.

        Raises:
            CheckpointError: There is no such tensor, or its type is not one that can be converted.
        """
        entry, stored = self[name], self.read(name)
        return to_float32(stored, entry)


def read_stored(entry: TensorEntry) -> npt.NDArray[Any]:
    """Returns one tensor of a file: see `WeightIndex.read`."""
    if entry.packed is not None:
        raise InternalError(f"the tensor {entry.name} is read through those that stand for it")
    shape, dtype = entry.shape, np.dtype(_NUMPY.get(entry.dtype, np.uint8))
    if entry.quantized:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[entry.dtype]]
        shape = (*shape[:-1], shape[-1] // block * block_bytes)
    if entry.nbytes == 0:
        return np.empty(shape, dtype)
    try:
        return np.memmap(entry.file, dtype=dtype, mode="r", offset=entry.offset, shape=shape)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{entry.file} can no longer be read: {error}.") from None


def to_float32(stored: npt.NDArray[Any], entry: TensorEntry) -> npt.NDArray[np.float32]:
    """Converts rows as `WeightIndex.read` gives them, all or some of them, to float32.

    Args:
        stored: Whole rows of the tensor, ``[..., elements or bytes per row]``.
        entry: The tensor they come from.

    Raises:
        CheckpointError: The type cannot be converted.
    """
    if entry.dtype == "F32":
        return stored
    if entry.dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if entry.quantized:
        kind = GGMLQuantizationType[entry.dtype]
        try:
            converted: npt.NDArray[np.float32] = quants.dequantize(np.ascontiguousarray(stored), kind)
        except NotImplementedError:
            raise CheckpointError(f"{entry.file}: tensors of type {entry.dtype} cannot be dequantized.") from None
        return converted
    if entry.dtype in ("F16", "F64"):
        return stored.astype(np.float32)
    raise CheckpointError(f"{entry.file}: tensor {bounded(entry.name, 200)!r} of type {entry.dtype} holds no weights.")


def read_weights(source: CheckpointSource) -> WeightIndex:
    """Reads and checks the headers of all weight files.

    Raises:
        CheckpointError: A file is missing, truncated or damaged, or weights are quantized in a way that is not read.
    """
    if source.kind is SourceKind.GGUF:
        return WeightIndex(_gguf_entries(source))
    stored, scheme = _safetensors_entries(source.path), hf_config.scheme_of(source.path)
    return WeightIndex(stored) if scheme is None else WeightIndex(*gather(stored, scheme))


def _safetensors_entries(directory: Path) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(name, name, tensor.file, tensor.offset, tensor.nbytes, tensor.shape, tensor.dtype)
        for name, tensor in safetensors_file.read_directory(directory).items()
    }


def _gguf_entries(source: CheckpointSource) -> dict[str, TensorEntry]:
    file = source.gguf
    family = FAMILIES.get(file.text("general.architecture") or "")
    entries: dict[str, TensorEntry] = {}
    for stored, tensor in file.tensors.items():
        name = family.huggingface_name(stored) if family else stored
        if name in entries:
            raise CheckpointError(f"{file.path} is damaged: two tensors are called {bounded(name, 200)!r}.")
        entries[name] = TensorEntry(
            name=name,
            stored_name=stored,
            file=file.path,
            offset=tensor.offset,
            nbytes=tensor.nbytes,
            shape=tensor.shape,
            dtype=tensor.type.name,
            rope_permuted=family is not None and family.is_rope_permuted(stored),
        )
    return entries
