"""A core in miniature for tests of the model runner: it hands out blocks, counts tokens, and sends plans by hand.

It does not look at tokens to make plans, so a step can be planned before the result of the one before it is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tercet_shared.config import WorkerSettings, parse
from tercet_shared.pooling import Pooling
from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.step import NewSlot, NewSlots, Slot, StepPlan, StepResult, offsets_of
from tercet_worker.pending import PendingStep
from tercet_worker.runner import ModelRunner
from tercet_worker.sampling import GrammarSource
from tercet_worker.startup import Engine, load_engine


def engine_for(model: Path, *flags: str) -> Engine:
    """Loads a worker's engine with the flags of its command line, in this thread."""
    return load_engine(parse(WorkerSettings, [str(model), *flags]), lambda _stage, _fraction: None)


GREEDY = SamplingParams(temperature=0.0, max_tokens=1_000)


@dataclass
class Request:
    """One request in a slot."""

    slot: int
    tokens: list[int]  # prompt, then what has come back
    prompt_len: int
    params: SamplingParams
    known: int  # tokens, those in flight included
    computed: int = 0
    cached: int = 0  # tokens in blocks that came with the request
    blocks: list[int] = field(default_factory=list)
    sent: bool = False  # whether the worker has its state
    pooling: Pooling = Pooling.NONE
    vector: np.ndarray | None = None  # of a pooling request

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def need(self) -> int:
        return self.known - self.computed


class Driver:
    """Plans steps for one runner."""

    def __init__(self, runner: ModelRunner, *, seed: int = 0) -> None:
        self.runner = runner
        self.requests: dict[int, Request] = {}
        blocks = np.random.default_rng(seed).permutation(runner.limits.num_blocks)
        self.free_blocks: list[int] = blocks.tolist()
        self._freed: list[int] = []
        self._step = 0

    def start(
        self,
        slot: int,
        prompt: list[int],
        params: SamplingParams = GREEDY,
        *,
        shared: list[int] | None = None,
        pooling: Pooling = Pooling.NONE,
    ) -> Request:
        """Puts a request into a slot; ``shared`` are whole blocks whose tokens are in the cache already."""
        request = Request(slot, list(prompt), len(prompt), params, len(prompt), blocks=[], pooling=pooling)
        if shared:
            request.cached = len(shared) * self.runner.limits.block_size
            request.computed = min(request.cached, len(prompt) - 1)
            request.blocks = list(shared)
        self.requests[slot] = request
        return request

    def finish(self, request: Request, *, keep: int = 0) -> None:
        """Frees a request's slot, and its blocks but the first ``keep``."""
        self.free_blocks += request.blocks[keep:]
        self._freed.append(request.slot)
        del self.requests[request.slot]

    def preempt(self, request: Request) -> None:
        """Takes a request's blocks away; its next step sends its state again and computes from the start."""
        self.free_blocks += request.blocks
        request.blocks, request.computed, request.cached, request.sent = [], 0, 0, False

    def submit(
        self,
        counts: dict[int, int],
        *,
        appended: dict[int, list[int]] | None = None,
        gated: tuple[int, ...] = (),
        grammar: GrammarSource | None = None,
    ) -> tuple[StepPlan, PendingStep]:
        """Executes one step with these tokens per slot, without reading its result.

        Args:
            counts: slot to number of tokens; tokens appended in this step are among them.
            appended: slot to tokens that follow all known ones.
            gated: slots that draw under ``grammar``, whose rows are in the order of ``counts``.
            grammar: gives the mask.
        """
        for slot, tokens in (appended or {}).items():
            self.requests[slot].known += len(tokens)
        size = self.runner.limits.block_size
        rows = [(self.requests[slot], count) for slot, count in counts.items()]
        new, more = [], []
        for request, count in rows:
            held = len(request.blocks) if request.sent else 0
            wanted = -(-(request.computed + count) // size)
            request.blocks += [self.free_blocks.pop() for _ in range(wanted - len(request.blocks))]
            more.append(request.blocks[held:])
            if not request.sent:
                tokens = np.array(request.tokens, np.int32)
                params, pooling = request.params, request.pooling
                new.append(NewSlot(Slot(request.slot), 1, request.prompt_len, tokens, params, pooling, request.cached))
        self._step += 1
        plan = StepPlan(
            step_id=self._step,
            freed=np.array(self._freed, np.int32),
            new=NewSlots.build(new),
            slots=np.array([request.slot for request, _ in rows], np.int32),
            num_tokens=np.array([count for _, count in rows], np.int32),
            computed=np.array([request.computed for request, _ in rows], np.int32),
            samples=np.array([count == request.need for request, count in rows], np.bool_),
            block_offsets=offsets_of([len(ids) for ids in more]),
            block_ids=np.array([block for ids in more for block in ids], np.int32),
            gated=np.array([row for row, slot in enumerate(counts) if slot in gated], np.int32),
        )
        if appended:
            runs = [appended.get(slot, []) for slot in counts]
            plan.appended_offsets = offsets_of([len(ids) for ids in runs])
            plan.appended_ids = np.array([token for ids in runs for token in ids], np.int32)
        for slot, tokens in (appended or {}).items():
            self.requests[slot].tokens += tokens
        self._freed = []
        for (request, count), samples in zip(rows, plan.samples, strict=True):
            request.computed += count
            request.known += int(samples and request.pooling is Pooling.NONE)
            request.sent = True
        return plan, self.runner.execute(plan, grammar)

    def land(self, plan: StepPlan, result: StepResult) -> None:
        """Gives the tokens of a step to their requests."""
        assert result.step_id == plan.step_id
        for row, slot in enumerate(plan.slots.tolist()):
            tokens = result.token_ids[result.token_offsets[row] : result.token_offsets[row + 1]].tolist()
            request = self.requests.get(slot)
            if request is None:
                continue
            draws = bool(plan.samples[row]) and request.pooling is Pooling.NONE
            assert len(tokens) == int(draws), "a row yields a token exactly where it samples"
            request.tokens += tokens
        vectors = np.split(result.pooled, len(result.pooled_rows)) if len(result.pooled_rows) else []
        for row, vector in zip(result.pooled_rows.tolist(), vectors, strict=True):
            request = self.requests[int(plan.slots[row])]
            assert plan.samples[row]
            assert request.pooling is not Pooling.NONE
            assert request.vector is None
            request.vector = vector

    def step(
        self,
        counts: dict[int, int],
        *,
        appended: dict[int, list[int]] | None = None,
        gated: tuple[int, ...] = (),
        grammar: GrammarSource | None = None,
    ) -> StepResult:
        """Executes one step and reads its result. Arguments as for `submit`."""
        plan, pending = self.submit(counts, appended=appended, gated=gated, grammar=grammar)
        result = pending.result()
        self.land(plan, result)
        return result

    def run(self, budget: int, outputs: int) -> None:
        """Steps until every request has so many output tokens: decodes and prefills share the budget in slot order."""
        while True:
            counts, left = {}, budget
            for slot, request in self.requests.items():
                wants = len(request.output) < outputs if request.pooling is Pooling.NONE else request.vector is None
                count = min(request.need, left) if wants else 0
                if count:
                    counts[slot] = count
                    left -= count
            if not counts:
                return
            self.step(counts)
