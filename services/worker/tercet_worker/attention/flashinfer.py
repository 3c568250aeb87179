"""Attention on a GPU with FlashInfer over our paged cache.

A step is planned once, on the host, for all layers: FlashInfer then knows how to divide the work. Its lists of pages
are written on the device from the block tables. The cache of a layer is ``[N, 2, B, Hkv, D]``.

Steps of decodes have a plan per number of rows, at the same addresses each time, so that they can be graphs. Other
steps are planned as prefill, which knows rows of any length. Where all rows share a long prefix, it is attended to
once for all of them (a cascade of two levels). Where results must not depend on the batch, rows for which FlashInfer
takes the same kernel are planned together, and no others.

Legend: see ``attention/interface.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tercet_shared.errors import ConfigurationError
from tercet_worker.attention.interface import PADDING, AttentionPlanError, KvStorage
from tercet_worker.cuda.kernels.cache import rotate_and_write, write
from tercet_worker.cuda.kernels.inputs import list_pages
from tercet_worker.cuda.layout import Pages, alike, pages_of
from tercet_worker.cuda.staging import Staging, room_for
from tercet_worker.graphs.dispatch import Choice, Mode
from tercet_worker.state.mirror import ragged_index, to_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tercet_worker.attention.interface import AttentionBatch, AttentionSpec, HostAttention
    from tercet_worker.attention.wrappers import Wrapper, Wrappers
    from tercet_worker.cuda.streams import Streams

_FIXED_SPLIT = 4096
"""Tokens that a part of a long context has in a decode whose result must not depend on the batch."""
_WARM_UPS = (1, 2, 128)
"""Tokens of steps of one row that between them need every kernel: a decode, a short prompt, and a long one."""


@dataclass(slots=True)
class _Part:
    """Rows that are attended for together."""

    wrappers: dict[int, Wrapper]  # by sliding window
    index: Tensor | None = None  # int64, the queries of the rows, where these are not all queries of the step


@dataclass(slots=True)
class _Planned:
    """The plan in force."""

    parts: list[_Part]
    choice: Choice
    queries: int  # that are attended for; what follows is padding
    slot_mapping: Tensor
    cascade: bool = False


@dataclass(slots=True)
class _Set:
    """The wrappers of one sliding window. Those of another are in use in the same step, so each has its schedules."""

    schedule: Tensor  # of the graphs
    graphs: dict[int, Wrapper] = field(default_factory=dict)  # by rows
    others: dict[str, Wrapper] = field(default_factory=dict)  # by what they are for


class FlashInferAttention:
    """Implements ``AttentionBackend`` and ``PagedAttention``.

    Args:
        spec: of a kind that the wrappers have kernels for.
        wrappers: of FlashInfer.
        streams: of the device.
        device: a GPU.
        max_rows: of a step.
        kv_dtype: of the cache: the model's, or float8_e4m3fn.
        batch_invariant: whether a row's result must not depend on the rest of the batch.

    Raises:
        ConfigurationError: FlashInfer has no kernels for this model.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        wrappers: Wrappers,
        streams: Streams,
        device: torch.device,
        *,
        max_rows: int,
        kv_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
    ) -> None:
        wrappers.check(spec)
        self.spec = spec
        self._make = wrappers
        self._streams = streams
        self._device = device
        self._max_rows = max_rows
        self._kv_dtype = kv_dtype or spec.dtype
        self._invariant = batch_invariant
        self._staging = Staging(room_for(*(max_rows + 1,) * 12), device, streams)
        self._planned_before = streams.event()
        self._sets = {window: _Set(wrappers.schedule()) for window in (set(spec.sliding_windows) or {0})}
        self._cache: Tensor | None = None  # [layers, N, 2, B, Hkv, D]
        self._pages = torch.empty(0, dtype=torch.int32, device=device)  # of all rows, end to end
        self._shared_pages = torch.empty(0, dtype=torch.int32, device=device)
        self._offsets = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._last_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._planned: _Planned | None = None

    @property
    def name(self) -> str:
        """Platform and kernels."""
        return "cuda-flashinfer" if self._kv_dtype is self.spec.dtype else "cuda-flashinfer-fp8kv"

    @property
    def cascades(self) -> bool:
        """Whether shared prefixes can be taken apart; with sliding windows a row does not see all of one."""
        return not any(self.spec.sliding_windows) and not self._invariant and self._kv_dtype is self.spec.dtype

    @property
    def choice(self) -> Choice:
        """See ``PagedAttention``."""
        return self._in_force().choice

    def bytes_per_block(self, num_layers: int) -> int:
        """Returns the bytes of one block in all layers."""
        return self.spec.bytes_per_block(num_layers) * self._kv_dtype.itemsize // self.spec.dtype.itemsize

    def allocate_kv(self, num_layers: int, num_blocks: int) -> KvStorage:
        """Allocates the cache, zeroed: what was never written must be finite, since kernels multiply it by 0."""
        spec = self.spec
        if num_layers < 1 or num_blocks < 1:
            raise ConfigurationError(f"a KV cache of {num_layers} layers and {num_blocks} blocks makes no sense")
        if spec.sliding_windows and len(spec.sliding_windows) != num_layers:
            raise ConfigurationError(f"{len(spec.sliding_windows)} sliding windows were given for {num_layers} layers")
        self._planned = None
        nbytes = num_blocks * self.bytes_per_block(num_layers)
        try:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise ConfigurationError(
                f"the KV cache of {nbytes / 2**30:.1f} GiB does not fit into the memory of the GPU"
            ) from error
        shape = (num_layers, num_blocks, 2, spec.block_size, spec.num_kv_heads, spec.head_size)
        self._cache = memory.view(self._kv_dtype).view(shape)
        # A block may be in the lists of many rows: of all that share it.
        self._pages = torch.zeros(self._max_rows, dtype=torch.int32, device=self._device)
        self._shared_pages = torch.zeros(num_blocks, dtype=torch.int32, device=self._device)
        return KvStorage(memory, num_layers, num_blocks, huge_pages=False)

    def reserve(self, pages: int) -> None:
        """Makes room for lists of ``pages`` pages in a step. To be called before plans and captures."""
        self._pages = torch.zeros(pages, dtype=torch.int32, device=self._device)
        for each in self._sets.values():
            each.graphs.clear()

    def plan(self, batch: AttentionBatch) -> None:
        """Plans a step on the host. Nothing waits for the device but a copy of the plan before."""
        self._planned = None
        cache, host = self._cache, batch.host
        if cache is None or host is None:
            raise AttentionPlanError("FlashInfer plans on the host, for a cache that is there", row=None)
        choice, shared = host.choice, host.shared_blocks
        if self._invariant:
            self._plan_apart(batch, host)
            return
        full = choice.mode is Mode.FULL
        rows = choice.tokens if full else None
        pages = pages_of(host.query_start_loc, host.seq_lens, self.spec.block_size, skip=shared, rows=rows)
        slots = batch.slots
        if rows is not None and rows > len(slots):
            # Padding reads a page of the first row, which has one; a slot that is not in the step may never have had.
            slots = torch.cat((slots, slots[:1].expand(rows - len(slots))))
        self._plan(pages, slots, batch.block_table, choice, batch.slot_mapping, shared)

    def plan_for_capture(self, rows: int) -> None:
        """See ``PagedAttention``."""
        self._plan_empty([1] * rows, Choice(Mode.FULL, rows))

    def warm_up(self) -> None:
        """Attends for steps of each kind, so that no request waits until kernels are compiled or loaded.

        To be called once lists have room.
        """
        most = len(self._pages) * self.spec.block_size
        for count in _WARM_UPS:
            self._try([min(count, most)], 0)
        if self.cascades:
            self._try([1], 1)
        self._planned = None

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Writes K and V, and attends."""
        write(k, v, self._in_force().slot_mapping, self._of(layer))
        self.attend(layer, q.contiguous(), out)

    def rotate_and_write(
        self, layer: int, qkv: Tensor, cosines: Tensor, sines: Tensor, slot_mapping: Tensor, queries: Tensor
    ) -> None:
        """See ``PagedAttention``."""
        rotate_and_write(qkv, cosines, sines, slot_mapping, queries, self._of(layer))

    def attend(self, layer: int, queries: Tensor, out: Tensor) -> None:
        """See ``PagedAttention``."""
        planned, cache, window = self._in_force(), self._of(layer), self.spec.window(layer)
        count = planned.queries
        for part in planned.parts:
            wrapper = part.wrappers[window]
            if part.index is not None:
                out.index_copy_(0, part.index, wrapper.run(queries.index_select(0, part.index), cache))
            elif planned.cascade:
                out[:count].copy_(wrapper.run(queries[:count], cache))
            else:
                wrapper.run(queries[:count], cache, out=out[:count])
        if count < len(out):
            out[count:].zero_()

    def _plan(
        self, pages: Pages, slots: Tensor, table: Tensor, choice: Choice, slot_mapping: Tensor, shared: int
    ) -> None:
        # FlashInfer copies its plan from memory that the next plan writes to.
        self._planned_before.synchronize()
        on_host, lists = self._list(pages, slots, table, 0)
        decodes = pages.query_starts[-1] == len(pages.last_lens)
        wrappers: dict[int, Wrapper] = {}
        for window, each in self._sets.items():
            options = self._options(window)
            if shared:
                wrappers[window] = self._plan_cascade(each, on_host, lists, slots, table, shared, options)
            elif choice.mode is Mode.FULL:
                wrappers[window] = self._graph(each, len(pages.last_lens))
                self._plan_decode(wrappers[window], on_host, lists, options)
            elif decodes:
                wrappers[window] = self._other(each, "decode", self._make.decode)
                self._plan_decode(wrappers[window], on_host, lists, options)
            else:
                wrappers[window] = self._other(each, "prefill", self._make.prefill)
                self._plan_prefill(wrappers[window], on_host, lists, options)
        self._planned_before.record()
        queries = int(pages.query_starts[-1])
        self._planned = _Planned([_Part(wrappers)], choice, queries, slot_mapping, cascade=shared > 0)

    def _plan_apart(self, batch: AttentionBatch, host: HostAttention) -> None:
        """Plans so that what a row computes depends on its own lengths alone.

        A decode is divided into parts of one size, and a longer row, of which there is enough to do, is not divided.
        (Its partial results would need memory for every query and part.)
        """
        self._planned_before.synchronize()
        counts = np.diff(host.query_start_loc)
        spec, parts, first = self.spec, list[_Part](), 0
        for kind, rows in alike(counts, spec.num_query_heads // spec.num_kv_heads):
            lens = counts[rows]
            owner, place = ragged_index(lens)
            starts = np.concatenate((np.zeros(1, np.int32), np.cumsum(lens, dtype=np.int32)))
            pages = pages_of(starts, host.seq_lens[rows], spec.block_size)
            slots = batch.slots.index_select(0, to_device(rows, self._device))
            on_host, lists = self._list(pages, slots, batch.block_table, first)
            first += pages.total
            wrappers: dict[int, Wrapper] = {}
            for window, each in self._sets.items():
                options = self._options(window)
                if kind == 1:
                    wrappers[window] = self._other(each, "decode", self._make.decode)
                    split = max(_FIXED_SPLIT // spec.block_size, 1)
                    self._plan_decode(wrappers[window], on_host, lists, options | {"fixed_split_size": split})
                else:
                    wrappers[window] = self._other(each, f"prefill {kind}", self._make.prefill)
                    self._plan_prefill(wrappers[window], on_host, lists, options | {"disable_split_kv": True})
            queries = host.query_start_loc[:-1][rows][owner] + place
            parts.append(_Part(wrappers, to_device(queries.astype(np.int64), self._device)))
        self._planned_before.record()
        self._planned = _Planned(parts, host.choice, int(host.query_start_loc[-1]), batch.slot_mapping)

    def _list(self, pages: Pages, slots: Tensor, table: Tensor, first: int) -> tuple[list[Tensor], Tensor]:
        """Writes lists of pages behind ``first`` others; returns them, and all columns of ``pages`` on the host."""
        if first + pages.total > len(self._pages):
            raise AttentionPlanError(
                f"a step reads {first + pages.total} pages, more than {len(self._pages)}", row=None
            )
        columns = (pages.query_starts, pages.offsets, pages.firsts, pages.last_lens, pages.lengths)
        on_device, on_host = self._staging.put(columns)
        lists = self._pages[first : first + pages.total]
        list_pages(
            slots=slots,
            firsts=on_device[2],
            offsets=on_device[1],
            block_tables=table,
            most=pages.most,
            pages=lists,
        )
        return on_host, lists

    def _plan_decode(self, wrapper: Wrapper, on_host: list[Tensor], lists: Tensor, options: dict[str, Any]) -> None:
        spec = self.spec
        wrapper.plan(
            on_host[1], lists, on_host[3], spec.num_query_heads, spec.num_kv_heads, spec.head_size, spec.block_size,
            seq_lens=on_host[4], **options,
        )  # fmt: skip

    def _plan_prefill(self, wrapper: Wrapper, on_host: list[Tensor], lists: Tensor, options: dict[str, Any]) -> None:
        spec = self.spec
        wrapper.plan(
            on_host[0], on_host[1], lists, on_host[3],
            spec.num_query_heads, spec.num_kv_heads, spec.head_size, spec.block_size,
            causal=True, seq_lens=on_host[4], **options,
        )  # fmt: skip

    def _plan_cascade(
        self,
        each: _Set,
        on_host: list[Tensor],
        lists: Tensor,
        slots: Tensor,
        table: Tensor,
        shared: int,
        options: dict[str, Any],
    ) -> Wrapper:
        """Plans two levels: the shared pages for all queries as one row, and the rest row by row."""
        spec = self.spec
        ends = np.array([0, int(on_host[0][-1])], np.int32)
        _, level = self._staging.put((ends, np.array([0, shared], np.int32), np.array([spec.block_size], np.int32)))
        torch.index_select(table[:, :shared], 0, slots[:1], out=self._shared_pages[:shared].view(1, shared))
        cascade = self._other(each, "cascade", self._make.cascade)
        cascade.plan(
            [level[0], on_host[0]], [level[1], on_host[1]], [self._shared_pages[:shared], lists],
            [level[2], on_host[3]],
            spec.num_query_heads, spec.num_kv_heads, spec.head_size, spec.block_size,
            causal=True,
            **{name: value for name, value in options.items() if name != "o_data_type"},
        )  # fmt: skip
        return cascade

    def _plan_empty(self, counts: list[int], choice: Choice, shared: int = 0) -> None:
        """Plans rows of so many tokens each behind ``shared`` blocks; they read the first block of the cache."""
        block, rows = self.spec.block_size, len(counts)
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        lens = np.array(counts, np.int32) + np.int32(shared * block)
        slots = torch.zeros(rows, dtype=torch.int32, device=self._device)
        table = torch.zeros((1, int(-(-lens.max() // block))), dtype=torch.int32, device=self._device)
        places = torch.full((choice.tokens,), PADDING, dtype=torch.int64, device=self._device)
        self._plan(pages_of(starts, lens, block, skip=shared), slots, table, choice, places, shared)

    def _try(self, counts: list[int], shared: int) -> None:
        self._plan_empty(counts, Choice(Mode.EAGER, sum(counts)), shared)
        spec = self.spec
        queries = torch.zeros(
            (sum(counts), spec.num_query_heads, spec.head_size), dtype=spec.dtype, device=self._device
        )
        for window in self._sets:
            layer = spec.sliding_windows.index(window) if spec.sliding_windows else 0
            self.attend(layer, queries, torch.empty_like(queries))

    def _graph(self, each: _Set, rows: int) -> Wrapper:
        found = each.graphs.get(rows)
        if found is None:
            buffers = (self._offsets[: rows + 1], self._pages, self._last_lens[:rows])
            found = each.graphs[rows] = self._make.graph(buffers, each.schedule)
        return found

    @staticmethod
    def _other(each: _Set, purpose: str, make: Callable[[], Wrapper]) -> Wrapper:
        found = each.others.get(purpose)
        if found is None:
            found = each.others[purpose] = make()
        return found

    def _options(self, window: int) -> dict[str, Any]:
        return {
            "sm_scale": self.spec.scale,
            "window_left": window - 1 if window else -1,
            "logits_soft_cap": self.spec.logit_soft_cap,
            "q_data_type": self.spec.dtype,
            "kv_data_type": self._kv_dtype,
            "o_data_type": self.spec.dtype,
        }

    def _of(self, layer: int) -> Tensor:
        cache = self._cache
        if cache is None or not 0 <= layer < len(cache):
            raise AttentionPlanError(f"layer {layer} was refused: LAYER", row=None)
        return cache[layer]

    def _in_force(self) -> _Planned:
        if self._planned is None:
            raise AttentionPlanError("no plan is in force: plan() comes before forward()", row=None)
        return self._planned
