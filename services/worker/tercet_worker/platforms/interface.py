"""What a start needs of a kind of device. The order of a start is in ``startup.py`` and the same for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from tercet_shared.wire.step import StepPlan
    from tercet_worker.attention.interface import AttentionBackend, AttentionSpec
    from tercet_worker.layers.parameters import Placement
    from tercet_worker.models.interface import CausalLM, StepModel
    from tercet_worker.parallel.communicator import Communicator
    from tercet_worker.program.decode import DecodeSteps
    from tercet_worker.sampling import SamplerParts
    from tercet_worker.sampling.sampler import Scan
    from tercet_worker.state.batch import InputBatch
    from tercet_worker.state.checks import PlanLimits
    from tercet_worker.state.slots import HandOver, SlotState
    from tercet_worker.state.transfer import Transfer

Report = Callable[[str, float | None], None]
"""Told the stage of the start and the fraction done, where it is known. What it raises ends the start."""


@dataclass(frozen=True, slots=True)
class ExecutorShape:
    """Limits of the steps that a model is run with."""

    max_tokens: int  # of a step
    max_rows: int  # requests in a step
    vocab_size: int


@dataclass(frozen=True, slots=True)
class KvMemory:
    """What the KV cache may take."""

    available: int  # bytes
    share: float  # of them, taken where the settings do not say how much


@dataclass(frozen=True, slots=True)
class StepParts:
    """What the runner does in the platform's way; see there."""

    decode: DecodeSteps | None = None
    build: Callable[[StepPlan, SlotState], InputBatch] | None = None
    transfer: Transfer | None = None
    best: Scan | None = None
    reach: Callable[[int], None] | None = None


class Platform(Protocol):
    """One device. Its methods are called in the order in which they stand here, each once, on the device thread."""

    @property
    def name(self) -> str:
        """Of the kind of device, as in ``--device``."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tensors are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV cache, as the settings ask for it or as suits the device."""
        ...

    @property
    def default_step_tokens(self) -> int:
        """Budget of a step where the settings do not say; with more slots than that, up to twice as many."""
        ...

    @property
    def kernels(self) -> str:
        """What computes, for the log, such as the instruction set."""
        ...

    def attention(self, spec: AttentionSpec) -> AttentionBackend:
        """Returns attention for a model, without a cache yet.

        Raises:
            ConfigurationError: what the settings insist on cannot be had for this model on this device.
        """
        ...

    def placement(self) -> Placement:
        """Returns how weights are laid out, for the attention that was made."""
        ...

    def memory_for_weights(self) -> int:
        """Returns the bytes that weights may take."""
        ...

    def executor(
        self, weights: CausalLM, attention: AttentionBackend, shape: ExecutorShape, communicator: Communicator
    ) -> StepModel:
        """Returns what runs the loaded model, together with the other ranks that hold parts of it."""
        ...

    def memory_for_kv(self, model: StepModel) -> KvMemory:
        """Returns what the KV cache may take, beside weights and what a full step needs.

        Raises:
            ConfigurationError: a full step does not fit.
        """
        ...

    def sampler_parts(self) -> SamplerParts:
        """Returns what the sampler does in the platform's way."""
        ...

    def hand_over(self) -> HandOver | None:
        """Returns how drawn tokens are put where the next step reads them; None for torch's own way."""
        ...

    def step_parts(
        self, model: StepModel, attention: AttentionBackend, state: SlotState, limits: PlanLimits, report: Report
    ) -> StepParts:
        """Returns what steps are made with, once the cache is there; makes ready what a first step would wait for."""
        ...
