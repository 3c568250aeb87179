"""One eventful run of a worker, the same for one rank and for many: what each request gets is compared afterwards."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from tercet_shared.pooling import Pooling
from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.step import LogProbColumns, StepPlan, StepResult
from tests.integration.worker.driver import Driver, Request

DEPTH = 3
"""Steps under way at once."""


@dataclass
class Play:
    """Runs steps, several under way at once, and keeps what they yield."""

    driver: Driver
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], float] = field(default_factory=dict)
    vectors: dict[str, np.ndarray] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)  # by slot
    _under_way: deque[tuple[StepPlan, object]] = field(default_factory=deque)

    def start(self, name: str, slot: int, prompt: list[int], params: SamplingParams, **more: object) -> Request:
        self._names[slot] = name
        return self.driver.start(slot, prompt, params, **more)  # type: ignore[arg-type]

    def step(self, counts: dict[int, int], **more: object) -> None:
        self._under_way.append(self.driver.submit(counts, **more))  # type: ignore[arg-type]
        while len(self._under_way) > DEPTH:
            self._land()

    def settle(self) -> None:
        while self._under_way:
            self._land()

    def finish(self, request: Request, *, keep: int = 0) -> None:
        self.settle()
        name = self._names[request.slot]
        self.tokens[name] = request.output
        if request.vector is not None:
            self.vectors[name] = request.vector
        self.driver.finish(request, keep=keep)

    def run(self, budget: int, outputs: int) -> None:
        """Steps until all requests have so many tokens; prompts are computed in pieces beside those that decode."""
        while True:
            counts, left = {}, budget
            for slot, request in self.driver.requests.items():
                made = request.known - request.prompt_len
                wants = made < outputs if request.pooling is Pooling.NONE else request.need > 0
                count = min(request.need, left) if wants else 0
                if count:
                    counts[slot] = count
                    left -= count
            if not counts:
                return
            self.step(counts)

    def _land(self) -> None:
        plan, pending = self._under_way.popleft()
        result: StepResult = pending.result()  # type: ignore[attr-defined]
        self.driver.land(plan, result)
        for columns in (result.logprobs, result.prompt_logprobs):
            if columns is not None:
                self._note(plan, columns)

    def _note(self, plan: StepPlan, columns: LogProbColumns) -> None:
        for number, row in enumerate(columns.rows.tolist()):
            name = self._names[int(plan.slots[row])]
            begin, end = columns.token_offsets[number : number + 2].tolist()
            for token in range(begin, end):
                place = int(columns.first[number]) + token - begin
                self.logprobs[name, place] = float(columns.logprobs[token])


def greedy(**params: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=1_000, **params)  # type: ignore[arg-type]


def play(driver: Driver, prompts: list[list[int]], vocab: int, *, outputs: int) -> Play:
    """Runs greedy and seeded requests with all that a step can be asked for.

    Prompts are computed in pieces, requests are preempted, slots change owners while tokens of the last one are under
    way, whole blocks are found in the cache, tokens are forced, and rows draw under masks.
    """
    show = Play(driver)
    size = driver.runner.limits.block_size
    first = show.start("greedy", 0, prompts[0], greedy(logprobs=2, prompt_logprobs=1))
    seeded = show.start("seeded", 1, prompts[1], SamplingParams(temperature=0.8, seed=7, max_tokens=999, top_p=0.95))
    penalized = show.start(
        "penalized", 2, prompts[2], SamplingParams(temperature=0.7, seed=3, max_tokens=999, frequency_penalty=1.0)
    )
    vector = show.start("vector", 3, prompts[3], greedy(), pooling=Pooling.MEAN)
    show.run(budget=11, outputs=4)
    # A grammar's turn: one row under a mask, one with forced tokens behind the token in flight, one free.
    mask = np.zeros((1, -(-vocab // 32)), np.uint32)
    mask[0, 5] = 0b1010
    show.step({0: 1, 1: 4, 2: 1}, gated=(2,), grammar=lambda: mask.reshape(-1), appended={1: [17, 40, 5]})
    show.settle()
    assert penalized.output[-1] in (161, 163)
    # Preemption, and a newcomer in the slot of one whose last token is under way.
    show.driver.preempt(seeded)
    show.finish(vector)
    show.step({2: 1, 0: 1})
    show.driver.requests.pop(2)
    show.driver._freed.append(2)
    late = show.start("late", 2, prompts[4], greedy())
    show.run(budget=64, outputs=outputs)
    # What the first prompt left in the cache serves another request.
    shared = first.blocks[: len(prompts[0]) // size]
    again = show.start("again", 4, prompts[0], greedy(), shared=shared)
    show.run(budget=64, outputs=outputs)
    for request in (again, late, seeded, first):
        show.finish(request)
    assert show.tokens["again"] == show.tokens["greedy"]
    return show


def compare(many: Play, one: Play, *, atol: float = 1e-4) -> None:
    """Compares what several ranks made with what one made."""
    assert many.tokens == one.tokens
    assert many.logprobs.keys() == one.logprobs.keys()
    for key, value in one.logprobs.items():
        assert abs(many.logprobs[key] - value) < atol, key
    for name, vector in one.vectors.items():
        np.testing.assert_allclose(many.vectors[name], vector, atol=100 * atol, rtol=1e-3)
