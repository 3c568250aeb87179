"""Random events against guided, pooled and free requests together; see `guided_bench`.

For a long, random run set ``TERCET_PROPERTY_EXAMPLES``, as for ``test_scheduler_properties``.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tercet_core.scheduling.state import Limits
from tercet_shared.pooling import Pooling
from tercet_shared.sampling_params import OFF
from tests.unit.core.guided_bench import VOCAB, Client, GuidedBench, ToyGuide, undisturbed
from tests.unit.core.support import make_request, property_settings


@st.composite
def small_limits(draw: st.DrawFn) -> Limits:
    block_size = draw(st.sampled_from([1, 2, 4]))
    model_len = draw(st.integers(12, 40))
    room = draw(st.sampled_from([60, 100, 130, 200]))
    return Limits(
        max_slots=draw(st.integers(1, 6)),
        num_blocks=max(model_len * room // (100 * block_size), 1),
        block_size=block_size,
        max_model_len=model_len,
        max_batched_tokens=draw(st.sampled_from([1, 3, 8, 32, 32])),
        long_prefill_limit=draw(st.sampled_from([0, 0, 0, 3])),
        prefix_caching=draw(st.booleans()),
        vocab_size=VOCAB,
    )


class GuidedMachine(RuleBasedStateMachine):
    @initialize(limits=small_limits(), depth=st.integers(1, 4), policy=st.sampled_from(["priority", "fcfs"]))
    def start(self, limits: Limits, depth: int, policy: str) -> None:
        self.bench = GuidedBench(limits, policy=policy)
        self.depth = depth

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
        output=st.sampled_from([1, 3, 8, 20, 30]),
        resumed=st.sampled_from([0, 0, 1, 4]),
        stops=st.sampled_from([(), (), (0,), (3, 5)]),
        priority=st.sampled_from([0, 0, 1]),
        kind=st.sampled_from(["guided", "guided", "guided", "free", "breaks", "last", "mean"]),
        logprobs=st.sampled_from([OFF, OFF, OFF, 0]),
    )
    def submit(
        self,
        prompt: list[int],
        output: int,
        resumed: int,
        stops: tuple[int, ...],
        priority: int,
        kind: str,
        logprobs: int,
    ) -> None:
        handle, longest = len(self.bench.clients), self.bench.limits.max_model_len
        prompt = prompt[: longest - 1]
        if kind in {"last", "mean"}:
            request = make_request(handle, prompt, priority=priority)
            request.pooling = Pooling[kind.upper()]
            self.bench.submit(request, None)
            return
        output = min(output, longest - len(prompt))
        earlier: list[int] = []
        if kind == "guided":
            probe = make_request(0, prompt)
            earlier = undisturbed(bytes(probe.root), prompt, min(resumed, output - 1), ToyGuide())
            if set(earlier) & {*stops, 10}:
                earlier = []
        request = make_request(
            handle, prompt, resumed=earlier, max_tokens=output, stops=stops, priority=priority, attempt=len(earlier)
        )
        request.params = replace(request.params, logprobs=logprobs)
        guides = {"guided": ToyGuide(), "breaks": ToyGuide(breaks_at=1 + len(prompt) % 7)}
        self.bench.submit(request, guides.get(kind))

    @rule(moves=st.text("pd", min_size=1, max_size=6))
    def plan_and_deliver(self, moves: str) -> None:
        for move in moves:
            if move == "p" and len(self.bench.sent) < self.depth:
                self.bench.plan()
            elif move == "d" and self.bench.sent:
                self.bench.deliver()

    @rule(turns=st.integers(1, 12))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.bench.turn(self.depth)

    @rule(
        kind=st.sampled_from(["abort", "abort", "not finite", "step fails", "worker lost"]),
        picks=st.lists(st.integers(0, 9), min_size=1, max_size=2),
    )
    def disturb(self, kind: str, picks: list[int]) -> None:
        bench = self.bench
        if kind == "abort":
            alive = [client for client in bench.clients if client.ending is None]
            chosen: dict[int, Client] = {pick % len(alive): alive[pick % len(alive)] for pick in picks if alive}
            bench.abort(list(chosen.values()))
        elif kind == "worker lost":
            bench.lose_worker()
        elif bench.sent and not bench.sent[0].forgotten:
            bench.deliver(not_finite=picks[:1] if kind == "not finite" else (), fails=kind == "step fails")

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.drain(self.depth)


TestGuides = GuidedMachine.TestCase
TestGuides.settings = property_settings(steps=30, long_steps=50)
