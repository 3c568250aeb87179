"""Steps that fail in the worker: the request that is the cause ends, the others notice nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.errors import LinkError
from tercet_shared.wire.step import StepPlan
from tests.fakes.stream_client import Client
from tests.fakes.worker import TIMEOUT, FakeWorker, expected
from tests.integration.core.conftest import StartCore, at_work, until


class PoisonedWorker(FakeWorker):
    """Fails every step that takes a request with a poisoned prompt beyond so many tokens.

    Args:
        poison: first token of a prompt, and the length at which its request is fatal.
    """

    def __init__(self, link: Path, poison: dict[int, int], **offer: Any) -> None:
        super().__init__(link, **offer)
        self.failed = 0
        self._poison = poison
        self._fatal_at: dict[int, int] = {}  # by slot

    def _answer(self, plan: StepPlan) -> None:
        new = plan.new
        for slot, start in zip(new.slots.tolist(), new.token_offsets.tolist(), strict=False):
            self._fatal_at[slot] = self._poison.get(int(new.token_ids[start]), 1 << 30)
        ends = (plan.computed + plan.num_tokens).tolist()
        if any(end >= self._fatal_at[slot] for slot, end in zip(plan.slots.tolist(), ends, strict=True)):
            self.failed += 1
            self.failing_steps[plan.step_id] = "out of paper"
        super()._answer(plan)


def prompt(handle: int) -> list[int]:
    return [handle + 100, *([handle + 3] * (handle % 60))]


async def submit(client: Client, *handles: int) -> None:
    for handle in handles:
        await client.submit(handle, prompt(handle), max_tokens=10 + handle % 25)


async def fill_a_step(client: Client, worker: FakeWorker, count: int) -> StepPlan:
    """Submits so many requests and returns the first step that has all of them, unanswered."""
    worker.hold()
    await submit(client, *range(count))
    await worker.wait_for_steps(2)
    await until(client, lambda reply: reply.stats.running + reply.stats.waiting == count)
    if len(worker.plans[1].slots) < count:
        worker.release(1)
        await worker.wait_for_steps(3)
    assert len(worker.plans[-1].slots) == count
    return worker.plans[-1]


def check(client: Client, *handles: int) -> None:
    for handle in handles:
        choice = client.choices[handle]
        assert (choice.error, choice.terminal_events) == (None, 1)
        assert choice.tokens == expected(prompt(handle), 10 + handle % 25)


def check_failed(client: Client, handle: int, before: int) -> None:
    choice = client.choices[handle]
    assert choice.terminal_events == 1
    assert choice.error is not None
    assert choice.error.kind == pb.ERROR_KIND_INTERNAL
    assert "out of paper" in choice.error.message
    assert choice.tokens == expected(prompt(handle), 100)[:before], "what was computed before counts"


@pytest.mark.parametrize("culprit", [1, 5, 15])
@pytest.mark.parametrize("after", [0, 4], ids=["in the prompt", "at the fifth token"])
async def test_only_the_culprit_ends(start_core: StartCore, culprit: int, after: int) -> None:
    poison = {100 + culprit: len(prompt(culprit)) + after}
    async with (
        start_core() as core,
        PoisonedWorker(core.link, poison) as worker,
        Client(core.settings.listen) as client,
    ):
        await fill_a_step(client, worker, 16)
        worker.release()
        await client.finished(*range(16))
        check_failed(client, culprit, after)
        check(client, *(handle for handle in range(16) if handle != culprit))
        assert worker.failed <= 12, "the culprit was found by halves"
        reply = await client.stub.Info(pb.InfoRequest())
        assert reply.stats.free_blocks == reply.stats.num_blocks
        assert (reply.stats.running, reply.stats.waiting) == (0, 0)


async def test_several_culprits_and_requests_that_come_meanwhile(start_core: StartCore) -> None:
    bad = {3: 0, 4: 2, 21: 0}
    poison = {100 + handle: len(prompt(handle)) + after for handle, after in bad.items()}
    async with (
        start_core() as core,
        PoisonedWorker(core.link, poison) as worker,
        Client(core.settings.listen) as client,
    ):
        worker.hold()
        await submit(client, *range(16))
        for step in range(1, 40):
            await worker.wait_for_steps(step)
            if step < 16:
                await submit(client, 15 + step)
            if worker._waiting:
                worker.release(1)
            if worker.failed > 3:
                break
        worker.release()
        handles = list(client.choices)
        await client.finished(*handles)
        for handle, after in bad.items():
            if handle in client.choices:
                check_failed(client, handle, after)
        check(client, *(handle for handle in handles if handle not in bad))


async def test_a_failure_that_does_not_come_again_ends_nobody(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.link) as worker, Client(core.settings.listen) as client:
        worker.failing_steps[(await fill_a_step(client, worker, 16)).step_id] = "a cosmic ray"
        worker.release()
        await client.finished(*range(16))
        check(client, *range(16))


async def test_blocks_of_a_failed_step_are_not_cached(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.link) as worker, Client(core.settings.listen) as client:
        worker.failing_steps[1] = "out of paper"
        await client.submit(1, [9] * 40, max_tokens=5)
        await client.finished(1)
        await client.submit(2, [9] * 40, max_tokens=5)
        await client.finished(2)
        assert client.choices[2].cached == 0
        assert client.choices[2].tokens == expected([9] * 40, 5)


async def test_trials_go_on_when_those_on_trial_are_aborted(start_core: StartCore) -> None:
    async with start_core() as core, FakeWorker(core.link) as worker, Client(core.settings.listen) as client:
        failing = (await fill_a_step(client, worker, 8)).step_id
        worker.failing_steps[failing] = "a cosmic ray"
        worker.release(2)
        await worker.wait_for_steps(failing + 1)  # the first half is on trial
        await client.send(aborts=[pb.Abort(handle=handle) for handle in range(6)])
        await until(client, lambda reply: reply.stats.running + reply.stats.waiting == 2)
        worker.release()
        await client.finished(6, 7)
        check(client, 6, 7)


async def test_the_worker_dies_in_the_middle_of_a_trial(start_core: StartCore) -> None:
    async with start_core() as core, at_work(core) as (client, worker):
        failing = (await fill_a_step(client, worker, 8)).step_id
        worker.failing_steps[failing] = "a cosmic ray"
        worker.release(2)
        await worker.wait_for_steps(failing + 1)
        await worker.connection.close("gone")
        async with FakeWorker(core.link):
            await client.finished(*range(8))
            check(client, *range(8))


async def test_a_worker_that_cannot_compute_at_all_is_replaced(start_core: StartCore) -> None:
    poison = {handle + 100: 1 for handle in range(60)}
    async with start_core(max_num_seqs=4, worker_failures=2) as core, at_work(core, pid=7) as (client, first):
        first.hold()
        await submit(client, *range(60))
        await first.wait_for_steps(2)
        # What is still on its way when the core ends, ends with the stream.
        await until(client, lambda reply: reply.stats.running + reply.stats.waiting == 60)
        await first.connection.close("gone")
        async with PoisonedWorker(core.link, poison, pid=8) as broken:
            reason = await asyncio.wait_for(broken.connection.wait_closed(), TIMEOUT)
            assert "9 steps in a row have failed" in reason.text
        with pytest.raises(LinkError, match=r"lost 2 times in a row.*9 steps in a row have failed.*out of paper"):
            await core.ended()
        await client.finished(*range(60))
        assert all(choice.terminal_events == 1 for choice in client.choices.values())


async def test_somebody_is_asked_to_end_a_worker_that_cannot_compute(start_core: StartCore) -> None:
    poison = {handle + 100: 1 for handle in range(60)}
    async with start_core(max_num_seqs=4) as core:
        broken = PoisonedWorker(core.link, poison, pid=8)
        async with at_work(core, broken) as (client, _):
            await submit(client, *range(60))
            child, pid, message = await asyncio.wait_for(core.reporter.restarts.get(), TIMEOUT)
            assert (child, pid) == ("worker", 8)
            assert "steps in a row have failed" in message
            async with FakeWorker(core.link):
                await client.finished(*range(60))
                whole = [handle for handle in range(60) if client.choices[handle].error is None]
                assert len(whole) > 45
                check(client, *whole)


async def test_the_plan_of_a_failed_step_is_kept_where_the_settings_say(
    start_core: StartCore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "dumps"
    async with start_core(dump_dir=directory, core_id="c1") as core, FakeWorker(core.link) as worker:
        async with Client(core.settings.listen) as client:
            worker.failing_steps[1] = "out of paper"
            await client.submit(1, [9] * 40, max_tokens=5)
            await client.finished(1)
    (path,) = directory.iterdir()
    assert path.name == "c1-step-1.json"
    dump = json.loads(path.read_text())
    assert dump["error"] == "out of paper"
    assert dump["requests"] == [{"slot": 0, "request_id": "request-1"}]
    assert dump["plan"]["new"]["token_ids"] == [9] * 40
    line = next(record for record in caplog.records if record.name == "tercet_core.dumps")
    assert line.levelname == "ERROR"
    assert "step 1 failed: out of paper; 1 rows, 40 tokens, requests request-1" in line.getMessage()
    assert "9, 9" not in line.getMessage(), "prompts are not logged"
