"""Fills a model from a checkpoint, some rows of one tensor at a time, strictly: nothing missing, nothing left over.

Rows are converted in pieces, so that the peak is the model and one piece, the time between two checks of ``progress``
is short, and a piece is still in the processor's cache when it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from tercet_worker.layers.parameters import Destination, Placement
from tercet_worker.loading.memory import check_fits
from tercet_worker.models import CausalLM, create_model
from tercet_worker.models.registry import check_architecture
from tercet_worker.quantization import decode

Progress = Callable[[float], None]
"""Told the fraction of bytes stored so far. What it raises ends the loading."""

_PIECE = 4 * 1024 * 1024
"""Elements converted at a time (16 MiB as float32)."""
_OVERHEAD = 256 * 1024 * 1024
"""Bytes beside the weights: a piece being converted, activations, the allocator."""


def load_model(checkpoint: Checkpoint, place: Placement, *, available: int, progress: Progress) -> CausalLM:
    """Builds the model of ``checkpoint`` and fills it.

    Args:
        checkpoint: what to load.
        place: dtype and device of the model.
        available: bytes that the weights may take.
        progress: told how far the loading is.

    Raises:
        CheckpointError: the architecture is unknown, the model does not fit, or a tensor is missing, not known, of a
            wrong shape or of a type that cannot be read; one sentence names it.
    """
    check_architecture(checkpoint.architecture)
    config, index = checkpoint.config, checkpoint.weights
    # Built once without memory, so that what does not fit is refused before anything is allocated.
    outline = create_model(config, Placement(place.dtype, torch.device("meta")))
    check_tensors(outline, index)
    # Packed matrices take their memory later, and less of it where they stay quantized.
    model = create_model(config, place) if place.packed is not None else outline
    for name, destination in model.destinations().items():
        if destination.quantized is not None:
            destination.quantized.announce(index[name].dtype)
    needed = sum(destination.nbytes for destination in model.destinations().values())
    dtype = str(place.dtype).removeprefix("torch.")
    check_fits(needed + _OVERHEAD, available, f"The model {checkpoint.served_name} in {dtype}")
    if place.packed is not None:
        place.packed.allocate()
    else:
        model = create_model(config, place)
    _fill(model.destinations(), index, config, progress)
    return model


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
        if name not in destinations and not model.ignores(name):
            raise CheckpointError(
                f"The checkpoint holds a tensor {bounded(name, 200)!r} that the architecture has no place for."
            )


def _fill(destinations: Mapping[str, Destination], index: WeightIndex, config: ModelConfig, progress: Progress) -> None:
    total = sum(index[name].nbytes for name in destinations)
    done = 0
    for name in index:  # in the order of the file, which reads ahead
        destination = destinations.get(name)
        if destination is None:
            continue
        entry = index[name]
        stored = index.read(name)
        if entry.rope_permuted:
            stored = unpermute_rope_rows(stored, _heads(entry, config))
        rows = max(1, _PIECE * entry.shape[0] // max(entry.elements, 1))
        quantized = destination.quantized
        as_blocks = quantized is not None and quantized.takes_blocks()
        for start in range(0, entry.shape[0], rows):
            piece = stored[start : start + rows]
            if quantized is not None and as_blocks:
                quantized.store(start, decode(entry.dtype, piece))
            else:
                destination.store(start, _to_torch(piece, entry))
            progress((done + entry.nbytes * (start + len(piece)) / entry.shape[0]) / total)
        done += entry.nbytes


def _heads(entry: TensorEntry, config: ModelConfig) -> int:
    return entry.shape[0] // config.head_dim  # of queries, or of keys and values


def _to_torch(piece: npt.NDArray[Any], entry: TensorEntry) -> torch.Tensor:
    """Returns rows as a tensor that owns its memory, in the stored dtype where torch has it, else in float32."""
    if entry.dtype == "BF16":
        return torch.from_numpy(np.array(piece).view(np.int16)).view(torch.bfloat16)
    if entry.dtype in ("F32", "F16"):
        return torch.from_numpy(np.array(piece))
    return torch.from_numpy(to_float32(piece, entry))
