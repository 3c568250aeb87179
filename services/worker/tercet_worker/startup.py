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
from tercet_worker.kv_sizing import KvRequest, KvSize, size_kv_cache
from tercet_worker.loading import load_model
from tercet_worker.parallel.places import meeting_of, topology_of
from tercet_worker.parallel.rendezvous import Membership, join_group
from tercet_worker.platforms import ExecutorShape, choose_platform
from tercet_worker.runner import ModelRunner
from tercet_worker.sampling import Sampler
from tercet_worker.state.checks import PlanLimits
from tercet_worker.state.slots import SlotState

if TYPE_CHECKING:
    import torch

    from tercet_shared.config import WorkerSettings
    from tercet_worker.parallel.communicator import Communicator
    from tercet_worker.parallel.topology import Share
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
    communicator: Communicator
    """To the other ranks of the worker, where there are any."""


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
    topology = topology_of(settings)
    share = topology.share(config)
    layers = len(share.layers)
    longest = _max_model_len(settings.max_model_len, config)
    # By default so many that all who decode take part in each step, within what prompts may make of it.
    usual = platform.default_step_tokens
    max_batched_tokens = settings.max_num_batched_tokens or min(max(usual, settings.max_num_seqs), 2 * usual)
    report("preparing kernels", None)
    attention = platform.attention(_attention_spec(config, share, settings.block_size, platform.dtype))
    member = Membership()
    if topology.ranks > 1:
        report("waiting for the other ranks", None)
        member = join_group(meeting_of(settings), topology, platform.device)
        _agree(member.communicator, checkpoint, settings, max_batched_tokens, platform.dtype)
    communicator = member.communicator
    weights = load_model(
        checkpoint,
        platform.placement(),
        available=platform.memory_for_weights(),
        progress=lambda fraction: report("loading weights", fraction),
        topology=topology,
    )
    shape = ExecutorShape(max_batched_tokens, settings.max_num_seqs, config.vocab_size)
    model = platform.executor(weights, attention, shape, communicator)
    report("allocating the KV cache", None)
    communicator.minimum((0,))  # until all have loaded: what is free now is what their caches can take
    memory = platform.memory_for_kv(model)
    kv = size_kv_cache(
        KvRequest(
            bytes_per_block=attention.bytes_per_block(layers),
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
    kv = KvSize(*communicator.minimum((kv.num_blocks, kv.max_model_len)))
    if kv.max_model_len < longest:
        logger.warning("the KV cache holds %d tokens: requests are limited to that many", kv.max_model_len)
    attention.allocate_kv(layers, kv.num_blocks)
    state = SlotState(
        slots=settings.max_num_seqs,
        max_model_len=kv.max_model_len,
        block_size=settings.block_size,
        device=platform.device,
        hand_over=platform.hand_over(),
    )
    limits = PlanLimits(
        vocab_size=config.vocab_size,
        num_blocks=kv.num_blocks,
        block_size=settings.block_size,
        max_batched_tokens=max_batched_tokens,
    )
    parts = platform.step_parts(model, attention, state, limits, report)
    runner = ModelRunner(
        model,
        attention,
        state,
        Sampler(config.vocab_size, platform.device, parts=platform.sampler_parts()),
        limits,
        decode=parts.decode,
        communicator=communicator,
        build=parts.build,
        transfer=parts.transfer,
        best=parts.best,
        reach=parts.reach,
    )
    # The last that can take long, or fail, is done: who is gone is missed here, not by a core that waits for all.
    communicator.minimum((0,))
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
        pid=os.getpid() if topology.ranks == 1 else os.getppid(),
        group=member.group,
        rank=topology.rank,
        ranks=topology.ranks,
        stages=topology.pipeline,
        answers=topology.answers,
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
        kv_bytes=kv.num_blocks * attention.bytes_per_block(layers),
        kernels=platform.kernels,
        communicator=communicator,
    )


def _agree(
    communicator: Communicator,
    checkpoint: Checkpoint,
    settings: WorkerSettings,
    max_batched_tokens: int,
    dtype: torch.dtype,
) -> None:
    """Raises `ConfigurationError` unless all ranks of the group are to compute the same in the same way."""
    wanted = {
        "model": int(checkpoint.fingerprint[:15], 16),
        "--dtype": dtype.itemsize,
        "--block-size": settings.block_size,
        "--max-num-seqs": settings.max_num_seqs,
        "--max-num-batched-tokens": max_batched_tokens,
    }
    least = communicator.minimum([*wanted.values(), *(-value for value in wanted.values())])
    for name, low, high in zip(wanted, least, least[len(wanted) :], strict=False):
        if low != -high:
            raise ConfigurationError(f"The ranks of this group were not started with the same {name}.")


def _attention_spec(config: ModelConfig, share: Share, block_size: int, dtype: torch.dtype) -> AttentionSpec:
    return AttentionSpec(
        num_query_heads=len(share.query_heads),
        num_kv_heads=len(share.kv_heads),
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
