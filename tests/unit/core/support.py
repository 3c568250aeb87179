"""A scheduler, a reference scheduler and a content-checking worker, kept in step and compared after every event."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import HealthCheck, settings

from tercet_core.scheduling.request import Ending, FrontEnd, Request
from tercet_core.scheduling.scheduler import Scheduler
from tercet_core.scheduling.state import Limits
from tercet_shared.hashing import root_key
from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.frames import decode_plan, decode_result, encode_plan, encode_result
from tercet_shared.wire.step import StepResult, offsets_of
from tests.fakes.reference_scheduler import RefAnswer, ReferenceScheduler, RefOutput, RefOutputRow, RefPlan, RefRequest
from tests.unit.core.kv_worker import KvWorker, continuation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tercet_core.scheduling.outputs import Output
    from tercet_shared.wire.step import StepPlan

VOCAB = 50

_EXAMPLES = int(os.environ.get("TERCET_PROPERTY_EXAMPLES", "0"))


def property_settings(*, steps: int, long_steps: int) -> settings:
    """Returns how a state machine runs: a small, fixed set of examples, or ``TERCET_PROPERTY_EXAMPLES`` random ones."""
    return settings(
        max_examples=_EXAMPLES or 60,
        stateful_step_count=long_steps if _EXAMPLES else steps,
        derandomize=not _EXAMPLES,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def make_limits(**changes: int) -> Limits:
    """Returns small limits; a block has 4 tokens."""
    values = {
        "max_slots": 4, "num_blocks": 32, "block_size": 4, "max_model_len": 64, "max_batched_tokens": 32,
        "long_prefill_limit": 0, "vocab_size": VOCAB,
    }  # fmt: skip
    caching = bool(changes.pop("prefix_caching", True))
    return Limits(**{**values, **changes}, prefix_caching=caching)


def make_request(
    handle: int = 0,
    tokens: Sequence[int] = (1, 2, 3),
    *,
    resumed: Sequence[int] = (),
    max_tokens: int = 8,
    stops: tuple[int, ...] = (),
    eos: tuple[int, ...] = (),
    priority: int = 0,
    front_end: int = 0,
    attempt: int = 0,
    salt: str = "",
    tenant: str = "",
) -> Request:
    """Returns a request whose ``tokens`` are the prompt."""
    return Request(
        front_end=FrontEnd(front_end),
        handle=handle,
        attempt=attempt,
        request_id=f"request {handle}",
        prompt_len=len(tokens),
        tokens=np.array([*tokens, *resumed], np.int32),
        params=SamplingParams(max_tokens=max_tokens, stop_token_ids=stops, eos_token_ids=eos),
        root=root_key("model", salt=salt),
        priority=priority,
        tenant=tenant,
    )


def answer(plan: StepPlan, *rows: Sequence[int], not_finite: Sequence[int] = ()) -> StepResult:
    """Returns a result with these tokens per row; without ``rows`` every row that samples yields token 0."""
    chosen = rows or [[0] if samples else [] for samples in plan.samples.tolist()]
    ids = np.array([token for row in chosen for token in row], np.int32)
    return StepResult(plan.step_id, offsets_of([len(row) for row in chosen]), ids, np.array(not_finite, np.int32))


def failure(plan: StepPlan) -> StepResult:
    """Returns the result of a step that failed."""
    return StepResult(plan.step_id, np.zeros(1, np.int32), np.zeros(0, np.int32), error="out of memory")


def next_plan(scheduler: Scheduler) -> StepPlan:
    """Plans a step that must exist, and checks the invariants."""
    plan = scheduler.plan()
    assert plan is not None
    scheduler.check_integrity()
    return plan


def apply(scheduler: Scheduler, result: StepResult) -> list[Output]:
    """Applies a result and checks the invariants."""
    outputs = scheduler.apply(result)
    scheduler.check_integrity()
    return outputs


def rows_of(output: Output) -> list[tuple[int, list[int]]]:
    """Returns handle and tokens of every row."""
    offsets = output.token_offsets.tolist()
    ids = output.token_ids.tolist()
    return [(handle, ids[offsets[i] : offsets[i + 1]]) for i, handle in enumerate(output.handles.tolist())]


@dataclass
class Client:
    """What a front end knows of one request, and what it ought to hear."""

    request: Request
    twin: RefRequest
    expected: list[int]
    expected_ending: Ending
    resumed: int = 0
    heard: list[int] = field(default_factory=list)
    ending: Ending | None = None
    had_drafts: bool = False
    spoiled: bool = False  # a step of it failed or was not finite; or it did not fit

    @property
    def open(self) -> bool:
        """Whether its terminal event has not come."""
        return self.ending is None


@dataclass
class _Sent:
    plan: StepPlan
    roots: dict[int, bytes]
    bounds: frozenset[int]
    clients: list[Client]


class Bench:
    """The three together. Every method compares what they say; a difference is an `AssertionError`."""

    def __init__(self, limits: Limits, *, policy: str = "priority", wire: bool = False) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits, policy=policy)
        self.reference = ReferenceScheduler(limits, policy=policy)
        self.worker = KvWorker(limits)
        self.clients: list[Client] = []
        self.sent: deque[_Sent] = deque()
        self.owners: dict[int, Client] = {}  # by slot, as the plans tell it
        self.unbounded: dict[int, int] = {}  # handle: step whose drafts are in flight
        self._wire = wire

    # ------------------------------------------------------------------------------------------------- events

    def submit(self, request: Request) -> Client:
        """Submits a request under the next handle, which it must bear."""
        assert request.handle == len(self.clients)
        resumed = len(request.tokens) - request.prompt_len
        params = request.params
        stops = frozenset(params.stop_token_ids + params.eos_token_ids)
        most = min(params.max_tokens, self.limits.max_model_len - request.prompt_len) - resumed
        expected = continuation(request.root, request.tokens.tolist(), most, self.limits.vocab_size)
        ending = Ending.LENGTH
        for i, token in enumerate(expected):
            if token in stops:
                expected, ending = expected[: i + 1], Ending.STOP
                break
        twin = RefRequest(
            handle=request.handle,
            front_end=request.front_end,
            root=request.root.hex(),
            tokens=request.tokens.tolist(),
            prompt_len=request.prompt_len,
            limit=min(request.prompt_len + params.max_tokens, self.limits.max_model_len),
            stops=stops,
            priority=request.priority,
            tenant=request.tenant,
        )
        self.scheduler.submit(request)
        self.reference.submit(twin)
        self.clients.append(Client(request, twin, expected, ending, resumed))
        self.check()
        return self.clients[-1]

    def abort(self, clients: Sequence[Client]) -> None:
        """Ends requests from outside; the front end hears nothing more of them."""
        for client in clients:
            client.ending = client.ending or Ending.ABORT
        self.scheduler.end([client.request for client in clients])
        self.reference.end([client.twin for client in clients])
        self.check()

    def propose(self, client: Client, good: int, bad: int) -> None:
        """Proposes ``good`` tokens that the model will draw, then ``bad`` ones that it will not."""
        ahead = client.expected[len(client.heard) :][:good]
        wrong = [(token + 1) % self.limits.vocab_size for token in client.expected[len(client.heard) + len(ahead) :]]
        ids = [*ahead, *wrong[:bad]]
        self.scheduler.propose(client.request, np.array(ids, np.int32))
        self.reference.propose(client.twin, ids)

    def reset_prefix_cache(self) -> None:
        """Forgets all prefixes."""
        assert self.scheduler.reset_prefix_cache() == len(self.reference.pool.holders)
        self.reference.pool.clear()
        self.check()

    def restart(self, num_blocks: int | None = None) -> None:
        """Forgets the steps in flight and all KV; with ``num_blocks`` the worker is another one."""
        if num_blocks is None:  # the same worker executes what it was sent, but nobody listens
            for sent in self.sent:
                self.worker.execute(sent.plan, sent.roots, bounds=sent.bounds)
        self.sent.clear()
        self.unbounded.clear()
        self.scheduler.restart(num_blocks)
        self.reference.restart(num_blocks)
        if num_blocks is not None:
            self.limits = self.scheduler.limits
            self.owners = {slot: client for slot, client in self.owners.items() if client.request.slot == slot}
            self.worker = KvWorker(self.limits, strangers=self.owners)
        self.check()

    def set_aside(self) -> None:
        """Keeps all that wait out of planning."""
        self.scheduler.set_aside()
        self.reference.set_aside()
        self.check()

    def bring_back(self, clients: Sequence[Client] | None = None) -> None:
        """Lets ``clients``, or all, wait for their turn again."""
        self.scheduler.bring_back(None if clients is None else [client.request for client in clients])
        self.reference.bring_back(None if clients is None else [client.twin for client in clients])
        self.check()

    def plan(self) -> bool:
        """Plans a step and sends it to the worker; returns whether there was one."""
        plan, twin = self.scheduler.plan(), self.reference.plan()
        failures, failed = self.scheduler.take_failures(), self.reference.failed
        self.reference.failed = []
        assert [failure.request.handle for failure in failures] == failed
        for handle in failed:
            assert self.clients[handle].open
            self.clients[handle].ending = Ending.ERROR
            self.clients[handle].spoiled = True
        assert (plan is None) == (twin is None)
        if plan is not None and twin is not None:
            self._compare(plan, twin)
        self.check()
        return plan is not None

    def deliver(self, *, not_finite: Sequence[int] = (), fails: bool = False) -> None:
        """Lets the worker execute the oldest step in flight and applies its result."""
        sent = self.sent.popleft()
        not_finite = sorted({i % len(sent.plan.slots) for i in not_finite})
        result = self.worker.execute(
            sent.plan, sent.roots, bounds=sent.bounds, not_finite=not_finite, error="lost" if fails else ""
        )
        answers: list[RefAnswer] | None = None
        if not fails:
            offsets, ids = result.token_offsets.tolist(), result.token_ids.tolist()
            answers = [
                RefAnswer(tuple(ids[offsets[i] : offsets[i + 1]]), i not in not_finite)
                for i in range(len(sent.plan.slots))
            ]
        for i, client in enumerate(sent.clients):
            if fails or i in not_finite:
                client.spoiled = True
            if self.unbounded.get(client.request.handle) == sent.plan.step_id:
                del self.unbounded[client.request.handle]
        if self._wire:
            result = decode_result(encode_result(result))
        outputs = [as_reference(output) for output in self.scheduler.apply(result)]
        assert outputs == self.reference.apply(answers)
        self._hear(outputs)
        self.check()

    def turn(self, depth: int) -> bool:
        """Plans up to ``depth`` steps ahead and applies the oldest; returns whether anything was in flight."""
        while len(self.sent) < depth and self.plan():
            pass
        if not self.sent:
            return False
        self.deliver()
        return True

    def drain(self, depth: int = 2, *, turns: int = 5000) -> None:
        """Runs until nobody is left, and checks that everybody has heard everything exactly once."""
        self.bring_back()
        while self.turn(depth):
            turns -= 1
            assert turns, "no end in sight"
        scheduler = self.scheduler
        assert scheduler.num_running == scheduler.num_waiting == scheduler.in_flight == 0, "somebody was left behind"
        assert scheduler.pool.available == self.limits.num_blocks
        assert scheduler.pool.referenced == 0
        assert scheduler.table.num_free == self.limits.max_slots
        for client in self.clients:
            assert client.heard == client.expected[: len(client.heard)]
            if client.spoiled:
                assert client.ending in {Ending.ERROR, Ending.ABORT} or client.heard == client.expected
            elif client.ending is not Ending.ABORT:
                assert client.heard == client.expected
                assert client.ending is client.expected_ending

    # ------------------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        """The invariants of `contracts.md` §1, and that both schedulers stand at the same point."""
        scheduler, reference, table = self.scheduler, self.reference, self.scheduler.table
        scheduler.check_integrity()
        assert scheduler.pool.available == reference.pool.available
        assert scheduler.pool.cached == len(reference.pool.cached)
        assert scheduler.counters.preemptions == reference.preemptions
        assert scheduler.counters.recomputed_tokens == reference.recomputed_tokens
        assert scheduler.num_waiting == len(reference.waiting) + len(reference.aside)
        running = [self._handle(slot) for slot in table.order.tolist()]
        assert running == [twin.handle for twin in reference.running]
        for client in self.clients:
            slot, twin = client.request.slot, client.twin
            assert (slot is None) == (not twin.has_slot)
            if slot is None:
                continue
            assert int(table.known[slot]) == twin.known
            assert int(table.computed[slot]) == twin.computed
            assert int(table.placeholders[slot]) == twin.placeholders
            assert int(table.landed[slot]) == twin.landed
            assert int(table.held[slot]) == len(twin.blocks)
            assert int(table.drafts[slot]) == len(twin.drafts)
            if not table.in_flight[slot] and not client.had_drafts:
                assert int(table.held[slot]) == -(-twin.computed // self.limits.block_size)

    def _handle(self, slot: int) -> int:
        request = self.scheduler.table.requests[slot]
        assert request is not None
        return request.handle

    def _compare(self, plan: StepPlan, twin: RefPlan) -> None:
        for column in (plan.slots, plan.num_tokens, plan.computed, plan.block_offsets, plan.block_ids, plan.freed):
            assert column.dtype == np.int32
        assert plan.samples.dtype == np.bool_
        assert sorted(self.owners.pop(slot).request.handle for slot in plan.freed.tolist()) == sorted(twin.freed)
        drafts = np.diff(plan.draft_offsets).tolist() if len(plan.draft_offsets) else [0] * len(plan.slots)
        assert plan.draft_ids.tolist() == [token for row in twin.rows for token in row.drafts]
        got = list(
            zip(
                [self._handle(slot) for slot in plan.slots.tolist()],
                plan.num_tokens.tolist(), plan.computed.tolist(), plan.samples.tolist(), drafts,
                np.diff(plan.block_offsets).tolist(), np.isin(plan.slots, plan.new.slots).tolist(),
                strict=True,
            )
        )  # fmt: skip
        assert got == [
            (row.request.handle, row.tokens, row.computed, row.samples, len(row.drafts), row.new_blocks, row.starts)
            for row in twin.rows
        ]
        self._send(plan, drafts)

    def _send(self, plan: StepPlan, drafts: list[int]) -> None:
        clients = [self.clients[self._handle(slot)] for slot in plan.slots.tolist()]
        bounds = set()
        for i, client in enumerate(clients):
            handle = client.request.handle
            slot = int(plan.slots[i])
            self.owners[slot] = client
            if handle in self.unbounded and int(self.scheduler.table.in_flight[slot]) > 1:
                bounds.add(i)
            if drafts[i]:
                client.had_drafts = True
                self.unbounded[handle] = plan.step_id
        for i, slot in enumerate(plan.new.slots.tolist()):
            client = self.owners[slot]
            tokens = plan.new.token_ids[plan.new.token_offsets[i] : plan.new.token_offsets[i + 1]].tolist()
            assert tokens == client.request.tokens.tolist() + client.heard
        roots = {slot: self.owners[slot].request.root for slot in plan.new.slots.tolist()}
        if self._wire:
            plan = decode_plan(encode_plan(plan))
        self.sent.append(_Sent(plan, {slot: bytes(root) for slot, root in roots.items()}, frozenset(bounds), clients))

    def _hear(self, outputs: list[RefOutput]) -> None:
        endings = {"stop": Ending.STOP, "length": Ending.LENGTH, "error": Ending.ERROR}
        for output in outputs:
            for row in output.rows:
                client = self.clients[row.handle]
                assert client.open, "a token or a second end after the end"
                assert client.request.front_end == output.front_end
                client.heard += row.tokens
                if row.ending:
                    client.ending = endings[row.ending]
                    assert client.ending is not Ending.ERROR or client.spoiled


def as_reference(output: Output) -> RefOutput:
    """Returns an output in the reference scheduler's terms."""
    ends = {end.row: end for end in output.ends}
    assert len(ends) == len(output.ends), "two ends for one row"
    rows = []
    for i, (handle, tokens) in enumerate(rows_of(output)):
        if (end := ends.get(i)) is not None:
            name = end.ending.name.lower()
            rows.append(RefOutputRow(handle, tuple(tokens), name, end.stop_id, end.cached_tokens))
        else:
            rows.append(RefOutputRow(handle, tuple(tokens)))
    return RefOutput(output.front_end, tuple(rows))


def run_until(bench: Bench, condition: Callable[[], bool], *, depth: int = 1) -> None:
    """Turns until the condition holds."""
    for _ in range(1000):
        if condition():
            return
        assert bench.turn(depth), "nothing is left to do"
    raise AssertionError("the condition never held")
