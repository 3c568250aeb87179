"""How a checkpoint's ``config.json`` says that its weights are quantized; what cannot be read is refused by name.

Sources: Transformers' ``quantization_config``, and what AutoAWQ, AutoGPTQ, GPTQModel and compressed-tensors write
there. How the tensors lie is in `packed`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tercet_shared.checkpoint.config import Fields
from tercet_shared.errors import CheckpointError, bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Refuse = Callable[[str], CheckpointError]

_READ: Final = (
    "fp8 (E4M3), awq (4 bits, version gemm), gptq (4 and 8 bits, formats gptq and gptq_v2) and compressed-tensors "
    "(float-quantized with 8 bits, int-quantized with 8, pack-quantized with 4 and 8)"
)


class Layout(enum.Enum):
    """Which tensors stand for a weight, see `packed`."""

    FLOAT = "FP8"
    PLAIN = "INT"
    PACKED = "PACKED"
    AWQ = "AWQ"
    GPTQ = "GPTQ"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How all weights of a checkpoint are quantized that are: ``weight = scale * (q - zero)``.

    Attributes:
        layout: Which tensors there are.
        bits: Of an integer, or of a float.
        block: Rows and columns that share a scale; None where all of a row or of a tensor do.
        zero_offset: What is added to a stored zero: 1 in the first version of GPTQ's format.
        symmetric: Whether all zeros are said to be the middle of the range.
        ordered: Whether columns are spread over the groups, so that a tensor says which group a column is in.
    """

    layout: Layout
    bits: int
    block: tuple[int, int] | None = None
    zero_offset: int = 0
    symmetric: bool = False
    ordered: bool = False

    @property
    def label(self) -> str:
        """What its weights are called where the types of tensors are."""
        return "FP8" if self.layout is Layout.FLOAT else f"{self.layout.value}-{self.bits}"


def read_scheme(config: Mapping[str, Any], where: str) -> Scheme | None:
    """Returns how the weights are quantized; None where the configuration says nothing of it.

    Args:
        config: The whole ``config.json``.
        where: Names the file in errors.

    Raises:
        CheckpointError: They are quantized in a way that is not read, or a field is wrong.
    """
    # The name that compressed-tensors had for it until 2024.
    name = "quantization_config" if config.get("quantization_config") is not None else "compression_config"
    fields = Fields(config, where).nested(name)
    if fields is None:
        return None
    method = fields.text("quant_method", "compressed-tensors" if name == "compression_config" else "unknown")
    reader = _READERS.get(method)
    if reader is None:
        raise _refusal(where, method, "")
    return reader(fields, lambda reason: _refusal(where, method, reason))


def _refusal(where: str, method: str, reason: str) -> CheckpointError:
    how = f" and {bounded(reason, 120)}" if reason else ""
    return CheckpointError(
        f"{where}: weights quantized with {bounded(method, 40)!r}{how} are not supported; what is read is {_READ}."
    )


def _fp8(fields: Fields, refuse: Refuse) -> Scheme:
    kind = fields.text("fmt", "e4m3")
    if kind != "e4m3":
        raise refuse(f"fmt {kind!r}")
    return Scheme(Layout.FLOAT, 8, block=_pair(fields, "weight_block_size"))


def _awq(fields: Fields, refuse: Refuse) -> Scheme:
    bits = fields.optional_integer("bits") or fields.optional_integer("w_bit")
    if bits is None:
        raise fields.wrong("bits", "the number of bits")
    if bits != 4:
        raise refuse(f"{bits} bits")
    version, backend = fields.text("version", "gemm").lower(), fields.text("backend", "auto").lower()
    if version != "gemm":
        raise refuse(f"version {version!r}")
    if backend == "llm-awq":
        raise refuse(f"backend {backend!r}")
    name = "group_size" if "group_size" in fields else "q_group_size"
    return Scheme(Layout.AWQ, bits, block=_group(fields, name))


def _gptq(fields: Fields, refuse: Refuse) -> Scheme:
    bits = fields.integer("bits")
    if bits not in (4, 8):
        raise refuse(f"{bits} bits")
    form = fields.optional_text("checkpoint_format") or fields.text("format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise refuse(f"format {form!r}")
    if fields.flag("is_marlin_format", default=False):
        raise refuse("format 'marlin'")
    words = fields.text("pack_dtype", "int32")
    if words != "int32":
        raise refuse(f"pack_dtype {words!r}")
    # GPTQModel's rules by module; those that begin with "-" only say what is not quantized.
    if any(not str(rule).startswith("-") for rule in fields.mapping("dynamic") or {}):
        raise refuse("other settings for some modules (dynamic)")
    return Scheme(
        Layout.GPTQ,
        bits,
        block=_group(fields, "group_size"),
        zero_offset=0 if form == "gptq_v2" else 1,
        symmetric=fields.flag("sym", default=False),
        ordered=fields.flag("desc_act", default=False),
    )


def _compressed(fields: Fields, refuse: Refuse) -> Scheme:
    sparsity = fields.mapping("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise refuse(f"sparsity {sparsity['format']!r}")
    if fields.mapping("transform_config"):
        raise refuse("transforms")
    form, groups = fields.text("format", ""), fields.nested("config_groups") or Fields({}, "")
    schemes = set()
    for name in groups.names():
        group = groups.nested(name)
        weights = None if group is None else group.nested("weights")
        if group is None or weights is None:
            raise refuse("weights that are not quantized (activations are)")
        schemes.add(_compressed_group(weights, group.text("format", form), refuse))
    if len(schemes) != 1:
        raise refuse("groups of weights that differ" if schemes else "no config_groups")
    return schemes.pop()


def _compressed_group(weights: Fields, form: str, refuse: Refuse) -> Scheme:
    kind, bits = weights.text("type", "int"), weights.integer("num_bits", 8)
    read = {"float-quantized": ("float", (8,)), "int-quantized": ("int", (8,)), "pack-quantized": ("int", (4, 8))}
    wanted = (kind, (8,)) if form == "naive-quantized" else read.get(form)
    if wanted is None or kind not in ("int", "float"):
        raise refuse(f"format {form!r}")
    if kind != wanted[0] or bits not in wanted[1]:
        raise refuse(f"format {form!r} of {kind} with {bits} bits")
    strategy = weights.optional_text("strategy") or ("group" if _group(weights, "group_size") else "tensor")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise refuse(f"strategy {strategy!r}")
    block = {"group": _group(weights, "group_size"), "block": _pair(weights, "block_structure")}.get(strategy)
    if strategy == "block" and block is None:
        raise weights.wrong("block_structure", "rows and columns of a block")
    if strategy == "block" and kind == "int":
        raise refuse("blocks of integers")
    order = weights.raw("actorder")
    plain = Layout.FLOAT if kind == "float" else Layout.PLAIN
    layout = Layout.PACKED if form == "pack-quantized" else plain
    return Scheme(
        layout,
        bits,
        block=block,
        symmetric=weights.flag("symmetric", default=True),
        ordered=order in (True, "group", "dynamic") and layout is Layout.PACKED,
    )


def _group(fields: Fields, name: str) -> tuple[int, int] | None:
    """Returns the block that a group of so many columns is; None for whole rows (-1, or nothing)."""
    size = fields.integer(name, -1)
    if size != -1 and size < 1:
        raise fields.wrong(name, "a number of columns")
    return None if size == -1 else (1, size)


def _pair(fields: Fields, name: str) -> tuple[int, int] | None:
    """Returns two positive integers; None where there are none."""
    value = fields.raw(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or any(type(item) is not int or item < 1 for item in value):
        raise fields.wrong(name, "rows and columns of a block")
    return value[0], value[1]


_READERS: dict[str, Callable[[Fields, Refuse], Scheme]] = {
    "fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
}
