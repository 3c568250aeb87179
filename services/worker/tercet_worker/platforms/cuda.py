"""An NVIDIA GPU: FlashInfer, our Triton kernels, compiled pieces and CUDA graphs.

What only a GPU can do is called through ``streams``, ``wrappers`` and ``capturer``; all else runs on the CPU as well,
which is how tests run it.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tercet_shared.errors import ConfigurationError, InternalError
from tercet_worker.attention.flashinfer import FlashInferAttention
from tercet_worker.cuda.batches import DeviceBatches
from tercet_worker.cuda.kernels.inputs import hand_over
from tercet_worker.cuda.layers import DeviceHead, KernelLayers
from tercet_worker.cuda.memory import exhausted, for_kv
from tercet_worker.cuda.sampler import kernel_parts, warm_up
from tercet_worker.graphs.compute import TorchLayers
from tercet_worker.graphs.dispatch import Dispatcher
from tercet_worker.graphs.model import Functions, ProgramModel, StepInputs
from tercet_worker.graphs.program import record
from tercet_worker.layers.fp8 import Fp8Choice
from tercet_worker.layers.parameters import Placement
from tercet_worker.platforms.interface import KvMemory, StepParts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tercet_shared.config import WorkerSettings
    from tercet_worker.attention.interface import AttentionBackend, AttentionSpec
    from tercet_worker.attention.wrappers import Wrappers
    from tercet_worker.cuda.memory import Measured
    from tercet_worker.cuda.streams import Streams
    from tercet_worker.graphs.capture import Capturer
    from tercet_worker.graphs.compute import Layers
    from tercet_worker.graphs.model import Transform
    from tercet_worker.models.interface import CausalLM, StepModel
    from tercet_worker.parallel.communicator import Communicator
    from tercet_worker.platforms.interface import ExecutorShape, Report
    from tercet_worker.sampling import SamplerParts
    from tercet_worker.state.checks import PlanLimits
    from tercet_worker.state.slots import HandOver, SlotState

logger = logging.getLogger(__name__)

STEP_TOKENS = 8192
"""Default budget of a step: a large GPU computes that in some tens of milliseconds."""
_FP8 = torch.float8_e4m3fn
_FP8_SINCE = (8, 9)
_ROW_SCALED_UNTIL = (11, 0)
"""Capability from which on versions of torch differ in whether their product of eight bits takes scales of rows."""
_SAMPLING = 3
"""Times the logits of all rows that sampling takes beside them, where requests ask for all there is."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the platform does with the GPU itself."""

    device: torch.device
    name: str
    capability: tuple[int, int]
    streams: Streams
    wrappers: Wrappers
    capturer: Capturer
    compiler: Transform | None  # of a step's functions; None where they are called as they are
    measure: Callable[[], Measured]  # of its memory, as it is
    dtype: torch.dtype = torch.bfloat16  # in which it computes


class CudaPlatform:
    """Implements ``Platform``.

    Args:
        settings: of the worker.
        machine: the GPU.
    """

    name = "cuda"
    default_step_tokens = STEP_TOKENS

    def __init__(self, settings: WorkerSettings, machine: Machine) -> None:
        if settings.quantization == "int8":
            raise ConfigurationError(
                "--quantization int8 is for CPUs; a GPU has no kernels for it.", param="quantization"
            )
        if settings.dtype == "float32":
            raise ConfigurationError(
                "--dtype float32 is for CPUs: attention on a GPU computes in bfloat16.", param="dtype"
            )
        for name in ("kv_cache_dtype", "quantization"):
            if getattr(settings, name) == "fp8" and machine.capability < _FP8_SINCE:
                raise ConfigurationError(
                    f"--{name.replace('_', '-')} fp8 needs a GPU with eight-bit numbers (Ada, Hopper or later); "
                    f"{machine.name} has none.",
                    param=name,
                )
        if settings.quantization == "fp8" and settings.batch_invariant:
            raise ConfigurationError(
                "--quantization fp8 does not go with --batch-invariant: the product of eight bits is chosen by the "
                "number of its rows.",
                param="quantization",
            )
        self._settings = settings
        self._machine = machine
        self.device = machine.device
        self.dtype = machine.dtype
        self._dispatcher = Dispatcher.eager()
        self._compiling = 0.0  # seconds of the first step, in which functions are compiled
        self._has_head = True
        self._inputs: StepInputs | None = None
        self._attention: FlashInferAttention | None = None

    @property
    def kernels(self) -> str:
        """See ``Platform``."""
        return f"sm_{self._machine.capability[0]}{self._machine.capability[1]}"

    def attention(self, spec: AttentionSpec) -> AttentionBackend:
        """See ``Platform``."""
        settings = self._settings
        with self._memory("setting up attention"):
            self._attention = FlashInferAttention(
                spec,
                self._machine.wrappers,
                self._machine.streams,
                self.device,
                max_rows=settings.max_num_seqs,
                kv_dtype=_FP8 if settings.kv_cache_dtype == "fp8" else None,
                batch_invariant=settings.batch_invariant,
            )
        return self._attention

    def placement(self) -> Placement:
        """See ``Platform``."""
        return Placement(self.dtype, self.device, fp8=self._fp8())

    def memory_for_weights(self) -> int:
        """See ``Platform``."""
        measured = self._machine.measure()
        return int(measured.free - measured.total * (1 - self._settings.gpu_memory_utilization))

    def executor(
        self,
        weights: CausalLM,
        attention: AttentionBackend,  # noqa: ARG002  # other platforms need it
        shape: ExecutorShape,
        communicator: Communicator,
    ) -> StepModel:
        """See ``Platform``."""
        settings = self._settings
        # A compiler, and a graph, may add up in another order for another number of rows.
        invariant = settings.batch_invariant
        plain = settings.enforce_eager or invariant
        if not plain:
            self._dispatcher = Dispatcher.up_to(max_rows=shape.max_rows, max_tokens=shape.max_tokens)
        layers: Layers = KernelLayers(batch_invariant=invariant) if plain else TorchLayers()
        transform = None if plain else self._machine.compiler
        self._has_head = communicator.topology.last
        with self._memory("setting up the model"):
            self._inputs = StepInputs.make(shape.max_tokens, self.device)
            return ProgramModel(
                weights,
                record(weights, self.dtype, leads=communicator.topology.tp_rank == 0),
                Functions(layers, self.dtype, transform),
                self._inputs,
                DeviceHead(communicator, batch_invariant=invariant),
                communicator,
                self.dtype,
            )

    def memory_for_kv(self, model: StepModel) -> KvMemory:
        """See ``Platform``. Tries a step of the largest size: what it takes can only be measured."""
        if not isinstance(model, ProgramModel):
            raise InternalError("another model than the platform's")
        with self._memory("trying a step of the largest size (lower --max-num-batched-tokens)"), torch.inference_mode():
            began = time.monotonic()
            hidden = model.compute_only(model.max_tokens)
            self._compiling = time.monotonic() - began
            if self._has_head:
                logits = model.logits(hidden[: min(self._settings.max_num_seqs, len(hidden))])
                torch.empty((_SAMPLING, *logits.shape), device=logits.device)
        graphs = len(self._dispatcher.full) + len(self._dispatcher.piecewise)
        return KvMemory(for_kv(self._machine.measure(), self._settings.gpu_memory_utilization, graphs), 1.0)

    def sampler_parts(self) -> SamplerParts:
        """See ``Platform``."""
        return kernel_parts()

    def hand_over(self) -> HandOver | None:
        """See ``Platform``."""
        return hand_over

    def step_parts(
        self, model: StepModel, attention: AttentionBackend, state: SlotState, limits: PlanLimits, report: Report
    ) -> StepParts:
        """See ``Platform``. Compiles and captures, with progress."""
        own, inputs = self._attention, self._inputs
        if own is None or inputs is None or own is not attention or not isinstance(model, ProgramModel):
            raise InternalError("parts of another platform")
        with self._memory("capturing graphs (--enforce-eager does without)"), torch.inference_mode():
            report("preparing kernels", None)
            warm_up(limits.vocab_size, self.device)
            own.reserve(state.slots * state.max_blocks)
            own.warm_up()
            seconds = model.capture(
                self._dispatcher, self._machine.capturer, own, lambda done: report("capturing graphs", done)
            )
        if self._dispatcher.piecewise:
            logger.info(
                "compiled in %.1f s; captured %d full and %d piecewise graphs in %.1f s",
                self._compiling,
                len(self._dispatcher.full),
                len(self._dispatcher.piecewise),
                seconds,
            )
        batches = DeviceBatches(
            inputs,
            self._dispatcher,
            self._machine.streams,
            max_rows=state.slots,
            block_size=limits.block_size,
            cascades=own.cascades,
        )
        return StepParts(build=batches, transfer=self._machine.streams.to_host)

    def _fp8(self) -> Fp8Choice | None:
        """Returns which weights have eight bits; None where they cannot, or are not to."""
        settings, capability = self._settings, self._machine.capability
        if settings.quantization == "none" or settings.batch_invariant or capability < _FP8_SINCE:
            return None
        return Fp8Choice(every=settings.quantization == "fp8", row_scaled=capability < _ROW_SCALED_UNTIL)

    @contextmanager
    def _memory(self, doing: str) -> Iterator[None]:
        """Makes one sentence of a GPU that has no memory left."""
        try:
            yield
        except RuntimeError as error:  # torch has no narrower one for a capture that ends in the middle
            if not _ran_out(error):
                raise
            measured = self._machine.measure()
            raise exhausted(doing, measured.free, measured.total) from error


def _ran_out(error: BaseException | None) -> bool:
    """Returns whether this error is one of memory, or came up in dealing with one, as when a capture is left."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None
