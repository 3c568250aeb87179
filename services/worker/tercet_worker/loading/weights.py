"""Fills a model from a checkpoint, some rows of one tensor at a time, strictly: nothing missing, nothing left over.

Rows are converted in pieces, so that the peak is the model and one piece, the time between two checks of ``progress``
is short, and a piece is still in the processor's cache when it is stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tercet_shared.checkpoint import (
    Checkpoint,
    ModelConfig,
    TensorEntry,
    WeightIndex,
    to_float32,
    unpermute_rope_rows,
)
from tercet_shared.errors import CheckpointError, bounded
from tercet_worker.layers.cut import Cut
from tercet_worker.layers.parameters import Destination, Placement
from tercet_worker.loading.memory import check_fits
from tercet_worker.models import CausalLM, create_model
from tercet_worker.models.registry import check_architecture
from tercet_worker.parallel.topology import SINGLE, Topology
from tercet_worker.quantization import (
    PackedRows,
    WeightFormat,
    block_of,
    decode,
    format_of,
    is_fp8,
    is_row_scaled,
    open_packed,
)

logger = logging.getLogger(__name__)

Progress = Callable[[float], None]
"""Told the fraction of bytes stored so far. What it raises ends the loading."""

_PIECE = 4 * 1024 * 1024
"""Elements converted at a time (16 MiB as float32)."""
_OVERHEAD = 256 * 1024 * 1024
"""Bytes beside the weights: a piece being converted, activations, the allocator."""


def load_model(
    checkpoint: Checkpoint, place: Placement, *, available: int, progress: Progress, topology: Topology = SINGLE
) -> CausalLM:
    """Builds the model of ``checkpoint``, or the share of it that one rank holds, and fills it.

    Args:
        checkpoint: what to load. Judged as a whole, whatever part of it is loaded.
        place: dtype and device of the model.
        available: bytes that the weights may take.
        progress: told how far the loading is.
        topology: the rank that loads.

    Raises:
        ConfigurationError: the model cannot be divided so.
        CheckpointError: the architecture is unknown, the model does not fit, or a tensor is missing, not known, of a
            wrong shape or of a type that cannot be read; one sentence names it.
    """
    check_architecture(checkpoint.architecture)
    config, index = checkpoint.config, checkpoint.weights
    # Built once without memory, so that what does not fit is refused before anything is allocated.
    bare = Placement(place.dtype, torch.device("meta"), fp8=place.fp8)
    check_tensors(create_model(config, bare), index)
    if index.unused:
        logger.info("neither activations nor the KV cache are scaled by the checkpoint's %d scales", len(index.unused))
    share = topology.share(config)
    # Packed matrices take their memory later, and less of it where they stay quantized.
    model = create_model(config, place if place.packed is not None else bare, share)
    _announce(model, index)
    needed = sum(destination.nbytes for destination in model.destinations().values())
    dtype = str(place.dtype).removeprefix("torch.")
    expanded = sum(
        is_fp8(index[name]) and not (destination.fp8 is not None and destination.fp8.takes())
        for name, destination in model.destinations().items()
    )
    if expanded:
        logger.info("%d FP8 weights of the checkpoint are made dense", expanded)
    part = "" if share.whole else f", the part of rank {topology.rank},"
    check_fits(needed + _OVERHEAD, available, f"The model {checkpoint.served_name} in {dtype}{part}")
    if place.packed is not None:
        place.packed.allocate()
    else:
        model = create_model(config, place, share)
        _announce(model, index)
    _fill(model.destinations(), index, config, progress)
    return model


def _announce(model: CausalLM, index: WeightIndex) -> None:
    for name, destination in model.destinations().items():
        if destination.quantized is not None:
            destination.quantized.announce(_format_of(index[name]))
        if destination.fp8 is not None:
            destination.fp8.announce(is_row_scaled(index[name]))


def check_tensors(model: CausalLM, index: WeightIndex) -> None:
    """Raises `CheckpointError` unless checkpoint and model agree on names and shapes."""
    destinations = model.destinations()
    for name, destination in destinations.items():
        entry = index[name]  # raises if it is missing
        if entry.shape != destination.shape:
            raise CheckpointError(
                f"The tensor {bounded(name, 200)!r} has the shape {list(entry.shape)}, "
                f"and the configuration says {list(destination.shape)}."
            )
    for name in index:
        if name not in destinations and not model.ignores(name) and not _adds_nothing(index, name):
            raise CheckpointError(
                f"The checkpoint holds a tensor {bounded(name, 200)!r} that the architecture has no place for."
            )


def _adds_nothing(index: WeightIndex, name: str) -> bool:
    """Says whether a tensor is a bias of zeros: GPTQ's tools give one to modules that had none."""
    stem, _, role = name.rpartition(".")
    weight = f"{stem}.weight"
    return (
        role == "bias" and weight in index and index[weight].packed is not None and not index.read_float32(name).any()
    )


def _format_of(entry: TensorEntry) -> WeightFormat:
    return format_of(entry.dtype) if entry.packed is None else open_packed(entry).format


def _fill(destinations: Mapping[str, Destination], index: WeightIndex, config: ModelConfig, progress: Progress) -> None:
    total = sum(index[name].nbytes for name in destinations)
    done = 0
    for name in index:  # in the order of the file, which reads ahead
        destination = destinations.get(name)
        if destination is None:
            continue
        entry = index[name]
        _store(destination, index, entry, config, partial(_report, progress, done, entry.nbytes, total))
        done += entry.nbytes


def _report(progress: Progress, done: int, nbytes: int, total: int, fraction: float) -> None:
    progress((done + nbytes * fraction) / total)


def _store(
    destination: Destination, index: WeightIndex, entry: TensorEntry, config: ModelConfig, progress: Progress
) -> None:
    """Stores one tensor, or the part of it that is kept."""
    if entry.packed is not None:
        return _store_packed(destination, entry, open_packed(entry), progress)
    rows, *more = destination.cuts or tuple(Cut.all(extent) for extent in entry.shape)
    columns = more[0] if more and more[0].partial else None
    stored = index.read(entry.name)[rows.begin : rows.end]
    if entry.rope_permuted:
        stored = unpermute_rope_rows(stored, _heads(stored, config))
    size = _piece(entry)
    quantized = destination.quantized
    as_blocks = quantized is not None and quantized.takes_blocks()
    for start in range(0, len(stored), size):
        piece = stored[start : start + size]
        left = columns
        if columns is not None and (taken := _take_columns(piece, entry, columns)) is not None:
            piece, left = taken, None
        if quantized is not None and as_blocks:
            blocks = decode(entry.dtype, piece)
            quantized.store(start, blocks if left is None else blocks.columns(left.begin, left.end))
        else:
            dense = _to_torch(piece, entry)
            destination.store(start, dense if left is None else dense[:, left.begin : left.end])
        progress((start + len(piece)) / len(stored))
    return None


def _store_packed(destination: Destination, entry: TensorEntry, packed: PackedRows, progress: Progress) -> None:
    """Stores a weight that several tensors stand for, or the part of it that is kept."""
    rows, columns = destination.cuts or tuple(Cut.all(extent) for extent in entry.shape)
    across, size = slice(columns.begin, columns.end), _piece(entry)
    quantized, fp8 = destination.quantized, destination.fp8
    as_blocks = quantized is not None and quantized.takes_blocks()
    as_fp8 = fp8 is not None and fp8.takes() and is_row_scaled(entry)
    for start in range(rows.begin, rows.end, size):
        down = slice(start, min(start + size, rows.end))
        if quantized is not None and as_blocks:
            quantized.store(start - rows.begin, packed.blocks(down, across))
        elif fp8 is not None and as_fp8:
            numbers, scales = packed.fp8(down, across)
            fp8.store(start - rows.begin, torch.from_numpy(numbers).view(torch.float8_e4m3fn), torch.from_numpy(scales))
        else:
            destination.store(start - rows.begin, torch.from_numpy(packed.dense(down, across)))
        progress((down.stop - rows.begin) / len(rows))


def _piece(entry: TensorEntry) -> int:
    """Returns how many rows are converted at a time."""
    return max(1, _PIECE * entry.shape[0] // max(entry.elements, 1))


def _take_columns(piece: npt.NDArray[Any], entry: TensorEntry, columns: Cut) -> npt.NDArray[Any] | None:
    """Returns columns of rows as they are stored; None where that would cut a quantized block in two."""
    if not entry.quantized:
        return piece[:, columns.begin : columns.end]
    weights, nbytes = block_of(entry.dtype)
    if not weights or columns.begin % weights or columns.end % weights:
        return None
    return piece[:, columns.begin // weights * nbytes : columns.end // weights * nbytes]


def _heads(stored: npt.NDArray[Any], config: ModelConfig) -> int:
    return len(stored) // config.head_dim  # of queries, or of keys and values


def _to_torch(piece: npt.NDArray[Any], entry: TensorEntry) -> torch.Tensor:
    """Returns rows as a tensor that owns its memory, in the stored dtype where torch has it, else in float32."""
    if entry.dtype == "BF16":
        return torch.from_numpy(np.array(piece).view(np.int16)).view(torch.bfloat16)
    if entry.dtype in ("F32", "F16"):
        return torch.from_numpy(np.array(piece))
    return torch.from_numpy(to_float32(piece, entry))
