"""A step whose work was given to the device, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from tercet_shared.wire.step import StepResult
from tercet_worker.sampling import Sampled
from tercet_worker.sampling.logprobs import Scored, columns

if TYPE_CHECKING:
    from tercet_shared.wire.step import StepPlan
    from tercet_worker.state.batch import SampleRows
    from tercet_worker.state.pooling import Pooled
    from tercet_worker.state.transfer import Arrival, Transfer


@dataclass(slots=True)
class PendingStep:
    """A step whose work was given to the device. `result` waits for it."""

    plan: StepPlan
    drawn: list[tuple[SampleRows, Sampled]] = field(default_factory=list)
    logprobs: list[Scored] = field(default_factory=list)  # of drawn tokens
    prompt_logprobs: Scored | None = None
    pooled: Pooled | None = None
    finished: StepResult | None = None  # where everything is on the host already
    arrival: Arrival | None = None  # of all tensors above, which are the host's copies then

    def send(self, transfer: Transfer) -> None:
        """Sends everything to the host, behind what was given to the device so far; nothing is added afterwards."""
        scores = [score for scored in self.logprobs for score in scored.scores]
        if self.prompt_logprobs is not None:
            scores += self.prompt_logprobs.scores
        tensors = [tensor for _, sampled in self.drawn for tensor in (sampled.token_ids, sampled.finite)]
        tensors += [tensor for score in scores for tensor in score.columns()]
        if self.pooled is not None:
            tensors.append(self.pooled.vectors)
        self.arrival = transfer(tensors)
        copies = iter(self.arrival.tensors)
        self.drawn = [(rows, Sampled(next(copies), next(copies))) for rows, _ in self.drawn]
        self.logprobs = [replace(scored, scores=scored.taken(copies)) for scored in self.logprobs]
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = replace(self.prompt_logprobs, scores=self.prompt_logprobs.taken(copies))
        if self.pooled is not None:
            self.pooled = replace(self.pooled, vectors=next(copies))

    def result(self) -> StepResult:
        """Waits until everything is on the host, and returns it in the order of the plan's rows."""
        if self.finished is not None:
            return self.finished
        if self.arrival is not None:
            self.arrival.wait()
        rows = len(self.plan.slots)
        tokens = np.zeros(rows, np.int32)
        yields = np.zeros(rows, np.bool_)
        broken = np.zeros(rows, np.bool_)
        for drawn, sampled in self.drawn:
            tokens[drawn.plan_rows] = sampled.token_ids.cpu().numpy()
            yields[drawn.plan_rows] = True
            broken[drawn.plan_rows] = ~sampled.finite.cpu().numpy()
        if self.prompt_logprobs is not None:
            broken[self.prompt_logprobs.broken()] = True
        if self.pooled is not None:
            broken[self.pooled.plan_rows[~self.pooled.vectors.isfinite().all(dim=1).cpu().numpy()]] = True
        yields &= ~broken
        offsets = np.zeros(rows + 1, np.int32)
        np.cumsum(yields, out=offsets[1:])
        not_finite = np.flatnonzero(broken)
        result = StepResult(self.plan.step_id, offsets, tokens[yields], not_finite.astype(np.int32))
        if self.logprobs:
            result.logprobs = columns(self.logprobs, not_finite)
        if self.prompt_logprobs is not None:
            result.prompt_logprobs = columns([self.prompt_logprobs], not_finite)
        if self.pooled is not None:
            order = np.argsort(self.pooled.plan_rows)
            order = order[~broken[self.pooled.plan_rows[order]]]
            result.pooled_rows = self.pooled.plan_rows[order].astype(np.int32)
            result.pooled = self.pooled.vectors.cpu().numpy()[order].reshape(-1)
        return result
