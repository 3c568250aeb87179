"""Executes step plans: state, batch, forward pass, sampling, result. One thread calls it, in the order of the plans.

This file only puts the parts in order. How a plan is checked, how a batch is laid out, how attention works, how a
token is drawn and what else a step yields stand in ``state``, ``attention``, ``sampling`` and ``pending.py``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from tercet_shared.errors import InternalError
from tercet_worker.kernels.decode_abi import DecodeOutcome
from tercet_worker.parallel.communicator import ALONE
from tercet_worker.parallel.handover import TokenHandover
from tercet_worker.pending import PendingStep
from tercet_worker.sampling import Sampled
from tercet_worker.sampling.logprobs import Scored, Scorer
from tercet_worker.state.batch import InputBatch, PromptRows, SampleRows
from tercet_worker.state.checks import PlanLimits, check_plan
from tercet_worker.state.mirror import to_device
from tercet_worker.state.pooling import Pooler
from tercet_worker.state.slots import LOGPROBS, POOLING, PROMPT_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from tercet_shared.wire.step import StepPlan
    from tercet_worker.attention.interface import AttentionBackend
    from tercet_worker.models.interface import StepModel
    from tercet_worker.parallel.communicator import Communicator
    from tercet_worker.program.decode import DecodeSteps
    from tercet_worker.sampling import GrammarSource, Sampler
    from tercet_worker.sampling.sampler import Scan
    from tercet_worker.state.slots import SlotState
    from tercet_worker.state.transfer import Transfer

_PIECE = 2 * 1024 * 1024
"""Logits of prompt tokens that exist at once: bounds the working memory to a few times 8 MiB."""


class ModelRunner:
    """A model, its KV cache and its slots.

    Args:
        model: with its weights.
        attention: with its KV cache allocated.
        state: of the slots.
        sampler: for the model's vocabulary.
        limits: that plans must keep to.
        decode: executes plain decode steps in one call, for the same model, attention and state.
        communicator: to the other ranks that hold parts of the model. All of them execute the same plans, and keep the
            same state; only the last stage of a pipeline samples.
        build: makes the batch of an applied plan; by default as `InputBatch.build` does.
        transfer: sends what a step yields to the host while the device goes on; None where it is there already.
        best: from hidden states ``[R, H]`` what `Scan` finds in their logits, cheaper than by them.
        reach: told the highest KV block that a step was given, after the step.
    """

    def __init__(
        self,
        model: StepModel,
        attention: AttentionBackend,
        state: SlotState,
        sampler: Sampler,
        limits: PlanLimits,
        *,
        decode: DecodeSteps | None = None,
        communicator: Communicator = ALONE,
        build: Callable[[StepPlan, SlotState], InputBatch] | None = None,
        transfer: Transfer | None = None,
        best: Scan | None = None,
        reach: Callable[[int], None] | None = None,
    ) -> None:
        self.limits = limits
        self._model = model
        self._attention = attention
        self._state = state
        self._sampler = sampler
        self._score = Scorer(limits.vocab_size, state.device)
        self._pool = Pooler(state.slots, state.device)
        self._decode = decode
        self._samples = communicator.topology.last
        self._handover = TokenHandover(communicator, state)
        self._build = build or partial(InputBatch.build, block_size=limits.block_size)
        self._transfer = transfer
        self._best = best
        self._reach = reach

    @property
    def overlaps(self) -> bool:
        """Whether a step may be given to the device before the one before it has been waited for."""
        return self._transfer is not None

    def reset(self) -> None:
        """Forgets all requests; weights and memory stay."""
        self._state.reset()

    @torch.inference_mode()
    def execute(self, plan: StepPlan, grammar: GrammarSource | None = None) -> PendingStep:
        """Applies ``plan``, gives its forward pass and sampling to the device, and returns without waiting for it.

        Args:
            plan: follows the one before in the core's order.
            grammar: gives the packed masks of the plan's gated rows. Asked for once, when all else is done; what it
                raises is raised here. It waits as long as it must: the next step starts after all rows of this one.

        Raises:
            ProtocolError: the plan cannot be executed; nothing of it was applied.
            InternalError: attention refused the batch. The rows count as not computed.
            GroupBrokenError: another rank is gone.
        """
        step = self._decode_step(self._decode, plan) if self._decode is not None else None
        if step is None:
            step = self._mixed_step(plan, grammar)
        if self._reach is not None and len(plan.block_ids):
            self._reach(int(plan.block_ids.max()))
        return step

    def _mixed_step(self, plan: StepPlan, grammar: GrammarSource | None) -> PendingStep:
        state = self._state
        check_plan(plan, state, self.limits)
        if len(plan.gated) and grammar is None and self._samples:
            raise InternalError("a step with gated rows was given no source of masks")
        self._handover.before(plan)
        state.apply(plan)
        step = PendingStep(plan)
        if not len(plan.slots):
            return step
        batch = self._build(plan, state)
        self._attention.plan(batch.attention(state))
        hidden = self._model.forward(batch.input_ids, batch.positions, self._attention)  # [T, H]
        if self._samples:
            self._finish(step, batch, hidden, grammar)
        self._handover.after(batch.samples)
        state.advance(plan)
        if self._transfer is not None:
            step.send(self._transfer)
        return step

    def _finish(
        self, step: PendingStep, batch: InputBatch, hidden: torch.Tensor, grammar: GrammarSource | None
    ) -> None:
        """Makes of ``hidden [T, H]`` all that the step yields."""
        plan, state = step.plan, self._state
        asks = int(np.bitwise_or.reduce(state.asks[plan.slots]))
        free, gated = batch.samples.split(plan.gated)
        if self._best is not None and self._take_best(self._best, step, batch, hidden, asks):
            free = free[:0]
        logits = self._logits(batch, hidden, len(free) + len(gated))
        self._draw(step, batch.samples, logits, free, asks)
        if asks & PROMPT_LOGPROBS:
            step.prompt_logprobs = self._score_prompts(PromptRows.build(plan, batch, state), hidden)
        self._draw(step, batch.samples, logits, gated, asks, grammar)
        if asks & POOLING:
            step.pooled = self._pool(plan, batch, state, hidden)

    def _decode_step(self, decode: DecodeSteps, plan: StepPlan) -> PendingStep | None:
        """Executes ``plan`` in one call, or returns None: it is no plain decode step, or not a sound one."""
        if not decode.may_be_plain(plan):
            return None
        if len(plan.freed) or len(plan.new):
            check_plan(plan, self._state, self.limits)
            self._state.begin(plan)
        outcome = decode.run(plan)
        if outcome is DecodeOutcome.NOT_PLAIN:
            return None
        step = PendingStep(plan)
        if outcome is DecodeOutcome.DRAWN:
            step.finished = decode.result(plan)
            return step
        every = np.arange(len(plan.slots))
        rows = SampleRows(every, plan.slots.astype(np.int64), plan.computed + np.int32(1))
        self._draw(step, rows, decode.logits[: len(every)], every, asks=0)
        self._state.advance(plan)
        return step

    def _take_best(self, best: Scan, step: PendingStep, batch: InputBatch, hidden: torch.Tensor, asks: int) -> bool:
        """Gives all rows that draw the token of their best logit, if that is all they want; returns whether it is."""
        rows = batch.samples
        if not len(rows) or len(step.plan.gated) or asks & LOGPROBS:
            return False
        if not self._state.sampling.takes_best(rows.slots, rows.positions):
            return False
        _, tokens, finite = best(hidden[batch.logits_rows])
        sampled = Sampled(tokens.masked_fill_(~finite, 0), finite)
        self._state.write_drawn(rows, sampled.token_ids)
        step.drawn.append((rows, sampled))
        return True

    def _logits(self, batch: InputBatch, hidden: torch.Tensor, rows: int) -> torch.Tensor:
        """Returns the logits ``[R, V]`` of the rows that draw, or none where ``rows``, those without a token, is 0."""
        if not rows:
            return torch.empty((0, self.limits.vocab_size), device=hidden.device)
        return self._model.logits(hidden[batch.logits_rows])

    def _draw(
        self,
        step: PendingStep,
        rows: SampleRows,
        logits: torch.Tensor,
        index: npt.NDArray[np.int64],
        asks: int,
        grammar: GrammarSource | None = None,
    ) -> None:
        """Draws for some ``rows``, ``index``, from ``logits [R, V]``, and notes it in ``step``."""
        if not len(index):
            return
        if len(index) < len(rows):
            rows, logits = rows.take(index), logits.index_select(0, self._there(index))
        state, gated = self._state, step.plan.gated
        asked = state.logprobs[rows.slots] if asks & LOGPROBS else None
        scored = index[:0] if asked is None else np.flatnonzero(asked >= 0)
        # A copy: the sampler writes to what it is given.
        raw = logits.index_select(0, self._there(scored)) if len(scored) else None
        masks = None if grammar is None else _in_order(grammar, gated, rows)
        batch = state.sampling.batch(rows.slots, rows.positions, gated=grammar is not None)
        sampled = self._sampler(logits, batch, masks)
        state.write_drawn(rows, sampled.token_ids)
        step.drawn.append((rows, sampled))
        if raw is not None and asked is not None:
            tokens, counts = sampled.token_ids[self._there(scored)], asked[scored]
            scores = self._score(raw, tokens, self._alternatives(counts))
            ones = np.ones(len(scored), np.int32)
            step.logprobs.append(Scored(rows.plan_rows[scored], rows.positions[scored], ones, counts, [scores]))

    def _score_prompts(self, rows: PromptRows, hidden: torch.Tensor) -> Scored | None:
        """Returns the scores of prompt tokens from ``hidden [T, H]``; None where no row has any in this step."""
        if not len(rows.plan_rows):
            return None
        scores, count = [], self._alternatives(rows.asked)
        size = max(1, _PIECE // self.limits.vocab_size)
        for places, tokens in zip(torch.split(rows.hidden_rows, size), torch.split(rows.tokens, size), strict=True):
            scores.append(self._score(self._model.logits(hidden[places]), tokens, count))
        return Scored(rows.plan_rows, rows.first, rows.lengths, rows.asked, scores)

    def _alternatives(self, asked: npt.NDArray[np.int32]) -> int:
        return min(int(asked.max()), self.limits.vocab_size)

    def _there(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return to_device(array, self._state.device)


def _in_order(grammar: GrammarSource, gated: npt.NDArray[np.int32], rows: SampleRows) -> GrammarSource:
    """Returns a source of the masks in the order of ``rows``, which are the ``gated`` ones of the plan."""
    return lambda: grammar().reshape(len(gated), -1)[np.searchsorted(gated, rows.plan_rows)]
