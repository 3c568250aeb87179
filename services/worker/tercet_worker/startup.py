"""From settings to a worker that can execute plans: checkpoint, weights, attention, KV cache, slots.

The order is the same on every device; what depends on the device is in ``platforms/``.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tercet_shared.checkpoint import Checkpoint, ModelConfig
from tercet_shared.errors import ConfigurationError
from tercet_shared.wire.step import PROTOCOL_VERSION, WorkerHello
from tercet_worker.attention.interface import AttentionSpec
from tercet_worker.kv_sizing import KvRequest, size_kv_cache
from tercet_worker.loading import load_model
from tercet_worker.platforms import ExecutorShape, choose_platform
from tercet_worker.runner import ModelRunner
from tercet_worker.sampling import Sampler
from tercet_worker.state.checks import PlanLimits
from tercet_worker.state.slots import SlotState

if TYPE_CHECKING:
    import torch

    from tercet_shared.config import WorkerSettings
    from tercet_worker.platforms.interface import Report

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded worker."""

    runner: ModelRunner
    offer: WorkerHello
    """With an empty incarnation: every connection gets one of its own."""
    weight_bytes: int
    kv_bytes: int
    kernels: str
    """What computes, such as the instruction set that the kernels use."""


def load_engine(settings: WorkerSettings, report: Report) -> Engine:
    """Loads everything. Runs on the device thread; takes seconds to minutes.

    Raises:
        CheckpointError: the model cannot be loaded.
        ConfigurationError: the settings cannot work with this model or machine.
    """
    report("reading checkpoint", None)
    platform = choose_platform(settings)
    checkpoint = Checkpoint.open(settings.model, revision=settings.revision)
    config = checkpoint.config
    longest = _max_model_len(settings.max_model_len, config)
    max_batched_tokens = settings.max_num_batched_tokens or platform.default_step_tokens
    report("preparing kernels", None)
    attention = platform.attention(_attention_spec(config, settings.block_size, platform.dtype))
    weights = load_model(
        checkpoint,
        platform.placement(),
        available=platform.memory_for_weights(),
        progress=lambda fraction: report("loading weights", fraction),
    )
    shape = ExecutorShape(max_batched_tokens, settings.max_num_seqs, config.vocab_size)
    model = platform.executor(weights, attention, shape)
    report("allocating the KV cache", None)
    memory = platform.memory_for_kv(model)
    kv = size_kv_cache(
        KvRequest(
            bytes_per_block=attention.bytes_per_block(config.num_layers),
            block_size=settings.block_size,
            slots=settings.max_num_seqs,
            max_model_len=longest,
            max_model_len_given=settings.max_model_len is not None,
            memory=settings.kv_cache_memory,
            num_blocks=settings.num_kv_blocks,
            available=memory.available,
            share=memory.share,
        )
    )
    if kv.max_model_len < longest:
        logger.warning("the KV cache holds %d tokens: requests are limited to that many", kv.max_model_len)
    attention.allocate_kv(config.num_layers, kv.num_blocks)
    state = SlotState(
        slots=settings.max_num_seqs,
        max_model_len=kv.max_model_len,
        block_size=settings.block_size,
        device=platform.device,
    )
    limits = PlanLimits(
        vocab_size=config.vocab_size,
        num_blocks=kv.num_blocks,
        block_size=settings.block_size,
        max_batched_tokens=max_batched_tokens,
    )
    decode = platform.decode_steps(model, attention, state, limits)
    sampler = Sampler(config.vocab_size, platform.device, platform.scan())
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
        dtype=str(platform.dtype).removeprefix("torch."),
        device=attention.name,
        pid=os.getpid(),
    )
    logger.info(
        "%s in %s on %s: %d KV blocks of %d tokens, %d slots of up to %d tokens, %d tokens per step",
        offer.model_name, offer.dtype, offer.device,
        offer.num_blocks, offer.block_size, offer.max_slots, offer.max_model_len, offer.max_batched_tokens,
    )  # fmt: skip
    return Engine(
        runner,
        offer,
        weight_bytes=sum(destination.nbytes for destination in weights.destinations().values()),
        kv_bytes=kv.num_blocks * attention.bytes_per_block(config.num_layers),
        kernels=platform.kernels,
    )


def _attention_spec(config: ModelConfig, block_size: int, dtype: torch.dtype) -> AttentionSpec:
    return AttentionSpec(
        num_query_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_dim,
        block_size=block_size,
        dtype=dtype,
        scale=config.head_dim**-0.5,
    )


def _max_model_len(wanted: int | None, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    if wanted is not None and wanted > limit:
        raise ConfigurationError(f"--max-model-len: the model was made for at most {limit} tokens, not {wanted}.")
    return wanted or limit
