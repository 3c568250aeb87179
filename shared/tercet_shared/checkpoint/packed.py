"""Weights of a safetensors checkpoint that several tensors stand for: their integers or floats, scales, zeros, groups.

Legend: N rows and K columns of the weight, G groups of columns that share a scale and a zero, P numbers in 32 bits.
Numbers fill words from the lowest bits on, except in AWQ's: there the numbers 0 to 7 of a word are the columns 0, 2, 4,
6, 1, 3, 5, 7 of eight.

========= ====================================== ================================== ================================
layout    numbers                                scales                             zeros, group of a column
========= ====================================== ================================== ================================
FLOAT     ``weight [N, K]`` F8_E4M3              ``weight_scale`` or                none
                                                 ``weight_scale_inv``: one,
                                                 ``[N]``, ``[N, 1]``, or one for
                                                 each block
PLAIN     ``weight [N, K]`` I8                   ``weight_scale``: the same, and    ``weight_zero_point``, as scales
                                                 ``[N, G]``
PACKED    ``weight_packed [N, K / P]``           ``weight_scale``: the same         ``weight_zero_point [N / P, G]``,
                                                                                    or I8 as scales;
                                                                                    ``weight_g_idx [K]``
AWQ       ``qweight [K, N / P]``                 ``scales [G, N]``                  ``qzeros [G, N / P]``
GPTQ      ``qweight [K / P, N]``                 ``scales [G, N]``                  ``qzeros [G, N / P]``,
                                                                                    ``g_idx [K]``
========= ====================================== ================================== ================================

Both scales of FLOAT are multiplied with, whatever the second one is called. Only headers are read here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tercet_shared.checkpoint.quantization import Layout
from tercet_shared.errors import CheckpointError, bounded

if TYPE_CHECKING:
    from tercet_shared.checkpoint.quantization import Scheme
    from tercet_shared.checkpoint.weights import TensorEntry

    Entries = dict[str, TensorEntry]
    Shape = tuple[int, ...]

_NUMBERS: Final = {
    Layout.FLOAT: ("weight", "F8_E4M3"), Layout.PLAIN: ("weight", "I8"), Layout.PACKED: ("weight_packed", "I32"),
    Layout.AWQ: ("qweight", "I32"), Layout.GPTQ: ("qweight", "I32"),
}  # fmt: skip
"""What the tensor of the numbers is called after the module, and its type."""

_FLOATS: Final = ("F16", "BF16", "F32")

_OF_ACTIVATIONS: Final = (
    "input_scale", "input_zero_point", "input_scale_ub", "activation_scale", "output_scale", "output_zero_point",
    "q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point",
)  # fmt: skip
"""Scales of activations and of the KV cache. Neither is quantized with them: where activations have eight bits, each
row has a scale of its own."""

_KEPT_BITS: Final = {(4, True): 5.0, (4, False): 6.0, (8, True): 8.5, (8, False): 12.0}
"""Bits that a weight takes in the worker's memory, scales included, by bits and whether zeros are in the middle."""
_KEPT_BLOCK: Final = 32
"""Columns that share a scale there, at most."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The tensors that stand for one weight. What they hold is as their shapes are: checked."""

    scheme: Scheme
    numbers: TensorEntry
    scales: TensorEntry
    zeros: TensorEntry | None = None
    groups: TensorEntry | None = None
    shape: TensorEntry | None = None
    """I64 ``[2]``, the shape of the weight."""

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        """All of them."""
        found = (self.numbers, self.scales, self.zeros, self.groups, self.shape)
        return tuple(entry for entry in found if entry is not None)

    def kept_nbytes(self, shape: Shape) -> int | None:
        """Returns about what the worker's memory takes of a weight that stays quantized; None where it does not."""
        scheme, columns = self.scheme, shape[-1]
        group = columns if scheme.block is None else scheme.block[1]
        whole = columns % _KEPT_BLOCK == 0 and (group % _KEPT_BLOCK == 0 or group >= columns)
        if scheme.layout is Layout.FLOAT or not whole or (scheme.ordered and group < columns):
            return None
        return int(shape[0] * columns * _KEPT_BITS[scheme.bits, scheme.symmetric] / 8)


def gather(stored: Entries, scheme: Scheme) -> tuple[Entries, tuple[str, ...]]:
    """Returns a checkpoint's tensors with one entry for each weight that is quantized, and what is of no use.

    An entry is called ``….weight``, has the shape of the weight and `TensorEntry.packed`, and stands where its numbers
    did.

    Raises:
        CheckpointError: A tensor is missing, or is not of the type and shape that it must have beside the others.
    """
    module, kind = _NUMBERS[scheme.layout]
    found: Entries = {}
    used: set[str] = set()
    for name, entry in stored.items():
        stem, _, role = name.rpartition(".")
        if role != module or (role == "weight" and entry.dtype != kind):
            continue
        weight = f"{stem}.weight"
        if role != "weight" and weight in stored:
            raise CheckpointError(f"The checkpoint holds both tensors {_shown(name)} and {_shown(weight)}.")
        found[name] = _weight(_Module(stored, stem, entry), scheme)
        used.update(part.name for part in found[name].stored)
    unused = tuple(name for name in stored if name.rpartition(".")[2] in _OF_ACTIVATIONS)
    entries: Entries = {}
    for name, entry in stored.items():
        if name in found:
            entries[found[name].name] = found[name]
        elif name not in used and name not in unused:
            entries[name] = entry
    return entries, unused


class _Module:
    """The tensors beside the numbers of one weight."""

    def __init__(self, stored: Entries, stem: str, numbers: TensorEntry) -> None:
        self._stored = stored
        self.stem = stem
        self.numbers = numbers

    def has(self, role: str) -> bool:
        """Says whether there is a tensor."""
        return f"{self.stem}.{role}" in self._stored

    def take(self, role: str, kinds: tuple[str, ...], *shapes: Shape) -> TensorEntry:
        """Returns a tensor, which must be of one of these types and shapes."""
        name = f"{self.stem}.{role}"
        entry = self._stored.get(name)
        if entry is None:
            raise CheckpointError(f"The checkpoint lacks the tensor {_shown(name)}.")
        _check(entry, kinds, shapes, self.numbers)
        return entry


def _check(entry: TensorEntry, kinds: tuple[str, ...], shapes: tuple[Shape, ...], numbers: TensorEntry) -> None:
    beside = "" if entry is numbers else f" beside {_shown(numbers.name)} of {list(numbers.shape)}"
    if entry.dtype not in kinds:
        raise CheckpointError(f"The tensor {_shown(entry.name)} is of type {entry.dtype}, not {' or '.join(kinds)}.")
    if entry.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise CheckpointError(
            f"The tensor {_shown(entry.name)} has the shape {list(entry.shape)}, and it should be {wanted}{beside}."
        )


def _weight(module: _Module, scheme: Scheme) -> TensorEntry:
    numbers = module.numbers
    _check(numbers, (_NUMBERS[scheme.layout][1],), (numbers.shape,), numbers)
    if len(numbers.shape) != 2 or not numbers.elements:
        raise CheckpointError(
            f"The tensor {_shown(numbers.name)} has the shape {list(numbers.shape)}, which is no matrix."
        )
    rows, columns = shape = _shape(numbers.shape, scheme)
    take = _transposed if scheme.layout in (Layout.AWQ, Layout.GPTQ) else _upright
    packed = take(module, scheme, rows, columns)
    return replace(
        numbers,
        name=f"{module.stem}.weight",
        shape=shape,
        nbytes=sum(entry.nbytes for entry in packed.stored),
        dtype=scheme.label,
        packed=packed,
    )


def _shape(numbers: Shape, scheme: Scheme) -> tuple[int, int]:
    """Returns rows and columns of a weight from the shape of its numbers."""
    first, second = numbers
    per = 32 // scheme.bits
    if scheme.layout is Layout.GPTQ:
        return second, first * per
    if scheme.layout is Layout.AWQ:
        return second * per, first
    return first, second * per if scheme.layout is Layout.PACKED else second


def _transposed(module: _Module, scheme: Scheme, rows: int, columns: int) -> PackedWeight:
    """AWQ and GPTQ: rows of the weight are columns of the tensors."""
    groups = _blocks(columns, scheme.block[1] if scheme.block is not None else columns)
    names = None
    if scheme.layout is Layout.GPTQ and (module.has("g_idx") or (scheme.ordered and groups > 1)):
        names = module.take("g_idx", ("I32", "I64"), (columns,))
    return PackedWeight(
        scheme,
        module.numbers,
        module.take("scales", _FLOATS, (groups, rows)),
        zeros=module.take("qzeros", ("I32",), (groups, _blocks(rows, 32 // scheme.bits))),
        groups=names,
    )


def _upright(module: _Module, scheme: Scheme, rows: int, columns: int) -> PackedWeight:
    """What compressed-tensors and fp8 write."""
    shapes: tuple[Shape, ...]
    if scheme.block is None:
        groups, shapes = 1, ((), (1,), (1, 1), (rows,), (rows, 1))
    else:
        height, width = scheme.block
        groups = _blocks(columns, width)
        shapes = ((_blocks(rows, height), groups),)
    inverse = scheme.layout is Layout.FLOAT and module.has("weight_scale_inv")
    scales = module.take("weight_scale_inv" if inverse else "weight_scale", _FLOATS, *shapes)
    if scheme.layout is Layout.FLOAT:
        return PackedWeight(scheme, module.numbers, scales)
    zeros = None
    if module.has("weight_zero_point") or not scheme.symmetric:
        words = (_blocks(rows, 32 // scheme.bits), groups)
        kinds = ("I8", "I32") if scheme.layout is Layout.PACKED else ("I8",)
        zeros = module.take("weight_zero_point", kinds, scales.shape, words)
        _check(zeros, kinds, (words,) if zeros.dtype == "I32" else (scales.shape,), module.numbers)
    if scheme.layout is Layout.PLAIN:
        return PackedWeight(scheme, module.numbers, scales, zeros)
    names = None
    if module.has("weight_g_idx") or (scheme.ordered and groups > 1):
        names = module.take("weight_g_idx", ("I32", "I64"), (columns,))
    shape = module.take("weight_shape", ("I64", "I32"), (2,))
    return PackedWeight(scheme, module.numbers, scales, zeros, names, shape)


def _blocks(extent: int, size: int) -> int:
    return -(-extent // size)


def _shown(name: str) -> str:
    return repr(bounded(name, 200))
