"""A worker without a model, behind the real ring: it keeps its own state from the plans, and its tokens are known.

    async with FakeWorker(core.link) as worker:
        worker.hold()                      # results wait
        await worker.wait_for_steps(1)
        worker.release()

A `FakeGroup` is a worker of several ranks, each of which applies every plan; one of them answers.

The token after a text depends on its last token and its length alone (`next_token`), so a test can say what a request
must yield (`expected`), however the core batched, chunked, preempted or resumed it. A gated row draws among the tokens
that its mask allows, by the same rule (`pick`). Log-probabilities (`logprobs_of`) and vectors (`vector_of`) can be
foretold as well.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tercet_shared.ipc.connect import connect
from tercet_shared.ipc.connect_remote import connect_remote
from tercet_shared.wire.frames import decode_from_core, decode_welcome, encode_hello, encode_result
from tercet_shared.wire.step import (
    PROTOCOL_VERSION,
    CoreWelcome,
    GrammarMask,
    LogProbColumns,
    StepPlan,
    StepResult,
    WorkerHello,
    offsets_of,
)

VOCAB = 50_000
TIMEOUT = 60.0
"""Seconds after which a wait fails: far beyond what anything here takes, also on a loaded machine."""


def next_tokens(last: npt.NDArray[Any], length: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Returns the token that follows texts of ``length`` tokens ending in ``last``; never 0, 1 or 2."""
    return ((last.astype(np.int64) * 31 + length * 7 + 11) % (VOCAB - 3) + 3).astype(np.int32)


def expected(prompt: list[int], count: int) -> list[int]:
    """Returns the first ``count`` output tokens for ``prompt``."""
    out: list[int] = []
    last, length = prompt[-1], len(prompt)
    for _ in range(count):
        last = int(next_tokens(np.array([last]), np.array([length]))[0])
        length += 1
        out.append(last)
    return out


def pick(last: int, length: int, allowed: npt.NDArray[np.integer[Any]]) -> int:
    """Returns the token that follows a text where only these are allowed."""
    wanted = int(next_tokens(np.array([last]), np.array([length]))[0])
    return wanted if wanted in allowed else int(allowed[wanted % len(allowed)])


def logprobs_of(token: int, count: int) -> tuple[float, int, list[tuple[int, float]]]:
    """Returns a token's log-probability, its rank, and ``count`` alternatives with theirs, whatever comes before it."""
    tops = [((token + i) % VOCAB, -float(i)) for i in range(count)]
    return -(token % 97) / 8, 1 + token % 5, tops


def vector_of(prompt: list[int], pooling: int) -> list[float]:
    """Returns what a prompt is pooled to."""
    return [float(sum(prompt) % 4096), float(len(prompt)), float(prompt[-1] % 4096), float(pooling)]


def hello(**changes: Any) -> WorkerHello:
    """Returns what the fake worker offers."""
    values: dict[str, Any] = {
        "protocol": PROTOCOL_VERSION,
        "incarnation": "first",
        "model_name": "fake",
        "model_fingerprint": "fake-model",
        "tokenizer_fingerprint": "fake-tokenizer",
        "vocab_size": VOCAB,
        "block_size": 16,
        "num_blocks": 1024,
        "max_slots": 64,
        "max_model_len": 1024,
        "max_batched_tokens": 512,
        "dtype": "none",
        "device": "none",
        "pid": 0,
    }
    return WorkerHello(**(values | changes))


class FakeWorker:
    """Answers every step at once unless held. Use as a context manager, on the loop of the test.

    A gated step is answered when its mask has come. Every such step must get one mask, of the right size.

    Args:
        link: the core's socket, or the address of its gRPC port for a worker on another host.
        offer: what differs from the usual hello.
    """

    def __init__(self, link: Path | str, **offer: Any) -> None:
        self.hello = hello(**offer)
        self.welcome: CoreWelcome | None = None
        self.plans: list[StepPlan] = []
        self.steps = 0
        self.masks = 0
        self.appended = 0  # tokens that were not drawn
        self.keep_plans = True
        self.broken_rows: dict[int, list[int]] = {}  # step id -> rows whose logits are not finite
        self.failing_steps: dict[int, str] = {}
        self.pick: Callable[[int, int, npt.NDArray[np.integer[Any]]], int] = pick
        self._link = link
        self._connection: Any = None  # a FrameLink, of whose kind tests know more
        self._permits: int | None = None  # steps that may be answered; None: all
        self._waiting: deque[StepPlan] = deque()
        self._masks: dict[int, GrammarMask | None] = {}  # of steps that are gated and not answered
        self._arrived = asyncio.Condition()
        self._notify: set[asyncio.Task[None]] = set()
        slots = self.hello.max_slots
        self._last = np.zeros(slots, np.int32)
        self._length = np.zeros(slots, np.int32)
        self._prompts: dict[int, list[int]] = {}  # by slot, of those that ask about their prompt
        self._logprobs = np.full(slots, -1, np.int32)
        self._prompt_logprobs = np.full(slots, -1, np.int32)
        self._pooling = np.zeros(slots, np.int32)

    @property
    def connection(self) -> Any:
        assert self._connection is not None
        return self._connection

    async def __aenter__(self) -> Self:
        hello = encode_hello(self.hello)
        if isinstance(self._link, Path):
            joined = await connect(self._link, hello, timeout_s=TIMEOUT)
        else:
            joined = await connect_remote(self._link, hello, timeout_s=TIMEOUT)
        self._connection = joined.connection
        self.welcome = decode_welcome(joined.reply)
        self._connection.on_frames(self._take)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connection.close("the fake worker leaves")

    def hold(self) -> None:
        """Withholds results from now on."""
        self._permits = 0

    def release(self, count: int | None = None) -> None:
        """Answers ``count`` withheld steps, or all and every later one; gated ones when their masks have come."""
        self._permits = None if count is None else (self._permits or 0) + count
        self._answer_some()

    async def wait_for_steps(self, count: int) -> None:
        """Waits until ``count`` plans have arrived since the start."""
        await self.wait_for(lambda: self.steps >= count)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until what has arrived makes the condition true."""
        async with asyncio.timeout(TIMEOUT), self._arrived:
            await self._arrived.wait_for(condition)

    def _take(self, frames: list[bytes]) -> None:
        for frame in frames:
            message = decode_from_core(frame)
            if isinstance(message, GrammarMask):
                self._take_mask(message)
                continue
            self.steps += 1
            if self.keep_plans:
                self.plans.append(message)
            self._waiting.append(message)
            if len(message.gated):
                assert message.samples[message.gated].all(), "a gated row that does not sample"
                self._masks[message.step_id] = None
        self._answer_some()
        task = asyncio.get_running_loop().create_task(self._tell())
        self._notify.add(task)
        task.add_done_callback(self._notify.discard)

    def _take_mask(self, mask: GrammarMask) -> None:
        self.masks += 1
        assert mask.step_id in self._masks, "a mask that no step waits for"
        assert self._masks[mask.step_id] is None, "a second mask"
        plan = next(plan for plan in self._waiting if plan.step_id == mask.step_id)
        assert len(mask.words) == len(plan.gated) * -(-self.hello.vocab_size // 32), "a mask of a wrong size"
        self._masks[mask.step_id] = mask

    def _answer_some(self) -> None:
        while self._waiting and self._permits != 0:
            plan = self._waiting[0]
            if self._masks.get(plan.step_id, plan) is None:
                return
            self._waiting.popleft()
            if self._permits is not None:
                self._permits -= 1
            self._answer(plan)
            self._masks.pop(plan.step_id, None)

    async def _tell(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()

    def _answer(self, plan: StepPlan) -> None:
        self._take_slots(plan)
        if error := self.failing_steps.get(plan.step_id):
            self._length[plan.slots[plan.samples]] += 1  # the steps behind it were planned as if it had worked
            zeros = np.zeros(len(plan.slots) + 1, np.int32)
            self._send(StepResult(plan.step_id, zeros, zeros[:0], error=error))
            return
        samples = plan.samples.copy()
        broken = np.array(self.broken_rows.get(plan.step_id, []), np.int32)
        samples[broken] = False
        pools = samples & (self._pooling[plan.slots] != 0)
        slots = plan.slots[samples]
        assert (plan.computed[samples] + plan.num_tokens[samples] == self._length[slots]).all(), "samples too early"
        self._length[plan.slots[broken]] += 1
        samples &= ~pools
        slots = plan.slots[samples]
        ids = next_tokens(self._last[slots], self._length[slots])
        if len(plan.gated):
            self._draw_gated(plan, np.flatnonzero(samples).tolist(), ids)
        self._last[slots] = ids
        self._length[slots] += 1
        offsets = np.zeros(len(plan.slots) + 1, np.int32)
        np.cumsum(samples, out=offsets[1:])
        result = StepResult(plan.step_id, offsets, ids, not_finite=broken)
        self._report(plan, result, pools)
        self._send(result)

    def _send(self, result: StepResult) -> None:
        if self.hello.answers:
            self.connection.send(encode_result(result))

    def _take_slots(self, plan: StepPlan) -> None:
        new = plan.new
        if len(new):
            self._length[new.slots] = np.diff(new.token_offsets)
            self._last[new.slots] = new.token_ids[new.token_offsets[1:] - 1]
            self._logprobs[new.slots] = new.logprobs
            self._prompt_logprobs[new.slots] = new.prompt_logprobs
            self._pooling[new.slots] = new.pooling
            for i in np.flatnonzero((new.prompt_logprobs >= 0) | (new.pooling != 0)).tolist():
                start = int(new.token_offsets[i])
                self._prompts[int(new.slots[i])] = new.token_ids[start : start + int(new.prompt_lens[i])].tolist()
        if len(plan.appended_ids):
            counts = np.diff(plan.appended_offsets)
            rows = np.flatnonzero(counts)
            slots = plan.slots[rows]
            assert not np.isin(slots, new.slots).any(), "appended tokens for a slot that is new"
            assert (plan.computed[rows] < self._length[slots]).all(), "appended tokens for a row that is in flight"
            self._length[slots] += counts[rows]
            self._last[slots] = plan.appended_ids[plan.appended_offsets[1:][rows] - 1]
            self.appended += len(plan.appended_ids)

    def _draw_gated(self, plan: StepPlan, drawing: list[int], ids: npt.NDArray[np.int32]) -> None:
        mask = self._masks[plan.step_id]
        assert mask is not None
        rows = mask.words.reshape(len(plan.gated), -1)
        for row, words in zip(plan.gated.tolist(), rows, strict=True):
            if row in drawing:
                bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: self.hello.vocab_size]
                slot = plan.slots[row]
                ids[drawing.index(row)] = self.pick(
                    int(self._last[slot]), int(self._length[slot]), np.flatnonzero(bits)
                )

    def _report(self, plan: StepPlan, result: StepResult, pools: npt.NDArray[np.bool_]) -> None:
        """Adds what rows have asked for besides tokens."""
        drawn, prompts, vectors = [], [], []
        for row, slot in enumerate(plan.slots.tolist()):
            start, stop = result.token_offsets[row : row + 2].tolist()
            if self._logprobs[slot] >= 0 and stop > start:
                first = int(self._length[slot]) - (stop - start)
                drawn.append((row, first, result.token_ids[start:stop].tolist(), int(self._logprobs[slot])))
            if self._prompt_logprobs[slot] >= 0:
                first = int(plan.computed[row]) + 1
                run = self._prompts[slot][first : first + int(plan.num_tokens[row])]
                prompts.append((row, first, run, int(self._prompt_logprobs[slot])))
            if pools[row]:
                vectors += vector_of(self._prompts[slot], int(self._pooling[slot]))
        result.logprobs = _columns(drawn) if drawn else None
        result.prompt_logprobs = _columns(prompts) if prompts else None
        result.pooled_rows = np.flatnonzero(pools).astype(np.int32)
        result.pooled = np.array(vectors, np.float32)


class FakeGroup:
    """A worker of several ranks, the last of which answers. Use as a context manager, on the loop of the test.

    Args:
        link: the core's socket.
        ranks: how many.
        remote: those on another host, and the address of the core's gRPC port.
        group: its name; every start of a group has another one.
        offer: what all ranks offer.
    """

    def __init__(
        self,
        link: Path,
        ranks: int,
        group: str = "first group",
        remote: tuple[set[int], str] = (set(), ""),
        **offer: Any,
    ) -> None:
        self.ranks = [
            FakeWorker(
                remote[1] if number in remote[0] else link,
                **({"incarnation": group} | offer | rank_of(group, number, ranks)),
            )
            for number in range(ranks)
        ]
        self._joined = AsyncExitStack()

    @property
    def answering(self) -> FakeWorker:
        return self.ranks[-1]

    async def __aenter__(self) -> Self:
        for rank in self.ranks:
            await self._joined.enter_async_context(rank)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._joined.aclose()


def rank_of(group: str, number: int, ranks: int) -> dict[str, Any]:
    """Returns what of a hello says that it is a rank's; the last one answers."""
    return {"group": group, "rank": number, "ranks": ranks, "answers": number == ranks - 1}


def _columns(rows: list[tuple[int, int, list[int], int]]) -> LogProbColumns:
    """Returns the log-probabilities of rows: (row, position of the first token, tokens, alternatives)."""
    found = [logprobs_of(token, count) for _, _, tokens, count in rows for token in tokens]
    tops = [top for _, _, own in found for top in own]
    return LogProbColumns(
        np.array([row for row, _, _, _ in rows], np.int32),
        np.array([first for _, first, _, _ in rows], np.int32),
        offsets_of([len(tokens) for _, _, tokens, _ in rows]),
        np.array([logprob for logprob, _, _ in found], np.float32),
        np.array([rank for _, rank, _ in found], np.int32),
        offsets_of([len(own) for _, _, own in found]),
        np.array([token for token, _ in tops], np.int32),
        np.array([logprob for _, logprob in tops], np.float32),
    )
