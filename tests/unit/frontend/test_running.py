"""Ending requests by their ids."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tercet_frontend.admission import Admission
from tercet_frontend.running import RunningRequests
from tercet_shared.errors import CancelledByClientError


@pytest.mark.parametrize("name", ["answer", "client's"])
async def test_any_of_its_ids_ends_a_request(name: str) -> None:
    running = RunningRequests()
    with running.track("me", ["answer", "client's", "answer", ""]) as cancelled:
        assert len(running) == 2
        assert running.cancel("me", name) == 1
        assert running.cancel("me", name) == 1  # has no further effect
        assert cancelled.done()
    assert len(running) == 0
    assert running.cancel("me", name) == 0


async def test_other_tenants_and_other_ids_do_not() -> None:
    running = RunningRequests()
    with running.track("me", ["one", ""]) as cancelled:
        assert running.cancel("you", "one") == running.cancel("", "one") == running.cancel("me", "two") == 0
        assert running.cancel("me", "") == 0
        assert not cancelled.done()


async def test_an_id_may_stand_for_several() -> None:
    running = RunningRequests()
    with running.track("me", ["answer-1", "shared"]) as one, running.track("me", ["answer-2", "shared"]) as other:
        assert running.cancel("me", "answer-2") == 1
        assert not one.done()
        assert other.done()
        assert running.cancel("me", "shared") == 2
        assert one.done()
    assert len(running) == 0


async def test_a_request_that_is_cancelled_has_ended_when_that_is_said() -> None:
    async def receive() -> Any:
        return await asyncio.Event().wait()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    admission = Admission()
    started, ended = asyncio.Event(), list[bool]()
    request = asyncio.create_task(admission.run(receive, work(), tenant="me", ids=["one"]))
    await started.wait()
    assert admission.running.cancel("me", "one") == 1
    with pytest.raises(CancelledByClientError):
        await request
    assert ended == [True]
    assert len(admission.running) == 0
