"""FlashInfer's wrappers as we use them. The only module that imports FlashInfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import flashinfer
import torch

from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

    from tercet_worker.attention.interface import AttentionSpec
    from tercet_worker.attention.wrappers import Wrapper

HEAD_SIZES = (64, 128, 256)
"""That FlashInfer's kernels are made for."""
_LAYOUT = "NHD"
_FLOATS = 256 * 1024 * 1024
_INTEGERS = 8 * 1024 * 1024
"""Bytes of the workspace: partial results of long contexts, and the plan."""


class FlashInferWrappers:
    """Implements ``Wrappers``.

    Args:
        device: a GPU.
        batch_invariant: whether results must not depend on the batch, which one of FlashInfer's backends can.
    """

    def __init__(self, device: torch.device, *, batch_invariant: bool) -> None:
        self._prefill_backend = "fa2" if batch_invariant else "auto"
        self._floats = torch.zeros(_FLOATS, dtype=torch.uint8, device=device)

    def check(self, spec: AttentionSpec) -> None:
        """See ``Wrappers``."""
        if spec.dtype is not torch.bfloat16:
            dtype = str(spec.dtype).removeprefix("torch.")
            raise ConfigurationError(f"on a GPU attention computes in bfloat16, not {dtype}", param="dtype")
        if spec.head_size not in HEAD_SIZES:
            raise ConfigurationError(
                f"FlashInfer has no kernels for a head size of {spec.head_size}; there are some for "
                f"{', '.join(map(str, HEAD_SIZES))}"
            )

    def schedule(self) -> Tensor:
        """See ``Wrappers``."""
        return torch.zeros(_INTEGERS, dtype=torch.uint8, device=self._floats.device)

    def graph(self, buffers: tuple[Tensor, Tensor, Tensor], schedule: Tensor) -> Wrapper:
        """See ``Wrappers``."""
        offsets, pages, last_lens = buffers
        made = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._floats,
            _LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=offsets,
            paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=last_lens,
            backend="fa2",
        )
        made.reset_workspace_buffer(self._floats, schedule)
        wrapper: Wrapper = made
        return wrapper

    def decode(self) -> Wrapper:
        """See ``Wrappers``."""
        # Several query heads per key/value head are one tile of a matrix product.
        made: Wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._floats, _LAYOUT, use_tensor_cores=True, backend="fa2"
        )
        return made

    def prefill(self) -> Wrapper:
        """See ``Wrappers``."""
        made: Wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._floats, _LAYOUT, backend=self._prefill_backend
        )
        return made

    def cascade(self) -> Wrapper:
        """See ``Wrappers``."""
        made: Wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, self._floats, _LAYOUT)
        return made
