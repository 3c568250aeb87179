"""Structured output through a whole core: gRPC, scheduler, masks, ring; what comes out fits, whatever happens."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import AbstractAsyncContextManager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tercet_core.grammar.compiler import GrammarCompiler
from tercet_core.grammar.masks import Masks
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.structured import Grammar, GrammarKind
from tercet_shared.wire.step import StepPlan
from tests.fakes.grammars import END, allowed, begin, fingerprint, read_smollm2, smollm2
from tests.fakes.stream_client import TIMEOUT, Client
from tests.fakes.worker import VOCAB, FakeWorker, expected, logprobs_of, pick
from tests.integration.core.conftest import RunningCore, StartCore, at_work, info, until

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "full name of the person": {"type": "string"},
            "age in years": {"type": "integer", "minimum": 0, "maximum": 150},
            "favourite colours": {"type": "array", "items": {"enum": ["dark red", "green"]}, "maxItems": 2},
        },
        "required": ["full name of the person", "age in years", "favourite colours"],
        "additionalProperties": False,
    }
)
GRAMMARS = {
    1: (pb.GRAMMAR_KIND_JSON_SCHEMA, SCHEMA),
    2: (pb.GRAMMAR_KIND_CHOICE, '["not at all", "perhaps", "by all means, my dear friend"]'),
    3: (pb.GRAMMAR_KIND_REGEX, "[a-c]{20,40}, and so on and so forth(, [0-9]+)*"),
    4: (pb.GRAMMAR_KIND_JSON_SCHEMA, '{"type": "object"}'),
}
HANDLES = (*GRAMMARS, 11, 12, 13, 14)


def prompt_of(handle: int) -> list[int]:
    return list(range(50 + handle, 60 + handle + 9 * (handle % 13)))


def grammar_of(handle: int) -> pb.Grammar:
    kind, text = GRAMMARS[handle % 10]
    return pb.Grammar(kind=kind, text=text, param="response_format")


class Drawing:
    """Draws as the fake worker does, but closes what is open once a text has become long."""

    def __init__(self, longest: int = 150) -> None:
        tokenizer = read_smollm2(VOCAB).tokenizer
        self._closing = [tokenizer.tokenize_str(text)[0] for text in ('"', "}", "]", "a", "0")]
        self._longest = longest

    def __call__(self, last: int, length: int, choice: npt.NDArray[Any]) -> int:
        if length > self._longest:
            for token in (END, *self._closing):
                if token in choice:
                    return token
        return pick(last, length, choice)


@cache
def foretold(handle: int, *, stops: tuple[int, ...] = (END,)) -> list[int]:
    """Returns what a request must yield, computed without a core: a token at a time, nothing in flight."""
    drawing = Drawing()
    guide = begin(read_smollm2(VOCAB), GrammarKind(GRAMMARS[handle % 10][0]), GRAMMARS[handle % 10][1], stop_ids=stops)
    masks, text, out = Masks(), list(prompt_of(handle)), list[int]()
    while not (out and out[-1] in (*stops, END)):
        choice = np.array(allowed(masks, guide, VOCAB))
        out.append(drawing(text[-1], len(text), choice))
        text.append(out[-1])
        if out[-1] != END:
            guide.advance([out[-1]])
    return out


def guided_core(start_core: StartCore, **settings: Any) -> AbstractAsyncContextManager[RunningCore]:
    """A core that can enforce grammars; what is foretold keeps this process busy for longer than a heartbeat lasts."""
    return start_core(**({"model": str(smollm2()), "heartbeat_timeout": 60.0} | settings))


async def rest(worker: FakeWorker) -> None:
    """Waits until every step has had its mask and was answered."""
    await worker.wait_for(lambda: not (worker._masks or worker._waiting))


def guided_worker(link: Path, kind: type[FakeWorker] = FakeWorker, **offer: Any) -> FakeWorker:
    worker = kind(link, tokenizer_fingerprint=fingerprint(), **offer)
    worker.pick = Drawing()
    return worker


async def submit(client: Client, *handles: int, **sampling: Any) -> None:
    for handle in handles:
        values = {"max_tokens": 400, "eos_token_ids": [END]} | sampling
        await client.submit(handle, prompt_of(handle), grammar=grammar_of(handle), **values)


def check(client: Client, *handles: int) -> None:
    for handle in handles:
        choice = client.choices[handle]
        assert choice.error is None, choice.error
        assert choice.tokens == foretold(handle)
        assert (choice.reason, choice.stop_id, choice.terminal_events) == (pb.FINISH_REASON_STOP, END, 1)


def text_of(client: Client, handle: int) -> str:
    return read_smollm2(VOCAB).tokenizer.decode_str([token for token in client.choices[handle].tokens if token != END])


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
async def test_what_comes_out_fits_at_every_depth(start_core: StartCore, depth: int) -> None:
    async with guided_core(start_core, pipeline_depth=depth) as core:
        async with at_work(core, guided_worker(core.link)) as (client, worker):
            await client.submit(20, [9] * 30, max_tokens=200)
            await submit(client, *HANDLES)
            await client.finished(20, *HANDLES)
            check(client, *HANDLES)
            assert set(json.loads(text_of(client, 1))) >= {"full name of the person", "age in years"}
            assert client.choices[20].tokens == expected([9] * 30, 200), "a free request beside them"
            await rest(worker)
            gated = [plan for plan in worker.plans if len(plan.gated)]
            assert worker.masks == len(gated) > 50
            assert worker.appended > 20, "runs of forced tokens were not drawn"
            reply = await until(client, lambda reply: reply.stats.running == 0)
            assert reply.stats.free_blocks == reply.stats.num_blocks
            assert reply.stats.output_tokens == sum(len(choice.tokens) for choice in client.choices.values())


@pytest.mark.parametrize("depth", [1, 2, 4])
async def test_preemption_changes_nothing(start_core: StartCore, depth: int) -> None:
    async with guided_core(start_core, pipeline_depth=depth) as core:
        async with at_work(core, guided_worker(core.link, num_blocks=17)) as (client, worker):
            worker.hold()
            await submit(client, *HANDLES)
            await until(client, lambda reply: reply.stats.running + reply.stats.waiting == len(HANDLES))
            worker.release()
            await client.finished(*HANDLES)
            check(client, *HANDLES)
            assert (await info(client)).stats.preemptions > 0


@pytest.mark.parametrize("answered", [3, 9, 16, 25])
async def test_the_next_worker_goes_on_where_the_last_one_was(start_core: StartCore, answered: int) -> None:
    async with guided_core(start_core, pipeline_depth=3) as core:
        async with at_work(core, guided_worker(core.link)) as (client, first):
            first.hold()
            await submit(client, *HANDLES)
            for step in range(answered):
                await first.wait_for_steps(step + 1)
                first.release(1)
            await first.wait_for(lambda: first.steps - len(first._waiting) == answered)
            first.connection._sock.shutdown(socket.SHUT_RDWR)
            await until(client, lambda reply: not reply.ready)
            async with guided_worker(core.link):
                await client.finished(*HANDLES)
                check(client, *HANDLES)


class Poisoned(FakeWorker):
    """Fails every step in which the request with the shortest prompt is beyond so many tokens."""

    fatal_at = 75

    def _answer(self, plan: StepPlan) -> None:
        ends = plan.computed + plan.num_tokens
        if (self._poisoned(plan) & (ends >= self.fatal_at)).any():
            self.failing_steps[plan.step_id] = "out of paper"
        super()._answer(plan)

    def _poisoned(self, plan: StepPlan) -> npt.NDArray[np.bool_]:
        new = plan.new
        for slot, start in zip(new.slots.tolist(), new.token_offsets.tolist(), strict=False):
            self._prompts[slot] = [int(new.token_ids[start])]
        return np.array([self._prompts[slot][0] == prompt_of(1)[0] for slot in plan.slots.tolist()])


async def test_a_step_that_fails_costs_the_others_nothing(start_core: StartCore) -> None:
    async with guided_core(start_core, pipeline_depth=3) as core:
        async with at_work(core, guided_worker(core.link, Poisoned)) as (client, worker):
            await submit(client, *HANDLES)
            await client.finished(*HANDLES)
            error = client.choices[1].error
            assert error is not None
            assert "out of paper" in error.message
            check(client, *(handle for handle in HANDLES if handle != 1))
            assert worker.failing_steps
            await rest(worker)  # the steps behind a failed one have their masks too


@pytest.mark.parametrize("received", [1, 5, 20, 35])
async def test_another_core_goes_on_with_the_very_next_token(start_core: StartCore, received: int) -> None:
    handles = [handle for handle in HANDLES if len(foretold(handle)) > received]
    assert len(handles) > 2
    async with guided_core(start_core) as core:
        async with at_work(core, guided_worker(core.link)) as (client, _):
            for handle in handles:
                tokens = foretold(handle)
                await client.submit(
                    handle, prompt_of(handle), resumed=tokens[:received], attempt=1, grammar=grammar_of(handle),
                    max_tokens=400, eos_token_ids=[END],
                )  # fmt: skip
            await client.finished(*handles)
            for handle in handles:
                assert client.choices[handle].tokens == foretold(handle)[received:]
                assert client.choices[handle].started == 1


async def test_resumed_output_that_does_not_fit_is_refused(start_core: StartCore) -> None:
    async with guided_core(start_core) as core:
        async with at_work(core, guided_worker(core.link)) as (client, _):
            await client.submit(1, [9], resumed=[500, 600], attempt=1, grammar=grammar_of(1), max_tokens=40)
            await submit(client, 2)
            await client.finished(1, 2)
            error = client.choices[1].error
            assert error is not None
            assert (error.kind, error.param) == (pb.ERROR_KIND_INVALID, "response_format")
            check(client, 2)


async def test_the_limit_cuts_forced_tokens_too(start_core: StartCore) -> None:
    counts = {20 * count + 1: count for count in range(1, 16)}
    async with guided_core(start_core) as core:
        async with at_work(core, guided_worker(core.link)) as (client, _):
            for handle, count in counts.items():
                await submit(client, handle, max_tokens=count)
            await client.finished(*counts)
            for handle, count in counts.items():
                choice = client.choices[handle]
                assert choice.tokens == foretold(handle)[:count]
                assert (choice.reason, choice.terminal_events) == (pb.FINISH_REASON_LENGTH, 1)


async def test_a_stop_token_among_forced_ones_ends_it(start_core: StartCore) -> None:
    places = {20 * place + 1: place for place in range(5)}
    async with guided_core(start_core) as core:
        async with at_work(core, guided_worker(core.link)) as (client, _):
            for handle, place in places.items():
                await submit(client, handle, stop_token_ids=[foretold(handle)[place]])
            await client.finished(*places)
            for handle, place in places.items():
                choice, tokens = client.choices[handle], foretold(handle)
                assert choice.tokens == tokens[: tokens.index(tokens[place]) + 1]
                assert (choice.reason, choice.stop_id) == (pb.FINISH_REASON_STOP, tokens[place])


async def test_the_model_s_end_ends_it_also_when_it_is_to_be_ignored(start_core: StartCore) -> None:
    async with guided_core(start_core) as core:
        async with at_work(core, guided_worker(core.link)) as (client, _):
            await submit(client, 1, 2, eos_token_ids=[])
            await client.finished(1, 2)
            for handle in (1, 2):
                assert client.choices[handle].tokens == foretold(handle, stops=())
                assert client.choices[handle].stop_id == END


async def test_log_probabilities_are_of_tokens_that_were_drawn(start_core: StartCore) -> None:
    async with guided_core(start_core) as core:
        async with at_work(core, guided_worker(core.link)) as (client, worker):
            await submit(client, 1, logprobs=2)
            await client.finished(1)
            check(client, 1)
            assert worker.appended == 0
            assert client.choices[1].logprobs == [logprobs_of(token, 2) for token in client.choices[1].tokens]


async def test_aborts_at_every_point_leave_nothing(start_core: StartCore) -> None:
    async with guided_core(start_core, pipeline_depth=3) as core:
        async with at_work(core, guided_worker(core.link)) as (client, worker):
            for steps in range(1, 16):
                worker.hold()
                first, second, third = (20 * steps + i for i in (1, 2, 3))
                base = worker.steps
                await submit(client, first, second, third)
                for step in range(steps):
                    await worker.wait_for_steps(base + step + 1)
                    worker.release(1)
                await client.send(aborts=[pb.Abort(handle=handle) for handle in (first, third)])
                await until(client, lambda reply: reply.stats.running + reply.stats.waiting <= 1)
                worker.release()
                await client.finished(second)
                check(client, second)
                reply = await until(client, lambda reply: reply.stats.running == 0)
                assert reply.stats.free_blocks == reply.stats.num_blocks
                await rest(worker)


HOSTILE = [
    pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, text="((a{1000}){1000}){1000}", param="a"),
    pb.Grammar(kind=pb.GRAMMAR_KIND_LARK, text="start: " + "(" * 50_000 + '"a"' + ")" * 50_000, param="b"),
    pb.Grammar(kind=pb.GRAMMAR_KIND_JSON_SCHEMA, text='{"$ref": "#"}', param="c"),
    pb.Grammar(kind=pb.GRAMMAR_KIND_EBNF, text="root ::= missing", param="d"),
    pb.Grammar(kind=pb.GRAMMAR_KIND_CHOICE, text="[]", param="e"),
]


async def test_hostile_grammars_are_refused_while_others_stream(start_core: StartCore) -> None:
    async with guided_core(start_core) as core:
        async with at_work(core, guided_worker(core.link)) as (client, _):
            for handle, grammar in enumerate(HOSTILE, 100):
                await client.submit(handle, [9, 8], grammar=grammar, max_tokens=40)
            await client.submit(20, [7] * 30, max_tokens=300)
            await submit(client, *HANDLES)
            await client.finished(20)
            assert client.choices[20].tokens == expected([7] * 30, 300)
            await client.finished(*HANDLES, *range(100, 100 + len(HOSTILE)))
            check(client, *HANDLES)
            for handle, grammar in enumerate(HOSTILE, 100):
                choice = client.choices[handle]
                assert choice.error is not None
                assert (choice.error.kind, choice.error.param) == (pb.ERROR_KIND_INVALID, grammar.param)
                assert len(choice.error.message) < 700
                assert (choice.tokens, choice.terminal_events) == ([], 1)


async def test_a_grammar_that_becomes_too_complex_ends_its_request_only(start_core: StartCore) -> None:
    later = pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, text="(k|l)z((a{1000}){1000}){1000}", param="guided_regex")
    async with guided_core(start_core) as core:
        async with at_work(core, guided_worker(core.link)) as (client, worker):
            await client.submit(100, [9, 8], grammar=later, max_tokens=400)
            await submit(client, *HANDLES)
            await client.finished(100, *HANDLES)
            check(client, *HANDLES)
            error = client.choices[100].error
            assert error is not None
            assert (error.kind, error.param) == (pb.ERROR_KIND_INVALID, "guided_regex")
            await rest(worker)


@pytest.mark.parametrize(
    ("settings", "offer", "reason"),
    [
        ({}, {}, "started without --model"),
        ({"model": "MODEL"}, {"tokenizer_fingerprint": "another"}, "not the one that the worker has"),
        ({"model": "MODEL"}, {"vocab_size": 40_000}, "vocab size too small"),
        ({"model": "/nowhere/model.gguf"}, {}, "cannot be enforced on this core"),
    ],
)
async def test_a_core_that_cannot_enforce_grammars_says_so(
    start_core: StartCore, settings: dict[str, str], offer: dict[str, Any], reason: str
) -> None:
    if settings.get("model") == "MODEL":
        settings = {"model": str(smollm2())}
    async with start_core(**settings) as core:
        worker = FakeWorker(core.link, **({"tokenizer_fingerprint": fingerprint()} | offer))
        async with at_work(core, worker) as (client, _):
            await submit(client, 1)
            await client.finished(1)
            error = client.choices[1].error
            assert error is not None
            assert (error.kind, error.param) == (pb.ERROR_KIND_INVALID, "response_format")
            assert reason in error.message


async def test_malformed_grammars_are_rejected_at_once(start_core: StartCore) -> None:
    async with guided_core(start_core) as core:
        async with at_work(core, guided_worker(core.link)) as (client, _):
            await client.submit(1, [9], grammar=pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, param="guided_regex"))
            await client.submit(2, [9], grammar=pb.Grammar(text="a", param="guided_regex"))
            await client.submit(3, [9], grammar=pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, text="a" * 300_000))
            await client.submit(4, [9], grammar=grammar_of(1), max_tokens=10_000)
            await client.submit(5, [9], grammar=grammar_of(1), pooling=pb.POOLING_LAST)
            await client.finished(1, 2, 3, 4, 5)
            params = {}
            for handle in range(1, 6):
                rejected = client.choices[handle].rejected
                assert rejected is not None
                params[handle] = rejected.param
            assert params == {1: "guided_regex", 2: "guided_regex", 3: "response_format", 4: "max_tokens", 5: "pooling"}


class Gate:
    """Holds compilations back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = asyncio.Event(), asyncio.Event()
        self.waiting = 0
        self._change = asyncio.Event()
        compile_ = GrammarCompiler.matcher

        async def held(compiler: GrammarCompiler, grammar: Grammar, tenant: str) -> Any:
            self.reached.set()
            self._count(1)
            try:
                await self.opened.wait()
            finally:
                self._count(-1)
            return await compile_(compiler, grammar, tenant)

        monkeypatch.setattr(GrammarCompiler, "matcher", held)

    async def holds(self, count: int) -> None:
        """Waits until so many requests wait here."""
        async with asyncio.timeout(TIMEOUT):
            while self.waiting != count:
                await self._change.wait()

    def _count(self, change: int) -> None:
        self.waiting += change
        event, self._change = self._change, asyncio.Event()
        event.set()


async def test_while_its_grammar_is_compiled_a_request_can_be_given_up(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    async with guided_core(start_core) as core:
        async with at_work(core, guided_worker(core.link)) as (client, worker):
            async with Client(core.settings.listen, "leaves") as leaves:
                await leaves.submit(1, [9], grammar=grammar_of(1))
                await gate.holds(1)
                await submit(client, 1)
                await submit(client, 2)
                await client.submit(3, [9], grammar=grammar_of(3), queue_deadline_s=0.05)
                await client.send(aborts=[pb.Abort(handle=1)])
                await client.submit(
                    2, prompt_of(2), attempt=1, grammar=grammar_of(2), max_tokens=400, eos_token_ids=[END]
                )
                await client.finished(3)
                rejected = client.choices[3].rejected
                assert rejected is not None
                assert rejected.kind == pb.ERROR_KIND_OVERLOADED
            await client.submit(20, [9] * 30, max_tokens=30)
            await client.finished(20)
            await gate.holds(1)  # the core knows of all who have given up
            gate.opened.set()
            await client.finished(2)
            check(client, 2)
            assert client.choices[1].tokens == []
            assert max(len(plan.slots) for plan in worker.plans) == 1, "nobody else was queued"


async def test_a_core_that_stops_tells_those_whose_grammar_is_not_there(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    async with guided_core(start_core, grace=0.1) as core:
        async with at_work(core, guided_worker(core.link)) as (client, _):
            await submit(client, 1)
            await gate.reached.wait()
            core.stop.set()
            await client.finished(1)
            error = client.choices[1].error
            assert error is not None
            assert error.kind == pb.ERROR_KIND_UNAVAILABLE
            await core.ended()


async def test_a_core_that_stops_waits_for_a_grammar_within_the_grace(
    start_core: StartCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    async with guided_core(start_core, grace=60.0) as core:
        async with at_work(core, guided_worker(core.link)) as (client, _):
            await submit(client, 2)
            await gate.reached.wait()
            core.stop.set()
            await client.wait_for(lambda: client.draining is not None)
            gate.opened.set()
            await client.finished(2)
            check(client, 2)
            await core.ended()
