"""Random events against scheduler, reference scheduler and a worker that checks every KV entry it reads.

By default a small, fixed set of examples runs. For a long, random run set ``TERCET_PROPERTY_EXAMPLES``:

    TERCET_PROPERTY_EXAMPLES=5000 pytest --timeout=0 tests/unit/core/test_scheduler_properties.py
"""

from __future__ import annotations

import random

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tercet_core.scheduling.state import Limits
from tests.unit.core.kv_worker import continuation
from tests.unit.core.support import Bench, Client, make_request, property_settings

PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 6, 6, 6, 6, 6, 6], [9, 8, 7, 6, 5, 4])

PRIORITIES = (0, 0, 0, 1, 2)
TENANTS = ("a", "a", "a", "b", "c")


def small_limits(draw: random.Random) -> Limits:
    """Pools hold half a longest request to four of them."""
    block_size = draw.choice([1, 2, 2, 4])
    model_len = draw.randint(8, 32)
    room = draw.choice([50, 100, 100, 130, 160, 200, 400])
    return Limits(
        max_slots=draw.choice([1, 2, 3, 4, 5, 6, 8]),  # from 8 on fair sharing keeps one back
        num_blocks=max(model_len * room // (100 * block_size), 1),
        block_size=block_size,
        max_model_len=model_len,
        max_batched_tokens=draw.choice([1, 2, 3, 5, 8, 16, 32, 32]),
        long_prefill_limit=draw.choice([0, 0, 1, 3, 8]),
        max_partial_prefills=draw.choice([0, 0, 1, 2]),
        prefix_caching=draw.random() < 0.5,
        vocab_size=11,
        stages=draw.choice([1, 1, 1, 2, 3, 4]),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """One core at one depth; the worker's results come as late as the depth allows."""

    @initialize(seed=st.integers(0, 2**64 - 1))
    def start(self, seed: int) -> None:
        """Chooses the setting, and who is there from the start.

        By a seed, because Hypothesis likes to repeat its first choices: most settings would never meet.
        """
        draw = random.Random(seed)
        limits = small_limits(draw)
        policy = draw.choice(["priority", "priority", "fcfs", "fair", "fair"])
        self.bench = Bench(limits, policy=policy, wire=draw.random() < 0.5)
        self.depth = draw.randint(1, 4) if limits.stages == 1 else limits.stages + 1
        # Tokens to propose whenever possible: right ones, then wrong ones.
        self.drafts = draw.choice([None, None, None, (1, 0), (0, 2), (2, 2), (4, 0), (1, 4)])
        note(f"{limits}, {policy}, depth {self.depth}, drafts {self.drafts}")
        for number in range(draw.choice([0, 0, 3, 6, 12])):
            prompt = PROMPTS[0][: min(draw.randint(1, 9), limits.max_model_len - 1)]
            output = limits.max_model_len - len(prompt)
            priority, tenant = draw.choice(PRIORITIES), draw.choice(TENANTS)
            self.bench.submit(make_request(number, prompt, max_tokens=output, priority=priority, tenant=tenant))

    @rule(
        stream=st.sampled_from(PROMPTS),
        length=st.integers(1, 16),
        tail=st.lists(st.integers(0, 10), max_size=3),
        output=st.sampled_from([1, 2, 6, 12, 18, 24, 24]),
        resumed=st.sampled_from([0, 0, 0, 1, 5]),
        stops=st.sampled_from([(), (), (), (0,), (3, 5), (1, 2, 3, 4, 5, 6, 7, 8, 9)]),
        priority=st.sampled_from(PRIORITIES),
        front_end=st.integers(0, 2),
        salt=st.sampled_from(["", "", "", "other"]),
        tenant=st.sampled_from(TENANTS),
        copies=st.sampled_from([1, 1, 2, 3]),
    )
    def submit(
        self,
        *,
        stream: list[int],
        length: int,
        tail: list[int],
        output: int,
        resumed: int,
        stops: tuple[int, ...],
        priority: int,
        front_end: int,
        salt: str,
        tenant: str,
        copies: int,
    ) -> None:
        longest = self.bench.limits.max_model_len
        prompt = (stream[:length] + tail)[: longest - 1]
        output = min(output, longest - len(prompt))
        resumed = min(resumed, output - 1)
        for _ in range(copies):
            probe = make_request(0, prompt, salt=salt)
            earlier = continuation(probe.root, prompt, resumed, self.bench.limits.vocab_size)
            self.bench.submit(
                make_request(
                    len(self.bench.clients),
                    prompt,
                    resumed=earlier,
                    max_tokens=output,
                    stops=stops,
                    priority=priority,
                    front_end=front_end,
                    attempt=int(resumed > 0),
                    salt=salt,
                    tenant=tenant,
                )
            )

    def _pick(self, index: int) -> Client | None:
        alive = [client for client in self.bench.clients if client.open]
        return alive[index % len(alive)] if alive else None

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
            self._turn()

    def _turn(self) -> None:
        if self.drafts is not None:
            while self.bench.sent:  # drafts are taken only while nothing is in flight
                self.bench.deliver()
            for client in self.bench.clients:
                if client.open:
                    self.bench.propose(client, *self.drafts)
        self.bench.turn(self.depth)

    @rule(
        kind=st.sampled_from(["abort", "abort", "not finite", "step fails", "reset", "propose"]),
        picks=st.lists(st.integers(0, 9), min_size=1, max_size=2),
    )
    def disturb(self, kind: str, picks: list[int]) -> None:
        bench = self.bench
        if kind == "abort":
            chosen = {id(client): client for pick in picks if (client := self._pick(pick)) is not None}
            bench.abort(list(chosen.values()))
        elif kind == "reset":
            bench.reset_prefix_cache()
        elif kind == "propose":
            if (client := self._pick(picks[0])) is not None:
                bench.propose(client, len(picks), 1)
        elif bench.sent:
            bench.deliver(not_finite=picks[:1] if kind == "not finite" else (), fails=kind == "step fails")

    @precondition(lambda self: self.bench.reference.running)
    @rule(blocks=st.sampled_from([None, None, 100, 60, 150]))
    def restart(self, blocks: int | None) -> None:
        """``blocks``: None for the same worker, else the size of another one's pool in percent of the present one."""
        self.bench.restart(None if blocks is None else max(self.bench.limits.num_blocks * blocks // 100, 1))

    @precondition(lambda self: self.bench.reference.waiting or self.bench.reference.aside)
    @rule(picks=st.sampled_from([None, [], [0], [1, 0], [2, 5]]))
    def set_aside_and_bring_back(self, picks: list[int] | None) -> None:
        """``picks``: who comes back; None brings all back that were set aside before."""
        if picks is None:
            self.bench.bring_back()
        else:
            self.bench.set_aside()
            self.bench.bring_back([client for pick in picks if (client := self._pick(pick)) is not None])

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            for _ in range(20):
                self._turn()
            self.bench.drain(self.depth)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = property_settings(steps=40, long_steps=60)
