"""Attention on the CPU with the compiled kernels.

The layout of the cache and the order of reduction are described in ``kernels/csrc/attention_types.hpp``.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref
from typing import TYPE_CHECKING, Any

import torch

from tercet_shared.errors import ConfigurationError, InternalError
from tercet_worker.attention import checks
from tercet_worker.attention.interface import AttentionBatch, AttentionPlanError, AttentionSpec, KvStorage
from tercet_worker.attention.pages import PagesAhead
from tercet_worker.kernels.arena import Arena
from tercet_worker.kernels.attention_abi import AttentionConfig, AttentionProblem, AttentionStep, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from tercet_worker.kernels.library import Isa, KernelLibrary

_KEY_TILE = 16
_RUN_KEYS = 256
"""Keys of a run of blocks, as of a split: what the kernels read of one head as one stream."""
_MAX_HEAD_SIZE = 512
_MAX_GROUP_HEADS = 64
_ERRORS = {
    Problem.QUERY_START: checks.query_start_error,
    Problem.TOKEN_COUNT: checks.token_count_error,
    Problem.SLOT: checks.slot_error,
    Problem.CONTEXT: checks.context_error,
    Problem.CONTEXT_BLOCKS: checks.context_blocks_error,
    Problem.BLOCK: checks.block_error,
    Problem.SLOT_MAPPING: checks.slot_mapping_error,
}


class CpuAttention:
    """Implements ``AttentionBackend`` with C++ kernels and OpenMP.

    A row's result is the same to the bit alone and in any batch, as prefill, chunk and decode, with any number of
    threads (for one instruction set).

    Args:
        spec: head sizes are multiples of 16 up to 512, block sizes multiples of 16, at most 64 query heads per KV head.
        library: the loaded kernels.
        threads: OpenMP threads to use, at least 1; small steps use one.
        isa: instruction set to use; the best one for None.

    Raises:
        ConfigurationError: the kernels are not made for this model or machine.
    """

    def __init__(self, spec: AttentionSpec, library: KernelLibrary, *, threads: int, isa: Isa | None = None) -> None:
        _check_spec(spec, threads)
        self.spec = spec
        self.isa = library.require(isa)
        self.threads = threads
        self._cdll = library.cdll
        # Looked up once: attribute access on a CDLL costs as much as the call.
        self._forward: Any = library.cdll.tercet_attention_forward
        self._step = AttentionStep()
        self._problem = AttentionProblem()
        self._handle: int | None = None
        self._release: weakref.finalize[Any, CpuAttention] | None = None
        self._storage: KvStorage | None = None
        self._tokens = -1
        self._element = spec.dtype.itemsize
        self._q_shape = (0, 0, 0)
        self._kv_shape = (0, 0, 0)

    @property
    def name(self) -> str:
        """Platform and instruction set."""
        return f"cpu-{self.isa.name.lower()}"

    @property
    def handle(self) -> int | None:
        """The kernels' object, for a program that attends by itself; None before ``allocate_kv``."""
        return self._handle

    def pages_ahead(self) -> PagesAhead:
        """Returns what takes the pages of the cache a little before they are used. Its cache is allocated."""
        if self._storage is None:
            raise InternalError("there is no KV cache yet")
        return PagesAhead(self._storage)

    def bytes_per_block(self, num_layers: int) -> int:
        """Returns the bytes of one block in all layers; the last run of blocks may be filled up with unused ones."""
        return self.spec.bytes_per_block(num_layers)

    def allocate_kv(self, num_layers: int, num_blocks: int) -> KvStorage:
        """Maps the cache, in whole runs of blocks; its pages are taken from the system when they are first written."""
        spec = self.spec
        if num_layers < 1 or num_blocks < 1:
            raise ConfigurationError(f"a KV cache of {num_layers} layers and {num_blocks} blocks makes no sense")
        if spec.sliding_windows and len(spec.sliding_windows) != num_layers:
            raise ConfigurationError(f"{len(spec.sliding_windows)} sliding windows were given for {num_layers} layers")
        self._give_up()
        run_blocks = min(max(1, _RUN_KEYS // spec.block_size), num_blocks)
        nbytes = -(-num_blocks // run_blocks) * run_blocks * self.bytes_per_block(num_layers)
        try:
            arena = Arena(nbytes)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"the KV cache of {nbytes} bytes cannot be allocated: {error}") from error
        storage = KvStorage(
            arena.memory,
            num_layers,
            num_blocks,
            arena.huge_pages_requested,
            run_blocks=run_blocks,
            parts=2 * spec.num_kv_heads,
        )
        windows = (ctypes.c_int32 * num_layers)(*spec.sliding_windows)
        config = AttentionConfig(
            kv=storage.memory.data_ptr(),
            windows=ctypes.cast(windows, ctypes.c_void_p),
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=spec.block_size,
            run_blocks=run_blocks,
            query_heads=spec.num_query_heads,
            kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=0 if spec.dtype == torch.float32 else 1,
            isa=int(self.isa),
            threads=self.threads,
            scale=spec.scale,
            soft_cap=spec.logit_soft_cap,
        )
        handle = self._cdll.tercet_attention_create(byref(config), byref(self._problem))
        if handle is None:
            raise ConfigurationError(
                f"the attention kernels refused their configuration (problem {self._problem.code})"
            )
        self._handle = handle
        self._release = weakref.finalize(self, self._cdll.tercet_attention_destroy, handle)
        self._storage = storage  # kept: the kernels hold its address
        return storage

    def plan(self, batch: AttentionBatch) -> None:
        """Validates the step in C++, keeps where the blocks it needs are, and cuts it into tasks."""
        self._tokens = -1
        if self._handle is None:
            raise checks.no_plan_error()
        checks.check_layout(batch)
        step = self._step
        step.query_start_loc = batch.query_start_loc.data_ptr()
        step.seq_lens = batch.seq_lens.data_ptr()
        step.slots = batch.slots.data_ptr()
        step.block_table = batch.block_table.data_ptr()
        step.slot_mapping = batch.slot_mapping.data_ptr()
        step.max_slots, step.max_blocks = batch.block_table.shape
        step.block_table_stride = step.max_blocks
        step.requests = batch.seq_lens.numel()
        step.tokens = batch.num_tokens
        if self._cdll.tercet_attention_plan(self._handle, byref(step), byref(self._problem)):
            raise self._error()
        self._tokens = batch.num_tokens
        self._q_shape = (batch.num_tokens, self.spec.num_query_heads, self.spec.head_size)
        self._kv_shape = (batch.num_tokens, self.spec.num_kv_heads, self.spec.head_size)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Writes K and V and attends. Costs a few microseconds of Python per call."""
        if self._tokens < 0:
            raise checks.no_plan_error()
        q_stride, k_stride, v_stride, out_stride = q.stride(), k.stride(), v.stride(), out.stride()
        inner = (self.spec.head_size, 1)
        dtype = self.spec.dtype
        if not (
            q.shape == out.shape == self._q_shape
            and k.shape == v.shape == self._kv_shape
            and q_stride[1:] == k_stride[1:] == v_stride[1:] == out_stride[1:] == inner
            and q.dtype is k.dtype is v.dtype is out.dtype is dtype
            and q.is_cpu
            and k.is_cpu
            and v.is_cpu
            and out.is_cpu
        ):
            checks.check_tensors(self.spec, self._tokens, q, k, v, out)  # says what is wrong
        size = self._element
        code = self._forward(
            self._handle,
            layer,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            q_stride[0] * size,
            k_stride[0] * size,
            v_stride[0] * size,
            out_stride[0] * size,
        )
        if code:
            raise AttentionPlanError(f"layer {layer} was refused: {Problem(code).name}", row=None)

    def _give_up(self) -> None:
        if self._release is not None:
            self._release()
        self._release = self._handle = self._storage = None
        self._tokens = -1

    def _error(self) -> Exception:
        problem = self._problem
        code = Problem(problem.code)
        if code is Problem.MEMORY:
            return MemoryError("no memory to plan the attention of this step")
        return _ERRORS[code](problem.row, problem.value, problem.limit)


def _check_spec(spec: AttentionSpec, threads: int) -> None:
    if spec.block_size < _KEY_TILE or spec.block_size % _KEY_TILE:
        raise ConfigurationError(
            f"the CPU attention kernels need a block size that is a multiple of {_KEY_TILE}, not {spec.block_size}"
        )
    if not 0 < spec.head_size <= _MAX_HEAD_SIZE or spec.head_size % 16:
        raise ConfigurationError(
            f"the CPU attention kernels need a head size that is a multiple of 16 up to {_MAX_HEAD_SIZE}, "
            f"not {spec.head_size}"
        )
    if spec.num_query_heads // spec.num_kv_heads > _MAX_GROUP_HEADS:
        raise ConfigurationError(
            f"the CPU attention kernels take at most {_MAX_GROUP_HEADS} query heads per key/value head"
        )
    if threads < 1:
        raise ConfigurationError(f"attention needs at least one thread, not {threads}")
