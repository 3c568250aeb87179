"""The GPU of this process, and where what is compiled for it is kept."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tercet_worker.cuda.memory import Measured
from tercet_worker.graphs.capture import CudaCapturer
from tercet_worker.kernels.build import default_cache
from tercet_worker.platforms.cuda import Machine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tercet_worker.graphs.compute import Function


def open_machine(index: int, *, batch_invariant: bool) -> Machine:
    """Returns the GPU with this number, which is the current one from now on.

    Compilers find their caches in ours: ``$TERCET_CACHE``, else ``~/.cache/tercet``.
    """
    keep_caches(default_cache().parent)
    from tercet_worker.cuda.streams import CudaStreams  # noqa: PLC0415  # after the caches are set
    from tercet_worker.cuda.wrappers import FlashInferWrappers  # noqa: PLC0415  # FlashInfer reads its own at import

    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return Machine(
        device=device,
        name=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        streams=CudaStreams(device),
        wrappers=FlashInferWrappers(device, batch_invariant=batch_invariant),
        capturer=CudaCapturer(device),
        compiler=compiled,
        measure=partial(measure, device),
    )


def measure(device: torch.device) -> Measured:
    """Returns the memory of a GPU."""
    free, total = torch.cuda.mem_get_info(device)
    statistics = torch.cuda.memory_stats(device)
    return Measured(
        total, free, statistics.get("reserved_bytes.all.current", 0), statistics.get("allocated_bytes.all.peak", 0)
    )


def keep_caches(folder: Path) -> None:
    """Has torch, Triton and FlashInfer keep what they compile in ``folder``, unless the environment says otherwise."""
    for name, part in (
        ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
        ("TRITON_CACHE_DIR", "triton"),
        ("FLASHINFER_WORKSPACE_BASE", "flashinfer"),
    ):
        os.environ.setdefault(name, str(folder / part))


def compiled(function: Function, backend: str = "inductor") -> Function:
    """Returns ``function`` compiled, once for steps of one token and once for all others."""
    # Products of eight bits would be tried in many forms at each start, though nothing else is tuned.
    options: dict[str, Any] | None = {"max_autotune_gemm_backends": "ATEN"} if backend == "inductor" else None
    made: Function = torch.compile(function, fullgraph=True, backend=backend, options=options)

    def run(
        token_ids: torch.Tensor, stream: torch.Tensor, attended: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        if len(token_ids) > 1:
            for tensor in (token_ids, stream, attended):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)  # noqa: SLF001  # torch documents it under this name
        return made(token_ids, stream, attended, tensors)

    return run
