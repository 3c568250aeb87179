"""The header of a GGUF file: metadata and tensor table, without touching tensor data.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Type numbers and
block sizes are those of the ``gguf`` package. Its own ``GGUFReader`` makes NumPy arrays of every string in the file,
which takes seconds for a vocabulary; here long arrays are stepped over, and decoded when asked for.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from tercet_shared.errors import CheckpointError, bounded

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_KEY = 65_535
_SMALL_ARRAY = 1_024

_SCALARS: dict[int, struct.Struct] = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_TENSOR_TYPES = {int(kind): kind for kind in GGMLQuantizationType}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """Row-major, slowest dimension first (the file stores the reverse)."""
    type: GGMLQuantizationType
    offset: int
    """From the start of the file, bytes."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class LongArray:
    """An array in the metadata that has been stepped over: where it is, and what its elements are."""

    kind: int
    count: int
    offset: int


Scalar = str | int | float | bool
MetadataValue = Scalar | tuple[Scalar, ...] | LongArray


class GgufFile:
    """The parsed header of one GGUF file. Holds no descriptor and no mapping.

    Attributes:
        path: The file.
        metadata: Scalars and short arrays by key; long arrays as `LongArray`, see `strings` and `numbers`.
        tensors: The tensor table, by name, in file order.
    """

    def __init__(self, path: Path, metadata: Mapping[str, MetadataValue], tensors: Mapping[str, GgufTensor]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Parses the header of the file at ``path``.

        Raises:
            CheckpointError: The file cannot be read, is not GGUF, is damaged, or ends before its last tensor does.
        """
        with _mapped(path) as data:
            return _Parser(path, data).parse()

    def strings(self, key: str) -> list[str]:
        """Returns an array of strings; an absent key gives an empty list.

        Raises:
            CheckpointError: The value is of another type, or not UTF-8.
        """
        value = self.metadata.get(key, ())
        if isinstance(value, LongArray):
            if value.kind != GGUFValueType.STRING:
                raise self.wrong_type(key, "an array of strings")
            with _mapped(self.path) as data:
                return _Parser(self.path, data).strings(key, value)
        if not isinstance(value, tuple):
            raise self.wrong_type(key, "an array of strings")
        found = [item for item in value if isinstance(item, str)]
        if len(found) != len(value):
            raise self.wrong_type(key, "an array of strings")
        return found

    def numbers(self, key: str) -> list[int | float]:
        """Returns an array of numbers; an absent key gives an empty list.

        Raises:
            CheckpointError: The value is of another type.
        """
        value = self.metadata.get(key, ())
        if isinstance(value, LongArray):
            scalar = _SCALARS.get(value.kind)
            if scalar is None:
                raise self.wrong_type(key, "an array of numbers")
            with _mapped(self.path) as data:
                code = f"<{value.count}{scalar.format[-1]}"
                return list(struct.unpack_from(code, data, value.offset))
        if not isinstance(value, tuple):
            raise self.wrong_type(key, "an array of numbers")
        found = [item for item in value if not isinstance(item, str)]
        if len(found) != len(value):
            raise self.wrong_type(key, "an array of numbers")
        return found

    def text(self, key: str) -> str | None:
        """Returns a string, or None if the key is absent; `CheckpointError` if it is of another type."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong_type(key, "a string")
        return value

    def integer(self, key: str) -> int | None:
        """Returns an integer, or None if the key is absent; `CheckpointError` if it is of another type."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong_type(key, "an integer")
        return value

    def flag(self, key: str) -> bool | None:
        """Returns a boolean, or None if the key is absent; `CheckpointError` if it is of another type."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong_type(key, "true or false")
        return value

    def wrong_type(self, key: str, expected: str) -> CheckpointError:
        """Returns the error for a metadata value that is not what it should be."""
        return CheckpointError(f"{self.path}: metadata {key!r} is not {expected}.")


class _mapped:  # noqa: N801  # reads as a function: ``with _mapped(path) as data``
    """Context manager: a read-only mapping of the file at a path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data: mmap.mmap | None = None

    def __enter__(self) -> mmap.mmap:
        try:
            with self._path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            raise CheckpointError(f"{self._path} is empty.") from None
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be read: {error.strerror}.") from None
        return self._data

    def __exit__(self, *_: object) -> None:
        if self._data is not None:
            self._data.close()


class _Parser:
    """Walks the header once; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def parse(self) -> GgufFile:
        if self._take(4) != _MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file.")
        version = self._u32()
        if version not in _VERSIONS:
            swapped = version & 0xFFFF == 0
            kind = "big-endian" if swapped else f"version {version}"
            raise CheckpointError(f"{self._path} is a GGUF file of a kind that is not read ({kind}).")
        tensor_count, entry_count = self._u64(), self._u64()
        metadata: dict[str, MetadataValue] = {}
        for _ in range(entry_count):
            key = self._string(_MAX_KEY)
            if key in metadata:
                raise self._damaged(f"metadata {key!r} appears twice")
            metadata[key] = self._value(key, self._u32())
        return GgufFile(self._path, metadata, self._tensors(tensor_count, self._alignment(metadata)))

    def strings(self, key: str, array: LongArray) -> list[str]:
        data, at, unpack = self._data, array.offset, _U64.unpack_from
        found: list[str] = []
        try:
            for _ in range(array.count):
                start = at + 8
                at = start + unpack(data, at)[0]
                found.append(data[start:at].decode("utf-8"))
        except UnicodeDecodeError:
            raise self._damaged(f"metadata {key!r} holds a string that is not UTF-8") from None
        return found

    def _alignment(self, metadata: Mapping[str, MetadataValue]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._damaged("'general.alignment' is not a power of two")
        return alignment

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        rows: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]] = []
        for _ in range(count):
            name = self._string(_MAX_KEY)
            dimensions = self._u32()
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise self._damaged(f"tensor {bounded(name, 200)!r} has {dimensions} dimensions")
            shape = tuple(self._u64() for _ in range(dimensions))[::-1]
            kind = self._tensor_type(name)
            rows.append((name, shape, kind, self._u64(), self._nbytes(name, shape, kind)))
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end, last = start, ""
        for name, shape, tensor_type, relative, nbytes in rows:
            if name in tensors:
                raise self._damaged(f"tensor {bounded(name, 200)!r} appears twice")
            if relative % alignment:
                raise self._damaged(f"tensor {bounded(name, 200)!r} is not aligned")
            tensors[name] = GgufTensor(name, shape, tensor_type, start + relative, nbytes)
            if start + relative + nbytes > end:
                end, last = start + relative + nbytes, name
        if end > len(self._data):
            raise CheckpointError(
                f"{self._path} is truncated: it has {len(self._data)} bytes, and tensor {bounded(last, 200)!r} "
                f"ends at byte {end}."
            )
        return tensors

    def _tensor_type(self, name: str) -> GGMLQuantizationType:
        number = self._u32()
        kind = _TENSOR_TYPES.get(number)
        if kind is None:
            raise CheckpointError(f"{self._path}: tensor {bounded(name, 200)!r} is of unknown type {number}.")
        return kind

    def _nbytes(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self._damaged(f"rows of tensor {bounded(name, 200)!r} are not whole blocks of {block}")
        return prod(shape) // block * block_bytes

    def _value(self, key: str, kind: int) -> MetadataValue:
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            return self._scalar(scalar)
        if kind == GGUFValueType.STRING:
            return self._string(len(self._data))
        if kind != GGUFValueType.ARRAY:
            raise self._damaged(f"metadata {bounded(key, 200)!r} is of unknown type {kind}")
        element, count = self._u32(), self._u64()
        scalar = _SCALARS.get(element)
        if scalar is None and element != GGUFValueType.STRING:
            raise self._damaged(f"metadata {bounded(key, 200)!r} is an array of unknown type {element}")
        start = self._at
        if count <= _SMALL_ARRAY:
            if scalar is not None:
                return tuple(self._scalar(scalar) for _ in range(count))
            return tuple(self._string(len(self._data)) for _ in range(count))
        if scalar is not None:
            self._skip(count * scalar.size)
        else:
            self._skip_strings(count)
        return LongArray(element, count, start)

    def _skip_strings(self, count: int) -> None:
        # The hot loop of opening a file: a vocabulary and its merges have a few hundred thousand strings.
        data, at, unpack, size = self._data, self._at, _U64.unpack_from, len(self._data)
        try:
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
                if at > size:
                    raise self._truncated()
        except struct.error:
            raise self._truncated() from None
        self._at = at

    def _scalar(self, scalar: struct.Struct) -> Scalar:
        start = self._at
        self._skip(scalar.size)
        value: Scalar = scalar.unpack_from(self._data, start)[0]
        return value

    def _u32(self) -> int:
        return int(self._scalar(_U32))

    def _u64(self) -> int:
        return int(self._scalar(_U64))

    def _string(self, limit: int) -> str:
        length = self._u64()
        if length > limit and length <= len(self._data):
            raise self._damaged(f"a name has {length} bytes")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged("a string is not UTF-8") from None

    def _take(self, length: int) -> bytes:
        start = self._at
        self._skip(length)
        return self._data[start : self._at]

    def _skip(self, length: int) -> None:
        if length > len(self._data) - self._at:
            raise self._truncated()
        self._at += length

    def _truncated(self) -> CheckpointError:
        return CheckpointError(f"{self._path} is truncated: it ends inside its header, after {len(self._data)} bytes.")

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {reason}.")
