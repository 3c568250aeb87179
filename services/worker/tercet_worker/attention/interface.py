"""The interface of attention over the paged KV cache, the same on every platform.

Shape suffixes in this package:

    T    tokens of the step, padding included       R    requests in the step
    Hq   query heads                                S    slots (rows of the persistent block table)
    Hkv  key/value heads                            N    blocks of the cache
    G    Hq / Hkv                                   B    tokens per block (block size)
    D    head size                                  M    most blocks of one request (columns of the block table)

Life cycle: construct, ``allocate_kv`` once, then per step ``plan`` once and ``forward`` once per layer, in order, on
one thread.

What a row (one token, one query head) computes depends on its query and the keys and values of its request up to its
own position: on nothing that happens to be in the same batch, and on nothing that lies in unused parts of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tercet_shared.errors import ConfigurationError, InternalError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tercet_worker.graphs.dispatch import Choice

PADDING = -1
"""Slot mapping of a token whose key and value are not written."""


class AttentionPlanError(InternalError):
    """A step refers to something outside the cache, the block table or the batch. Nothing was touched.

    Attributes:
        row: the request (or, for the slot mapping, the token) that is at fault; None where no single one is.
    """

    def __init__(self, message: str, *, row: int | None) -> None:
        super().__init__(message)
        self.row = row


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What attention needs to know of a model. Raises ConfigurationError where it makes no sense."""

    num_query_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_size: int  # D
    block_size: int  # B
    dtype: torch.dtype  # of q, k, v, out and the cache: float32 or bfloat16
    scale: float  # factor of the scores, usually D ** -0.5
    logit_soft_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: none (Gemma 2)
    sliding_windows: tuple[
        int, ...
    ] = ()  # per layer: keys a query sees, itself included, 0 for all; empty: all layers see all

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_query_heads < 1 or self.num_query_heads % self.num_kv_heads:
            raise ConfigurationError(
                f"{self.num_query_heads} query heads cannot be divided among {self.num_kv_heads} key/value heads"
            )
        if self.dtype not in {torch.float32, torch.bfloat16}:
            raise ConfigurationError(f"attention is built for float32 and bfloat16, not {self.dtype}")
        if self.logit_soft_cap < 0 or any(window < 0 for window in self.sliding_windows):
            raise ConfigurationError("a logit soft cap or sliding window cannot be negative")

    def bytes_per_block(self, num_layers: int) -> int:
        """Returns the bytes of one block, keys and values of all layers."""
        return 2 * num_layers * self.num_kv_heads * self.block_size * self.head_size * self.dtype.itemsize

    def window(self, layer: int) -> int:
        """Returns the sliding window of ``layer``, 0 for none."""
        return self.sliding_windows[layer] if self.sliding_windows else 0


@dataclass(frozen=True, slots=True)
class HostAttention:
    """The same step as the host sees it, for a backend that plans there and must not wait for the device."""

    query_start_loc: npt.NDArray[np.int32]  # [R + 1]
    seq_lens: npt.NDArray[np.int32]  # [R]
    shared_blocks: int  # leading blocks that all rows share and none writes to, and that are worth a pass of their own
    choice: Choice  # how the device runs the step


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step. Tensors are contiguous and on the device of the backend.

    The CPU's backends keep what they need: there the tensors may change once ``plan`` has returned.

    Tokens of a request are consecutive, and its last query is the last token of its context: query i of n sits at
    position ``seq_lens - n + i``. Tokens from ``query_start_loc[R]`` on are padding: their output is zero. (Where a
    step is one graph, padding consists of rows, whose output is whatever they yield; nobody reads it.)
    """

    query_start_loc: Tensor  # int32[R + 1], first token of each request; begins with 0, strictly increasing
    seq_lens: Tensor  # int32[R], tokens of the context, those of this step included
    slots: Tensor  # int32[R], rows of block_table
    block_table: Tensor  # int32[S, M], block ids in order of position; entries beyond the context are not read
    slot_mapping: Tensor  # int64[T], block id * B + offset where K and V of the token go, or PADDING
    max_query_len: int  # most tokens of one request in this step
    num_tokens: int  # T
    host: HostAttention | None = None


@dataclass(frozen=True, slots=True)
class KvStorage:
    """Memory of the KV cache. What lies where within a part of a block is the backend's own business."""

    memory: Tensor  # uint8[nbytes]
    num_layers: int
    num_blocks: int  # N
    huge_pages: bool  # asked for and not refused
    run_blocks: int = 1  # R: blocks lie in runs of so many with consecutive ids, of which the last may reach beyond N
    parts: int = 1  # P: and a run lies part by part, such as keys and values of a head: [layers][runs][P][R]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.memory.numel()

    def block(self, block: int) -> Tensor:
        """Returns uint8[num_layers, P, bytes of a part of a block], a view of all that one block holds."""
        count = -(-self.num_blocks // self.run_blocks)
        runs = self.memory.view(self.num_layers, count, self.parts, self.run_blocks, -1)
        return runs[:, block // self.run_blocks, :, block % self.run_blocks]


class AttentionBackend(Protocol):
    """Attention on one platform."""

    @property
    def spec(self) -> AttentionSpec:
        """The model's side of the matter."""
        ...

    @property
    def name(self) -> str:
        """What is in use, for the log and the handshake, such as ``cpu-avx512bf16``."""
        ...

    def bytes_per_block(self, num_layers: int) -> int:
        """Returns the bytes that one block takes in the cache of a model with ``num_layers`` layers."""
        ...

    def allocate_kv(self, num_layers: int, num_blocks: int) -> KvStorage:
        """Allocates the cache and attends to it from now on; an earlier one is given up.

        Raises:
            ConfigurationError: it cannot be had (memory, or a number that makes no sense).
        """
        ...

    def plan(self, batch: AttentionBatch) -> None:
        """Validates a step and prepares for its layers. The previous plan is gone, also when this one is refused.

        Raises:
            AttentionPlanError: the step refers to something that does not exist. Nothing was touched.
        """
        ...

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Writes this step's keys and values of one layer to the cache, then attends.

        Args:
            layer: index of the layer.
            q: [T, Hq, D], with positions already applied. Rows may be apart (a slice of a fused projection); within a
                token contiguous.
            k: [T, Hkv, D], likewise.
            v: [T, Hkv, D], likewise.
            out: [T, Hq, D], likewise; every row is overwritten.

        Raises:
            AttentionPlanError: there is no plan, or shapes, dtypes or the layer do not fit it. Nothing was touched.
        """
        ...
