"""Quantized safetensors checkpoints, packed as the definitions of their formats say, and their dense twins.

Nothing here is shared with the reader: numbers are drawn, packed with shifts, and dequantized in float64 by the
formula. Every `Packing` is one way in which checkpoints of the field are written.

Legend: N rows and K columns of a weight, G groups of columns.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.fakes.checkpoints import write_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

Tensor = tuple[str, "npt.NDArray[Any]"]
"""A type of safetensors, and what is stored."""

PROJECTIONS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Packing:
    """How weights are quantized and written.

    Attributes:
        kind: ``awq``, ``gptq``, ``packed``, ``int8`` or ``fp8``.
        bits: of an integer.
        group: columns that share a scale; 0 where a whole row does, -1 where all do.
        block: rows and columns that share a scale, of ``fp8``.
        symmetric: zeros are the middle of the range.
        version: of GPTQ's format.
        order: how columns are spread over groups: not at all, by a permutation, or by one of whole blocks of 32.
        scale: type of the scales.
        inverse: the scale of ``fp8`` is called ``weight_scale_inv``.
        compressed: ``fp8`` as compressed-tensors has it.
        activations: there are scales for activations.
    """

    kind: str
    bits: int = 4
    group: int = 32
    block: tuple[int, int] | None = None
    symmetric: bool = False
    version: int = 1
    order: str = ""
    scale: str = "F16"
    inverse: bool = False
    compressed: bool = False
    activations: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` says, as the tools write it."""
        size = self.group or -1
        if self.kind == "awq":
            return {
                "quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True,
                "modules_to_not_convert": ["lm_head"],
            }  # fmt: skip
        if self.kind == "gptq":
            return {
                "quant_method": "gptq", "bits": self.bits, "group_size": size, "desc_act": self.order == "columns",
                "sym": self.symmetric, "damp_percent": 0.1, "true_sequential": True,
                **({"checkpoint_format": "gptq_v2"} if self.version == 2 else {}),
            }  # fmt: skip
        if self.kind == "fp8" and not self.compressed:
            return {
                "quant_method": "fp8", "activation_scheme": "static" if self.activations else "dynamic",
                "ignored_layers": ["lm_head"], "weight_block_size": None if self.block is None else list(self.block),
            }  # fmt: skip
        strategy = {0: "channel", -1: "tensor"}.get(self.group, "group")
        weights = {
            "num_bits": 8 if self.kind == "fp8" else self.bits,
            "type": "float" if self.kind == "fp8" else "int",
            "symmetric": self.symmetric or self.kind == "fp8",
            "strategy": strategy if self.block is None else "block",
            "group_size": self.group if self.block is None and self.group > 0 else None,
            "block_structure": None if self.block is None else list(self.block),
            "actorder": "group" if self.order == "columns" else None,
            "dynamic": False,
            "observer": "minmax",
        }
        form = {"packed": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}[self.kind]
        return {
            "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
            "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": weights, "output_activations": None,
                "input_activations": {"num_bits": 8, "dynamic": True} if self.kind in ("int8", "fp8") else None,
            }},
            "ignore": ["lm_head"], "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {},
        }  # fmt: skip

    def draw(
        self, rng: np.random.Generator, rows: int, columns: int, std: float = 0.1
    ) -> tuple[dict[str, Tensor], npt.NDArray[np.float64]]:
        """Returns the tensors of a module by role, and the weight ``[N, K]`` that they stand for, in float64."""
        if self.kind == "fp8":
            return self._draw_floats(rng, rows, columns, std)
        width = self.group if self.group > 0 else columns
        count, most = -(-columns // width), 1 << self.bits
        groups = self._groups(rng, columns, width)
        q = rng.integers(0, most, (rows, columns))
        zeros = np.full((rows, count), most // 2) if self.symmetric else rng.integers(0, most, (rows, count))
        shape = (1, 1) if self.group == -1 else (rows, count)
        if self.group == -1:
            zeros = zeros[:1, :1]
        scales = _rounded(std * 3.5 / most * np.exp(0.5 * rng.standard_normal(shape)), self.scale)
        weight = np.broadcast_to(scales, (rows, count))[:, groups] * (
            q - np.broadcast_to(zeros, (rows, count))[:, groups]
        )
        return self._tensors(q, zeros, scales, groups), weight

    def _groups(self, rng: np.random.Generator, columns: int, width: int) -> npt.NDArray[np.int64]:
        groups = np.arange(columns) // width
        if self.order == "columns":
            return rng.permutation(groups)
        if self.order == "blocks":
            return groups.reshape(-1, 32)[rng.permutation(columns // 32)].reshape(-1)
        return groups

    def _tensors(
        self, q: npt.NDArray[Any], zeros: npt.NDArray[Any], scales: npt.NDArray[Any], groups: npt.NDArray[Any]
    ) -> dict[str, Tensor]:
        middle = 1 << (self.bits - 1)
        rows, columns = q.shape
        order = {"g_idx": ("I32", groups.astype(np.int32))}
        if self.kind == "awq":
            return {
                "qweight": ("I32", words(q.T, 4, _AWQ)),
                "qzeros": ("I32", words(zeros.T, 4, _AWQ)),
                "scales": _stored(scales.T, self.scale),
            }
        if self.kind == "gptq":
            kept = words(zeros.T, self.bits).view(np.uint32)
            if self.version == 1:  # as GPTQModel does: whole words
                kept = kept - np.uint32(0x11111111 if self.bits == 4 else 0x01010101)
            return {
                "qweight": ("I32", words(q, self.bits).T.copy()),
                "qzeros": ("I32", kept.view(np.int32)),
                "scales": _stored(scales.T, self.scale),
            } | order
        if self.kind == "packed":
            stated = {
                "weight_packed": ("I32", words(q, self.bits)),
                "weight_scale": _stored(scales, self.scale),
                "weight_shape": ("I64", np.array([rows, columns], np.int64)),
            }
            if not self.symmetric:
                stated["weight_zero_point"] = ("I32", words(zeros.T, self.bits).T.copy())
            return stated | ({"weight_g_idx": order["g_idx"]} if self.order else {})
        whole = scales[0] if self.group == -1 else scales
        stated = {"weight": ("I8", (q - middle).astype(np.int8)), "weight_scale": _stored(whole, self.scale)}
        if not self.symmetric:
            signed = (zeros - middle).astype(np.int8)
            stated["weight_zero_point"] = ("I8", signed[0] if self.group == -1 else signed)
        return stated

    def _draw_floats(
        self, rng: np.random.Generator, rows: int, columns: int, std: float
    ) -> tuple[dict[str, Tensor], npt.NDArray[np.float64]]:
        codes = (rng.integers(0, 2, (rows, columns)) << 7 | rng.integers(0, 72, (rows, columns))).astype(np.uint8)
        if self.block is not None:
            height, width = self.block
            shape: tuple[int, ...] = (-(-rows // height), -(-columns // width))
        else:
            height, width = (rows, columns) if self.group == -1 else (1, columns)
            shape = () if self.group == -1 and self.inverse else (1,) if self.group == -1 else (rows, 1)
        scales = _rounded(std * np.exp(0.3 * rng.standard_normal(shape)), self.scale)
        down, across = np.arange(rows) // height, np.arange(columns) // width
        spread = scales.reshape(-1, 1) if scales.ndim < 2 else scales
        weight = e4m3(codes) * spread[down][:, across]
        name = "weight_scale_inv" if self.inverse else "weight_scale"
        stated = {"weight": ("F8_E4M3", codes), name: _stored(scales, self.scale)}
        if self.activations:
            stated["input_scale"] = ("F32", np.ones(1, np.float32))
        return stated, weight


PACKINGS: Mapping[str, Packing] = {
    "awq": Packing("awq"),
    "awq, groups of 64": Packing("awq", group=64),
    "awq, one group": Packing("awq", group=0),
    "gptq": Packing("gptq", symmetric=True),
    "gptq, zeros": Packing("gptq", group=64),
    "gptq, v2": Packing("gptq", version=2),
    "gptq, act-order": Packing("gptq", order="columns"),
    "gptq, blocks out of order": Packing("gptq", order="blocks"),
    "gptq, one group": Packing("gptq", group=0, symmetric=True),
    "gptq, groups of 20": Packing("gptq", group=20),
    "gptq, 8 bits": Packing("gptq", bits=8, symmetric=True),
    "gptq, 8 bits, zeros": Packing("gptq", bits=8),
    "gptq, 8 bits, v2, act-order": Packing("gptq", bits=8, version=2, order="columns"),
    "gptq, float32 scales": Packing("gptq", scale="F32"),
    "packed": Packing("packed", symmetric=True, scale="BF16"),
    "packed, zeros": Packing("packed", scale="BF16"),
    "packed, channels": Packing("packed", group=0, symmetric=True),
    "packed, act-order": Packing("packed", symmetric=True, order="columns"),
    "packed, 8 bits": Packing("packed", bits=8, symmetric=True, scale="BF16"),
    "int8": Packing("int8", bits=8, group=0, symmetric=True, scale="BF16"),
    "int8, zeros": Packing("int8", bits=8, group=0, scale="F32"),
    "int8, one scale": Packing("int8", bits=8, group=-1, scale="F32"),
    "fp8": Packing("fp8", group=-1, scale="F32", activations=True),
    "fp8, inverse": Packing("fp8", group=-1, scale="F32", inverse=True),
    "fp8, blocks": Packing("fp8", block=(48, 32), scale="F32", inverse=True),
    "fp8, compressed": Packing("fp8", group=0, scale="BF16", compressed=True),
    "fp8, compressed, one scale": Packing("fp8", group=-1, scale="BF16", compressed=True, activations=True),
    "fp8, compressed, blocks": Packing("fp8", block=(128, 128), scale="BF16", compressed=True),
}


def words(numbers: npt.NDArray[Any], bits: int, order: tuple[int, ...] | None = None) -> npt.NDArray[np.int32]:
    """Returns ``[r, c]`` numbers in words of 32 bits, of a row: number ``order[i]`` of each from bit ``i bits`` on."""
    per = 32 // bits
    padded = np.pad(numbers.astype(np.uint64), ((0, 0), (0, -numbers.shape[1] % per)))
    packed = np.zeros((len(padded), padded.shape[1] // per), np.uint64)
    for place, number in enumerate(order or range(per)):
        packed += padded[:, number::per] << np.uint64(bits * place)
    return packed.astype(np.uint32).view(np.int32)


def e4m3(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Returns what bytes are: a sign, four bits of an exponent with a bias of 7, three of a fraction."""
    bits = codes.astype(np.int64)
    sign, exponent, fraction = 1.0 - 2.0 * (bits >> 7), bits >> 3 & 15, (bits & 7) / 8
    return sign * np.where(exponent > 0, 2.0 ** (exponent - 7) * (1 + fraction), 2.0**-6 * fraction)


def _rounded(values: npt.NDArray[np.float64], kind: str) -> npt.NDArray[np.float64]:
    """Returns the nearest numbers of a type, or almost."""
    if kind == "BF16":
        return (np.asarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(float)
    return np.asarray(values, {"F16": np.float16, "F32": np.float32}[kind]).astype(float)


def _stored(values: npt.NDArray[np.float64], kind: str) -> Tensor:
    if kind == "BF16":
        return kind, (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(
            values.shape
        )
    return kind, np.ascontiguousarray(values, {"F16": np.float16, "F32": np.float32}[kind]).reshape(values.shape)


@dataclass
class Written:
    """A checkpoint with some weights packed, and one with the same weights in float32."""

    packed: Path
    dense: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def rewrite(self, **changes: Tensor | None) -> None:
        """Writes the packed one again with other tensors; None leaves one out. Names have ``__`` for dots."""
        for name, tensor in changes.items():
            if tensor is None:
                del self.tensors[name.replace("__", ".")]
            else:
                self.tensors[name.replace("__", ".")] = tensor
        write_tensors(self.packed, self.tensors)


def write_packed_llama(
    path: Path, packing: Packing, *, seed: int = 0, skip: tuple[str, ...] = (), **shape: Any
) -> Written:
    """Writes both checkpoints below ``path``.

    Args:
        path: A directory.
        packing: How all projections are packed.
        seed: Of all numbers.
        skip: Projections that stay dense.
        shape: As `write_tiny_llama` takes it.
    """
    written = Written(
        write_tiny_llama(path / "packed", seed=seed, **shape), write_tiny_llama(path / "dense", seed=seed, **shape)
    )
    dense, rng = read_tensors(written.dense), np.random.default_rng(seed + 1)
    for name, (kind, values) in list(dense.items()):
        stem = name.removesuffix(".weight")
        module = stem.split(".", 3)[-1]
        if module not in PROJECTIONS or module in skip or not name.endswith(".weight"):
            written.tensors[name] = (kind, values)
            continue
        tensors, weight = packing.draw(rng, *values.shape, std=1.5 / values.shape[1] ** 0.5)
        dense[name] = ("F32", weight.astype(np.float32))
        written.tensors |= {f"{stem}.{role}": tensor for role, tensor in tensors.items()}
    write_tensors(written.dense, dense)
    write_tensors(written.packed, written.tensors)
    edit_config(written.packed, quantization_config=packing.config)
    return written


def edit_config(path: Path, **values: Any) -> None:
    """Changes some fields of a checkpoint's ``config.json``."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values), encoding="utf-8")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint in float32."""
    data = (path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = ("F32", np.frombuffer(data[begin:end], np.float32).reshape(entry["shape"]))
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes ``model.safetensors`` into a directory."""
    header, end = {}, 0
    for name, (kind, values) in tensors.items():
        start, end = end, end + values.nbytes
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    parts = (np.ascontiguousarray(values).tobytes() for _, values in tensors.values())
    (path / "model.safetensors").write_bytes(b"".join([struct.pack("<Q", len(text)), text, *parts]))
