"""All logits of a prompt, which a step itself never computes."""

from __future__ import annotations

import numpy as np
import torch

from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.step import NewSlot, NewSlots, Slot, StepPlan, empty_i32, offsets_of
from tercet_worker.startup import Engine
from tercet_worker.state.batch import InputBatch


@torch.inference_mode()
def prompt_logits(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """Returns float32 ``[len(prompt), V]``: the forward pass of a runner's step, and the head on every row of it."""
    runner, state = engine.runner, engine.runner._state
    runner.reset()
    count, size = len(prompt), runner.limits.block_size
    blocks = -(-count // size)
    plan = StepPlan(
        step_id=1,
        freed=empty_i32(),
        new=NewSlots.build([NewSlot(Slot(0), 1, count, np.array(prompt, np.int32), SamplingParams())]),
        slots=np.zeros(1, np.int32),
        num_tokens=np.array([count], np.int32),
        computed=np.zeros(1, np.int32),
        samples=np.ones(1, np.bool_),
        block_offsets=offsets_of([blocks]),
        block_ids=np.arange(blocks, dtype=np.int32)[::-1].copy(),
    )
    state.apply(plan)
    batch = InputBatch.build(plan, state, block_size=size)
    runner._attention.plan(batch.attention(state))
    logits = runner._model.logits(runner._model.forward(batch.input_ids, batch.positions, runner._attention))
    runner.reset()
    return logits
