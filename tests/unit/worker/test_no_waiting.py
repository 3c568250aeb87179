"""Nothing between a plan and its tokens asks the device for a value: on a GPU that would be to wait for it.

Shown in two ways. On torch's ``meta`` device there are no values, so whatever asks for one fails. And on the CPU each
operation is looked at, for those that wait on a GPU though they need no value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tercet_shared.pooling import Pooling
from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.step import NewSlot, NewSlots, Slot, StepPlan, offsets_of
from tercet_worker.attention.interface import AttentionBatch
from tercet_worker.models.interface import LayerAttention
from tercet_worker.runner import ModelRunner
from tercet_worker.sampling import Sampler
from tercet_worker.state.checks import PlanLimits
from tercet_worker.state.slots import SlotState

VOCAB, HIDDEN, BLOCK = 300, 16, 16
META, CPU = torch.device("meta"), torch.device("cpu")
ASKED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=1, min_p=0.1),
    SamplingParams(temperature=0.9, seed=2, top_p=0.9),
    SamplingParams(temperature=0.9, seed=2, top_k=5, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=1.0, seed=3, frequency_penalty=1.0, repetition_penalty=1.1, presence_penalty=0.5),
    SamplingParams(temperature=1.0, seed=3, logit_bias=((3, 1.0),), allowed_token_ids=(3, 4, 5)),
    SamplingParams(temperature=1.0, seed=3, bad_words=((3,), (4, 5)), min_tokens=3, stop_token_ids=(9,)),
)
"""Everything that a request can ask for."""


class Model:
    """Implements ``StepModel`` without layers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: LayerAttention) -> torch.Tensor:
        return (token_ids + positions).unsqueeze(1).expand(-1, HIDDEN).to(torch.float32)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, :1] * torch.ones((1, VOCAB), device=self._device)


class Attention:
    """Plans nothing."""

    def plan(self, batch: AttentionBatch) -> None: ...


class Unsent:
    """Implements ``Arrival``; nothing arrives."""

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors

    def wait(self) -> None:
        raise AssertionError("nobody waits while a step is given to the device")


def runner_on(device: torch.device) -> ModelRunner:
    state = SlotState(slots=16, max_model_len=128, block_size=BLOCK, device=device)
    limits = PlanLimits(VOCAB, 64, BLOCK, 512)
    sampler = Sampler(VOCAB, device)
    sampler._first_candidates = VOCAB  # as on a GPU
    return ModelRunner(Model(device), Attention(), state, sampler, limits, transfer=Unsent)  # type: ignore[arg-type]  # no layers


def plans(asked: tuple[SamplingParams, ...] = ASKED) -> list[StepPlan]:
    """Two steps: prompts of requests that ask for all there is, then their first decodes, one row gated."""
    new = [NewSlot(Slot(slot), 1, 20, np.arange(3, 23, dtype=np.int32), params) for slot, params in enumerate(asked)]
    new.append(NewSlot(Slot(len(asked)), 1, 20, np.arange(3, 23, dtype=np.int32), ASKED[0], Pooling.MEAN))
    new.append(NewSlot(Slot(len(asked) + 1), 1, 20, np.arange(3, 23, dtype=np.int32), ASKED[0], Pooling.LAST))
    rows, decoding = len(new), len(asked)
    first = StepPlan(
        step_id=1,
        freed=np.zeros(0, np.int32),
        new=NewSlots.build(new),
        slots=np.arange(rows, dtype=np.int32),
        num_tokens=np.full(rows, 20, np.int32),
        computed=np.zeros(rows, np.int32),
        samples=np.ones(rows, np.bool_),
        block_offsets=offsets_of([2] * rows),
        block_ids=np.arange(2 * rows, dtype=np.int32),
    )
    second = StepPlan(
        step_id=2,
        freed=np.array([decoding, decoding + 1], np.int32),
        new=NewSlots.build([]),
        slots=np.arange(decoding, dtype=np.int32),
        num_tokens=np.ones(decoding, np.int32),
        computed=np.full(decoding, 20, np.int32),
        samples=np.ones(decoding, np.bool_),
        block_offsets=offsets_of([0] * decoding),
        block_ids=np.zeros(0, np.int32),
        gated=np.array([0], np.int32),
    )
    return [first, second]


def mask() -> np.ndarray:
    return np.full(-(-VOCAB // 32), 0xFFFFFFFF, np.uint32)


def test_no_value_of_the_device_is_needed() -> None:
    runner = runner_on(META)
    for plan in plans():
        runner.execute(plan, mask if len(plan.gated) else None)


class Guard(TorchDispatchMode):
    """Fails for operations that make the host wait for a GPU."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "equal", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.WAITS, f"{name} waits for its result"
        if name in {"index", "index_put", "index_put_", "_index_put_impl_"}:
            for index in args[1]:
                assert index is None or index.dtype is not torch.bool, "an index of booleans is counted first"
            if len(args) > 2:
                assert args[2].dim() > 0, "a single number of the host is copied, and waited for"
        if name == "repeat_interleave":
            assert kwargs
            assert kwargs.get("output_size") is not None
        return func(*args, **(kwargs or {}))


def test_no_operation_waits_though_it_needs_no_value() -> None:
    runner = runner_on(CPU)
    # Log-probabilities are found in another way on the CPU, which does wait; the test above covers those of a GPU.
    for plan in plans(tuple(params for params in ASKED if params.logprobs < 0)):
        with Guard():
            runner.execute(plan, mask if len(plan.gated) else None)


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x[x > 0],
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    ],
)
def test_the_guard_notices(asks: Any) -> None:
    with pytest.raises(AssertionError), Guard():
        asks(torch.ones(3))
