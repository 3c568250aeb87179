"""A scheduler whose requests are guided, pooled or free, and a content-checking worker that wants its masks.

What each request must yield is computed without a scheduler: a token at a time, nothing in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tercet_core.scheduling.request import Ending, Request
from tercet_core.scheduling.scheduler import Scheduler
from tercet_shared.errors import InvalidRequestError, TercetError
from tercet_shared.pooling import Pooling
from tercet_shared.wire.step import GrammarMask, StepResult
from tests.unit.core.kv_worker import KvWorker, kv_after, kv_root, next_token
from tests.unit.core.support import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tercet_core.scheduling.guides import Guide, Settled
    from tercet_core.scheduling.outputs import Output
    from tercet_core.scheduling.state import Limits
    from tercet_shared.wire.step import U32, StepPlan
    from tests.unit.core.kv_worker import _Row

END = 10
"""The end-of-sequence token of toy grammars."""
VOCAB = 11


class ToyGuide:
    """A grammar of a few rules: some tokens force a run of others, and what else may follow depends on the length.

    Args:
        breaks_at: output tokens at which it fails, as a grammar that becomes too complex does; 0: never.
    """

    end_ids = (END,)

    def __init__(self, breaks_at: int = 0) -> None:
        self.taken: list[int] = []
        self.forced: list[int] = []
        self.error: TercetError | None = None
        self._breaks_at = breaks_at

    def advance(self, tokens: list[int]) -> None:
        """Takes tokens; see `Guide`."""
        for token in tokens:
            assert self.error is None
            assert token in self.allowed, f"{token} was not allowed after {self.taken}"
            self.taken.append(token)
            if self.forced:
                self.forced = self.forced[1:]
            elif token % 4 == 1:
                self.forced = [(token + 3 * i + len(self.taken)) % END for i in range(token // 2 + 2)]
            if len(self.taken) == self._breaks_at:
                self.error = InvalidRequestError("It has become too complex.", param="guided_toy")
                return

    @property
    def allowed(self) -> list[int]:
        """The tokens that may follow."""
        if self.forced:
            return self.forced[:1]
        if len(self.taken) % 13 == 12:
            return [END]
        return [token for token in range(END) if (token + len(self.taken)) % 3]


class ToyMasks:
    """Writes masks of toy grammars."""

    def fill(self, guides: list[Guide], words: U32) -> None:
        """Writes the masks ``[n, words per row]``."""
        for guide, row in zip(guides, words, strict=True):
            assert isinstance(guide, ToyGuide)
            assert not row.any()
            row[0] = sum(1 << token for token in guide.allowed)


def draw(kv: int, allowed: list[int] | None) -> int:
    """Returns the token that the model draws at a position, among those that are allowed."""
    wanted = next_token(kv, VOCAB)
    return wanted if allowed is None or wanted in allowed else allowed[wanted % len(allowed)]


def undisturbed(root: bytes, tokens: Sequence[int], count: int, guide: ToyGuide) -> list[int]:
    """Returns what follows ``tokens`` under a guide, at most ``count`` tokens, to the end or to where it fails."""
    kv, out = kv_root(root), list[int]()
    for token in tokens:
        kv = kv_after(kv, token)
    while len(out) < count and guide.error is None and (not out or out[-1] != END):
        out.append(draw(kv, guide.allowed))
        guide.advance(out[-1:])
        kv = kv_after(kv, out[-1])
    return out


class GuidedWorker(KvWorker):
    """Executes plans with gated rows, appended tokens and rows to pool."""

    def __init__(self, limits: Limits, strangers: Iterable[int] = ()) -> None:
        super().__init__(limits, strangers)
        self.pooling: dict[int, int] = {}  # by slot
        self.appended = 0
        self._allowed: dict[int, list[int]] = {}  # of the step: by slot
        self._pooled: list[tuple[int, float]] = []  # of the step: slot and vector

    def run(self, plan: StepPlan, roots: dict[int, bytes], mask: GrammarMask | None, **more: object) -> StepResult:
        """Executes a plan whose mask has come."""
        assert (mask is not None) == bool(len(plan.gated))
        self._allowed, self._pooled = {}, []
        if mask is not None:
            assert mask.step_id == plan.step_id
            assert len(mask.words) == len(plan.gated)  # one word holds the vocabulary
            for row, word in zip(plan.gated.tolist(), mask.words.tolist(), strict=True):
                assert plan.samples[row]
                self._allowed[int(plan.slots[row])] = [token for token in range(VOCAB) if word >> token & 1]
        result = self.execute(plan, roots, **more)  # type: ignore[arg-type]  # its own arguments
        if self._pooled and not result.error:
            rows = {slot: row for row, slot in enumerate(plan.slots.tolist())}
            found = sorted((rows[slot], value) for slot, value in self._pooled)
            result.pooled_rows = np.array([row for row, _ in found], np.int32)
            result.pooled = np.array([value for _, value in found], np.float32)
        return result

    def _take_slots(self, plan: StepPlan, roots: dict[int, bytes]) -> None:
        super()._take_slots(plan, roots)
        self.pooling |= dict(zip(plan.new.slots.tolist(), plan.new.pooling.tolist(), strict=True))
        if not len(plan.appended_ids):
            return
        for i, slot in enumerate(plan.slots.tolist()):
            tokens = plan.appended_ids[plan.appended_offsets[i] : plan.appended_offsets[i + 1]].tolist()
            if tokens:
                assert slot not in plan.new.slots.tolist(), "appended tokens for a slot that is new"
                assert not self.slots[slot].broken
                self.slots[slot].tokens += tokens
                self.appended += len(tokens)

    def _sample(self, row: _Row) -> list[int]:
        slot = next(number for number, own in self.slots.items() if own is row.slot)
        if row.samples and self.pooling[slot]:
            row.slot.computed = row.start + row.count
            if not row.slot.broken:
                self._pooled.append((slot, pooled_value(row.slot.root, row.slot.tokens, self.pooling[slot])))
            return []
        drawn = super()._sample(row)
        if drawn and slot in self._allowed and not row.slot.broken:
            drawn = [draw(self._read(row.slot, row.start + row.count - 1), self._allowed[slot])]
            row.slot.tokens[-1:] = drawn
        return drawn


def pooled_value(root: int, tokens: Sequence[int], pooling: int) -> float:
    """Returns the vector, of one number, that a prompt is pooled to."""
    kv, values = root, list[int]()
    for token in tokens:
        kv = kv_after(kv, token)
        values.append(kv % 1000)
    return float(values[-1] if pooling == Pooling.LAST else sum(values) % 1009)


@dataclass
class Client:
    """What a front end knows of one request, and what it ought to hear."""

    request: Request
    expected: list[int]
    endings: set[Ending]
    vector: float | None = None
    heard: list[int] = field(default_factory=list)
    ending: Ending | None = None
    starts: int = 0
    pooled: float | None = None
    spoiled: bool = False  # a step of it was not finite, or it does not fit


@dataclass
class _Sent:
    plan: StepPlan
    roots: dict[int, bytes]
    forgotten: bool = False


class GuidedBench:
    """Scheduler and worker; every method checks the invariants."""

    def __init__(self, limits: Limits, *, policy: str = "priority") -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits, policy=policy)
        self.worker = GuidedWorker(limits)
        self.clients: list[Client] = []
        self.sent: deque[_Sent] = deque()
        self.masks: dict[int, GrammarMask] = {}
        self.early: dict[int, list[int]] = {}  # by handle: forced tokens that the worker has yet to hear of

    def submit(self, request: Request, guide: ToyGuide | None) -> Client:
        """Submits a request under the next handle, which it must bear."""
        assert request.handle == len(self.clients)
        prompt, tokens = request.prompt_len, request.tokens.tolist()
        if request.pooling is not Pooling.NONE:
            vector = pooled_value(kv_root(bytes(request.root)), tokens, request.pooling)
            client = Client(request, [], {Ending.STOP}, vector)
        else:
            count = min(request.params.max_tokens, self.limits.max_model_len - prompt) - (len(tokens) - prompt)
            if guide is None:
                expected, kv = list[int](), kv_root(bytes(request.root))
                for token in tokens:
                    kv = kv_after(kv, token)
                for _ in range(count):
                    expected.append(draw(kv, None))
                    kv = kv_after(kv, expected[-1])
            else:
                twin = ToyGuide(guide._breaks_at)
                guide.advance(tokens[prompt:])
                twin.advance(tokens[prompt:])
                expected = undisturbed(bytes(request.root), tokens, count, twin)
            stops = (*request.params.stop_token_ids, *request.params.eos_token_ids, *([END] if guide else []))
            cut = next((i + 1 for i, token in enumerate(expected) if token in stops), None)
            ended = {Ending.STOP} if cut is not None else {Ending.LENGTH}
            if guide is not None and cut is None and twin.error is not None:
                ended = {Ending.ERROR} if len(expected) < count else {Ending.ERROR, Ending.LENGTH}
            client = Client(request, expected[:cut], ended)
        request.guide = guide
        self.scheduler.submit(request)
        self.clients.append(client)
        self.check()
        return client

    def abort(self, clients: Sequence[Client]) -> None:
        """Ends requests from outside."""
        for client in clients:
            client.ending = client.ending or Ending.ABORT
        self.scheduler.end([client.request for client in clients])
        self.check()

    def plan(self) -> bool:
        """Plans a step and sends it, with its mask if that is due; returns whether there was one."""
        plan = self.scheduler.plan()
        for failure in self.scheduler.take_failures():
            client = self.clients[failure.request.handle]
            client.ending, client.spoiled = Ending.ERROR, True
        if plan is not None:
            slots = plan.new.slots.tolist()
            owners = [self.scheduler.table.requests[slot] for slot in slots]
            roots = {slot: bytes(own.root) for slot, own in zip(slots, owners, strict=True) if own is not None}
            self._check_tokens(plan)
            self.sent.append(_Sent(plan, roots))
        self.settle()
        self.check()
        return plan is not None

    def _check_tokens(self, plan: StepPlan) -> None:
        """A slot that begins comes with all that its client has heard; appended tokens end what it has heard."""
        new = plan.new
        for i, slot in enumerate(new.slots.tolist()):
            tokens = new.token_ids[new.token_offsets[i] : new.token_offsets[i + 1]].tolist()
            client = self._owner(slot)
            assert tokens == client.request.tokens.tolist() + client.heard
            self.early.pop(client.request.handle, None)
        for i, slot in enumerate(plan.slots.tolist()):
            appended = list[int]()
            if len(plan.appended_offsets):
                appended = plan.appended_ids[plan.appended_offsets[i] : plan.appended_offsets[i + 1]].tolist()
            handle = self._owner(slot).request.handle
            assert appended == self.early.pop(handle, []), "forced tokens that the worker does not hear of, or twice"

    def _owner(self, slot: int) -> Client:
        request = self.scheduler.table.requests[slot]
        assert request is not None
        return self.clients[request.handle]

    def settle(self) -> None:
        """Lets guides work."""
        work = self.scheduler.guide_work()
        if work is None:
            return
        work.run(ToyMasks())
        settled: Settled = self.scheduler.settle(work)
        for output in settled.outputs:
            ((handle, tokens),) = rows_of(output)
            slot = self.clients[handle].request.slot
            if tokens and slot is not None and self.scheduler.table.running[slot]:
                self.early.setdefault(handle, []).extend(tokens)
        self._hear(settled.outputs)
        for mask in settled.masks:
            sent = next(sent for sent in self.sent if sent.plan.step_id == mask.step_id)
            assert len(sent.plan.gated)
            assert mask.step_id not in self.masks, "a second mask"
            self.masks[mask.step_id] = mask

    def deliver(self, *, not_finite: Sequence[int] = (), fails: bool = False) -> None:
        """Lets the worker execute the oldest step in flight, whose mask must be there, and applies its result."""
        sent = self.sent.popleft()
        rows = sorted({i % len(sent.plan.slots) for i in not_finite})
        mask = self.masks.pop(sent.plan.step_id, None)
        result = self.worker.run(sent.plan, sent.roots, mask, not_finite=rows, error="lost" if fails else "")
        if sent.forgotten:
            return
        if fails:
            for later in self.sent:
                later.forgotten = True
            self.early = {}
            self.scheduler.restart()
        else:
            if rows:
                for client in self.clients:
                    slot = client.request.slot
                    client.spoiled |= slot is not None and slot in sent.plan.slots[rows]
            self._hear(self.scheduler.apply(result))
        self.settle()
        self.check()

    def lose_worker(self) -> None:
        """Puts another worker in the place of this one."""
        self.sent.clear()
        self.masks.clear()
        self.early = {}
        self.scheduler.restart()
        self.scheduler.restart(self.limits.num_blocks)
        owned = [slot for slot, owner in enumerate(self.scheduler.table.requests) if owner is not None]
        self.worker = GuidedWorker(self.limits, owned)
        self.check()

    def turn(self, depth: int) -> bool:
        """Plans up to ``depth`` steps ahead and applies the oldest; returns whether anything was in flight."""
        while len(self.sent) < depth and self.plan():
            pass
        if not self.sent:
            return False
        self.deliver()
        return True

    def drain(self, depth: int, *, turns: int = 3000) -> None:
        """Runs until nobody is left, and checks that everybody has heard everything exactly once."""
        while self.turn(depth):
            turns -= 1
            assert turns, "no end in sight"
        scheduler = self.scheduler
        assert scheduler.num_running == scheduler.num_waiting == scheduler.in_flight == 0, "somebody was left behind"
        assert scheduler.pool.available == self.limits.num_blocks
        assert scheduler.table.num_free == self.limits.max_slots
        assert not self.masks
        assert all(self.clients[handle].ending is not None for handle in self.early)
        assert scheduler.guide_work() is None
        for client in self.clients:
            assert client.heard == client.expected[: len(client.heard)]
            assert client.starts == (len(client.heard) > 0)
            if client.ending is not Ending.ABORT and not client.spoiled:
                assert client.ending in client.endings
                # What a guide forces when it breaks is not heard.
                assert client.ending is Ending.ERROR or client.heard == client.expected
                assert client.pooled == client.vector

    def check(self) -> None:
        """The invariants; and that no gated step in flight waits for a mask for which everything has landed."""
        self.scheduler.check_integrity()
        if self.sent and len(self.sent[0].plan.gated):
            assert self.sent[0].plan.step_id in self.masks, "the oldest step waits for a mask"

    def _hear(self, outputs: list[Output]) -> None:
        for output in outputs:
            ends = {end.row: end for end in output.ends}
            vectors = dict(output.pooled)
            for i, (handle, tokens) in enumerate(rows_of(output)):
                client = self.clients[handle]
                assert client.ending is None, "something after the end"
                if i in output.start_rows.tolist():
                    assert not client.heard
                    client.starts += 1
                client.heard += tokens
                if (end := ends.get(i)) is not None:
                    client.ending = end.ending
                    if i in vectors:
                        client.pooled = float(vectors[i][0])
