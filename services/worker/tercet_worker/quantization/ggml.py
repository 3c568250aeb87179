"""The block formats of GGUF files, taken apart.

Source: the structs ``block_q4_0`` … ``block_q6_K`` of ggml. Every weight is what ggml's own dequantization makes of it.
Legend: N rows, n blocks or super-blocks of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tercet_worker.quantization.blocks import Blocks, WeightFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

_SUPER = 256
"""Weights of a super-block of the K formats."""
_PLAIN = 32
"""Weights of a block of the others."""


def format_of(kind: str) -> WeightFormat:
    """Returns the format that keeps weights of a ggml type exactly; DENSE where there is none."""
    entry = _KINDS.get(kind)
    return entry[0] if entry is not None else WeightFormat.DENSE


def block_of(kind: str) -> tuple[int, int]:
    """Returns the weights and the bytes of a block of a ggml type, 0 where it is not one of those that are known."""
    if kind not in _KINDS:
        return 0, 0
    size = _KINDS[kind][1]
    return (_SUPER if kind.endswith("_K") else _PLAIN), size


def decode(kind: str, rows: npt.NDArray[np.uint8]) -> Blocks:
    """Returns rows of a tensor, ``[N, bytes per row]`` as stored, in `format_of` their type (which is not DENSE)."""
    target, size, take = _KINDS[kind]
    raw = np.ascontiguousarray(rows).reshape(len(rows), -1, size)  # [N, n, size]
    return take(target, raw)


def _halves(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float16]:
    """Returns the float16 that two bytes ``[N, n, 2]`` are, ``[N, n]``."""
    return np.ascontiguousarray(raw).view(np.float16)[..., 0]


def _flat(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Returns ``[N, n, …]`` integers as bytes ``[N, columns]``."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def _nibbles(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Returns the low halves of the bytes, then the high ones, along the last axis."""
    return np.concatenate([raw & 0xF, raw >> 4], axis=-1)


def _fifth_bits(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Returns bit 4 of 32 weights from four bytes ``[N, n, 4]``: ``[N, n, 32]``, 0 or 16."""
    return np.left_shift(np.unpackbits(raw, axis=-1, bitorder="little"), 4, dtype=np.uint8)


def _q4_0(target: WeightFormat, raw: npt.NDArray[np.uint8]) -> Blocks:
    scales = _halves(raw[..., :2])
    return Blocks(target, _flat(_nibbles(raw[..., 2:])), scales, (-8 * scales).astype(np.float16))


def _q4_1(target: WeightFormat, raw: npt.NDArray[np.uint8]) -> Blocks:
    return Blocks(target, _flat(_nibbles(raw[..., 4:])), _halves(raw[..., :2]), _halves(raw[..., 2:4]))


def _q5_0(target: WeightFormat, raw: npt.NDArray[np.uint8]) -> Blocks:
    q = (_nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])).astype(np.int8) - np.int8(16)
    return Blocks(target, _flat(q), _halves(raw[..., :2]), None)


def _q5_1(target: WeightFormat, raw: npt.NDArray[np.uint8]) -> Blocks:
    q = _nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8])
    scales, minima = (np.repeat(_halves(raw[..., at : at + 2]).astype(np.float32), 2, axis=1) for at in (0, 2))
    return Blocks(target, _flat(q), scales, minima)


def _q8_0(target: WeightFormat, raw: npt.NDArray[np.uint8]) -> Blocks:
    return Blocks(target, _flat(raw[..., 2:]), _halves(raw[..., :2]), None)


def _six_bits(raw: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Returns the scales and minima of eight sub-blocks that twelve bytes ``[N, n, 12]`` hold, ``[N, n, 8]`` each."""
    first, second, third = raw[..., :4], raw[..., 4:8], raw[..., 8:]
    scales = np.concatenate([first & 63, (third & 0xF) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    return scales, minima


def _sub_blocks(raw: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Returns float32 scales and minima ``[N, 8 n]`` of super-blocks that begin with d, dmin and twelve bytes."""
    scales, minima = _six_bits(raw[..., 4:16])
    d, dmin = (_halves(raw[..., at : at + 2]).astype(np.float32)[..., None] for at in (0, 2))
    rows = len(raw)
    return (d * scales).reshape(rows, -1), -(dmin * minima).reshape(rows, -1)


def _pairs_of_32(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Returns four bits of 256 weights from 128 bytes: each 32 bytes hold 32 weights low and the next 32 high."""
    return _nibbles(raw.reshape(*raw.shape[:-1], 4, 32)).reshape(*raw.shape[:-1], _SUPER)


def _q4_k(target: WeightFormat, raw: npt.NDArray[np.uint8]) -> Blocks:
    scales, minima = _sub_blocks(raw)
    return Blocks(target, _flat(_pairs_of_32(raw[..., 16:])), scales, minima)


def _q5_k(target: WeightFormat, raw: npt.NDArray[np.uint8]) -> Blocks:
    scales, minima = _sub_blocks(raw)
    # Bit i of byte j is the fifth bit of weight j of sub-block i.
    high = np.stack([(raw[..., 16:48] >> i & 1) << 4 for i in range(8)], axis=-2).reshape(*raw.shape[:-1], _SUPER)
    q = _pairs_of_32(raw[..., 48:]) | high
    return Blocks(target, _flat(q), np.repeat(scales, 2, axis=1), np.repeat(minima, 2, axis=1))


def _q6_k(target: WeightFormat, raw: npt.NDArray[np.uint8]) -> Blocks:
    # Each half of a super-block: 64 bytes of low bits, 32 of high ones, for four runs of 32 weights.
    low = raw[..., :128].reshape(*raw.shape[:-1], 2, 64)
    high = raw[..., 128:192].reshape(*raw.shape[:-1], 2, 32)
    runs = [
        (low[..., :32] & 0xF) | ((high & 3) << 4),
        (low[..., 32:] & 0xF) | ((high >> 2 & 3) << 4),
        (low[..., :32] >> 4) | ((high >> 4 & 3) << 4),
        (low[..., 32:] >> 4) | ((high >> 6) << 4),
    ]
    q = np.concatenate(runs, axis=-1).astype(np.int8) - np.int8(32)
    d = _halves(raw[..., 208:210]).astype(np.float32)[..., None]
    scales = (d * raw[..., 192:208].view(np.int8)).reshape(len(raw), -1)
    return Blocks(target, _flat(q), scales, np.zeros_like(scales))


_KINDS: dict[str, tuple[WeightFormat, int, Callable[[WeightFormat, npt.NDArray[np.uint8]], Blocks]]] = {
    "Q4_0": (WeightFormat.FOUR, 18, _q4_0),
    "Q4_1": (WeightFormat.FOUR, 20, _q4_1),
    "Q5_0": (WeightFormat.EIGHT, 22, _q5_0),
    "Q5_1": (WeightFormat.EIGHT_WIDE, 24, _q5_1),
    "Q8_0": (WeightFormat.EIGHT, 34, _q8_0),
    "Q4_K": (WeightFormat.FOUR_WIDE, 144, _q4_k),
    "Q5_K": (WeightFormat.EIGHT_WIDE, 176, _q5_k),
    "Q6_K": (WeightFormat.EIGHT_WIDE, 210, _q6_k),
}
"""The format that a type is kept in, bytes of one of its blocks, and how they are taken apart."""
