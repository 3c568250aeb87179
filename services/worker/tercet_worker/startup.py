"""From settings to a worker that can execute plans: checkpoint, weights, attention, KV cache, slots."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tercet_shared.checkpoint import Checkpoint, ModelConfig
from tercet_shared.errors import ConfigurationError
from tercet_shared.wire.step import PROTOCOL_VERSION, WorkerHello
from tercet_worker.attention.cpu import CpuAttention
from tercet_worker.attention.interface import AttentionBackend, AttentionSpec
from tercet_worker.attention.select import cpu_attention, load_kernels_or_warn
from tercet_worker.attention.torch_fallback import TorchAttention
from tercet_worker.host import choose_dtype, default_threads, processor_flags
from tercet_worker.kernels.logits import LogitScan
from tercet_worker.kv_sizing import KvRequest, size_kv_cache
from tercet_worker.layers.parameters import Placement
from tercet_worker.loading import available_memory, load_model
from tercet_worker.models.eager import EagerModel
from tercet_worker.program.compiled import CompiledModel
from tercet_worker.program.decode import DecodeSteps
from tercet_worker.program.weights import PackedWeights, Quantization
from tercet_worker.runner import ModelRunner
from tercet_worker.sampling import Sampler
from tercet_worker.state.checks import PlanLimits
from tercet_worker.state.slots import SlotState

if TYPE_CHECKING:
    from tercet_shared.config import WorkerSettings
    from tercet_worker.kernels.library import KernelLibrary
    from tercet_worker.models.interface import StepModel

logger = logging.getLogger(__name__)

_CPU_STEP_TOKENS = 512
"""Default budget of a step on a CPU: a full step must not take seconds."""

Report = Callable[[str, float | None], None]
"""Told the stage of the start and the fraction done, where it is known. What it raises ends the start."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded worker."""

    runner: ModelRunner
    offer: WorkerHello
    """With an empty incarnation: every connection gets one of its own."""
    weight_bytes: int
    kv_bytes: int
    kernels: str
    """The instruction set that the kernels use, or ``torch`` without kernels."""


def load_engine(settings: WorkerSettings, report: Report) -> Engine:
    """Loads everything. Runs on the device thread; takes seconds to minutes.

    Raises:
        CheckpointError: the model cannot be loaded.
        ConfigurationError: the settings cannot work with this model or machine.
    """
    report("reading checkpoint", None)
    threads = settings.threads or default_threads()
    torch.set_num_threads(threads)
    checkpoint = Checkpoint.open(settings.model, revision=settings.revision)
    config = checkpoint.config
    dtype = choose_dtype(settings.dtype, processor_flags())
    max_batched_tokens = settings.max_num_batched_tokens or _CPU_STEP_TOKENS
    report("preparing kernels", None)  # compiles them where this machine has not yet
    library = load_kernels_or_warn()
    attention = _attention(config, settings.block_size, dtype, library, threads)
    if settings.batch_invariant and not isinstance(attention, CpuAttention):
        raise ConfigurationError(
            "--batch-invariant needs the compiled kernels: the pure-torch fallback adds up in an order that depends on "
            "the batch.",
            param="batch_invariant",
        )
    # Packed weights are of use to the kernels only, and those need attention of their own.
    compiled = library if isinstance(attention, CpuAttention) else None
    quantization = Quantization(settings.quantization)
    packed = PackedWeights(compiled, dtype, quantization) if compiled is not None else None
    place = Placement(dtype, torch.device("cpu"), packed)
    weights = load_model(
        checkpoint,
        place,
        available=available_memory(),
        progress=lambda fraction: report("loading weights", fraction),
    )
    model: StepModel = EagerModel(weights)
    if compiled is not None:
        model = CompiledModel(
            weights,
            compiled,
            dtype=dtype,
            threads=threads,
            max_tokens=max_batched_tokens,
            vocab_size=config.vocab_size,
        )
    report("allocating the KV cache", None)
    kv = size_kv_cache(
        KvRequest(
            bytes_per_block=attention.bytes_per_block(config.num_layers),
            block_size=settings.block_size,
            slots=settings.max_num_seqs,
            max_model_len=_max_model_len(settings.max_model_len, config),
            max_model_len_given=settings.max_model_len is not None,
            memory=settings.kv_cache_memory,
            num_blocks=settings.num_kv_blocks,
            available=available_memory(),
        )
    )
    if kv.max_model_len < _max_model_len(settings.max_model_len, config):
        logger.warning("the KV cache holds %d tokens: requests are limited to that many", kv.max_model_len)
    attention.allocate_kv(config.num_layers, kv.num_blocks)
    state = SlotState(
        slots=settings.max_num_seqs,
        max_model_len=kv.max_model_len,
        block_size=settings.block_size,
        device=place.device,
    )
    limits = PlanLimits(
        vocab_size=config.vocab_size,
        num_blocks=kv.num_blocks,
        block_size=settings.block_size,
        max_batched_tokens=max_batched_tokens,
    )
    scan = LogitScan(compiled, threads=threads) if compiled is not None else None
    decode = None
    if isinstance(model, CompiledModel) and isinstance(attention, CpuAttention):
        decode = DecodeSteps(model, attention, state, limits)
    sampler = Sampler(config.vocab_size, place.device, scan)
    runner = ModelRunner(model, attention, state, sampler, limits, decode=decode)
    offer = WorkerHello(
        protocol=PROTOCOL_VERSION,
        incarnation="",
        model_name=checkpoint.served_name,
        model_fingerprint=checkpoint.fingerprint,
        tokenizer_fingerprint=checkpoint.tokenizer.fingerprint,
        vocab_size=config.vocab_size,
        block_size=settings.block_size,
        num_blocks=kv.num_blocks,
        max_slots=settings.max_num_seqs,
        max_model_len=kv.max_model_len,
        max_batched_tokens=max_batched_tokens,
        dtype=str(place.dtype).removeprefix("torch."),
        device=attention.name,
        pid=os.getpid(),
    )
    logger.info(
        "%s in %s on %s, %d threads: %d KV blocks of %d tokens, %d slots of up to %d tokens, %d tokens per step",
        offer.model_name, offer.dtype, offer.device, threads,
        offer.num_blocks, offer.block_size, offer.max_slots, offer.max_model_len, offer.max_batched_tokens,
    )  # fmt: skip
    return Engine(
        runner,
        offer,
        weight_bytes=sum(destination.nbytes for destination in weights.destinations().values()),
        kv_bytes=kv.num_blocks * attention.bytes_per_block(config.num_layers),
        kernels="torch" if compiled is None else compiled.best_isa.name.lower(),
    )


def _attention(
    config: ModelConfig, block_size: int, dtype: torch.dtype, library: KernelLibrary | None, threads: int
) -> AttentionBackend:
    spec = AttentionSpec(
        num_query_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_dim,
        block_size=block_size,
        dtype=dtype,
        scale=config.head_dim**-0.5,
    )
    try:
        return cpu_attention(spec, library, threads=threads)
    except ConfigurationError as error:
        logger.warning("%s; using the pure-torch fallback, which is right but slow", error.message)
        return TorchAttention(spec)


def _max_model_len(wanted: int | None, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    if wanted is not None and wanted > limit:
        raise ConfigurationError(f"--max-model-len: the model was made for at most {limit} tokens, not {wanted}.")
    return wanted or limit
