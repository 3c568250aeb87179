"""The CPU: compiled kernels, or plain torch where there are none."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from tercet_shared.errors import ConfigurationError
from tercet_worker.attention.cpu import CpuAttention
from tercet_worker.attention.select import cpu_attention, load_kernels_or_warn
from tercet_worker.attention.torch_fallback import TorchAttention
from tercet_worker.host import choose_dtype, default_threads, processor_flags
from tercet_worker.kernels.logits import LogitDraw, LogitScan
from tercet_worker.layers.parameters import Placement
from tercet_worker.loading import available_memory
from tercet_worker.models.eager import EagerModel
from tercet_worker.parallel.places import local_ranks
from tercet_worker.platforms.interface import KvMemory, StepParts
from tercet_worker.program.compiled import CompiledModel
from tercet_worker.program.decode import DecodeSteps
from tercet_worker.program.weights import PackedWeights, Quantization
from tercet_worker.sampling import SamplerParts

if TYPE_CHECKING:
    from tercet_shared.config import WorkerSettings
    from tercet_worker.attention.interface import AttentionBackend, AttentionSpec
    from tercet_worker.kernels.library import KernelLibrary
    from tercet_worker.models.interface import CausalLM, StepModel
    from tercet_worker.parallel.communicator import Communicator
    from tercet_worker.platforms.interface import ExecutorShape, Report
    from tercet_worker.state.checks import PlanLimits
    from tercet_worker.state.slots import HandOver, SlotState

logger = logging.getLogger(__name__)

_STEP_TOKENS = 256
"""Default budget of a step on a CPU: every stream waits for it, and larger steps were not faster."""
_KV_SHARE = 0.25
"""By default the cache takes at most this part of the memory that is free: the machine has other uses for it."""


class CpuPlatform:
    """Implements ``Platform``.

    Args:
        settings: of the worker.
    """

    name = "cpu"
    default_step_tokens = _STEP_TOKENS

    def __init__(self, settings: WorkerSettings) -> None:
        if settings.quantization == "fp8":
            raise ConfigurationError(
                "--quantization fp8 is for GPUs; a CPU has kernels for int8.", param="quantization"
            )
        self._settings = settings
        self._ranks = len(local_ranks(settings))  # which share this machine
        self.threads = settings.threads or max(default_threads() // self._ranks, 1)
        torch.set_num_threads(self.threads)
        self.device = torch.device("cpu")
        self._library: KernelLibrary | None = None
        self._packed: PackedWeights | None = None
        self._alone = True

    @cached_property
    def _compiled(self) -> KernelLibrary | None:
        """The kernels; compiled where this machine has not yet. There may be none, or none for the model."""
        return load_kernels_or_warn()

    @cached_property
    def dtype(self) -> torch.dtype:
        """See ``Platform``. It depends on the kernels."""
        return choose_dtype(self._settings.dtype, processor_flags(), compiled=self._compiled is not None)

    @property
    def kernels(self) -> str:
        """See ``Platform``: the instruction set that the kernels use, or ``torch`` without kernels."""
        return "torch" if self._library is None else self._library.best_isa.name.lower()

    def attention(self, spec: AttentionSpec) -> AttentionBackend:
        """See ``Platform``. Compiles the kernels where this machine has not yet."""
        library = self._compiled
        attention: AttentionBackend
        try:
            attention = cpu_attention(spec, library, threads=self.threads)
        except ConfigurationError as error:
            logger.warning("%s; using the pure-torch fallback, which is right but slow", error.message)
            attention = TorchAttention(spec)
        # Packed weights are of use to the kernels only, and those need attention of their own.
        self._library = library if isinstance(attention, CpuAttention) else None
        if self._settings.batch_invariant and self._library is None:
            raise ConfigurationError(
                "--batch-invariant needs the compiled kernels: the pure-torch fallback adds up in an order that "
                "depends on the batch.",
                param="batch_invariant",
            )
        return attention

    def placement(self) -> Placement:
        """See ``Platform``."""
        if self._library is None:
            return Placement(self.dtype, self.device)
        self._packed = PackedWeights(self._library, self.dtype, Quantization(self._settings.quantization))
        return Placement(self.dtype, self.device, self._packed)

    def memory_for_weights(self) -> int:
        """See ``Platform``."""
        return available_memory() // self._ranks

    def executor(
        self,
        weights: CausalLM,
        attention: AttentionBackend,  # noqa: ARG002  # other platforms need it
        shape: ExecutorShape,
        communicator: Communicator,
    ) -> StepModel:
        """See ``Platform``."""
        self._alone = communicator.topology.ranks == 1
        if not self._settings.threads:
            nbytes = sum(destination.nbytes for destination in weights.destinations().values())
            self.threads = min(self.threads, max(default_threads(nbytes) // self._ranks, 1))
            torch.set_num_threads(self.threads)
        if self._library is None:
            return EagerModel(weights, communicator)
        if self._packed is not None and self._settings.compact_weights:
            self._packed.compact(self._library.best_isa)
        return CompiledModel(
            weights,
            self._library,
            dtype=self.dtype,
            threads=self.threads,
            max_tokens=shape.max_tokens,
            vocab_size=shape.vocab_size,
            communicator=communicator,
        )

    def memory_for_kv(self, model: StepModel) -> KvMemory:  # noqa: ARG002  # other platforms need it
        """See ``Platform``."""
        return KvMemory(available_memory() // self._ranks, _KV_SHARE)

    def sampler_parts(self) -> SamplerParts:
        """See ``Platform``."""
        if self._library is None:
            return SamplerParts()
        draw = LogitDraw(self._library, threads=self.threads)
        return SamplerParts(scan=LogitScan(self._library, threads=self.threads), draw=draw, truncated=draw)

    def hand_over(self) -> HandOver | None:
        """See ``Platform``."""
        return None

    def step_parts(
        self,
        model: StepModel,
        attention: AttentionBackend,
        state: SlotState,
        limits: PlanLimits,
        report: Report,  # noqa: ARG002  # nothing here takes long
    ) -> StepParts:
        """See ``Platform``."""
        if not isinstance(model, CompiledModel) or not isinstance(attention, CpuAttention):
            return StepParts()
        pages = attention.pages_ahead()
        # Ranks that compute together have steps of more than one call.
        if not self._alone:
            return StepParts(reach=pages.reach)
        return StepParts(decode=DecodeSteps(model, attention, state, limits), best=model.best, reach=pages.reach)
