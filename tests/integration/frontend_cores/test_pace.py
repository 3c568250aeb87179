"""Tokens that go together where a front end has more to write than it can."""

from __future__ import annotations

import asyncio

import pytest

from tercet_frontend.cores.interface import Finished, FinishReason, Tokens
from tercet_frontend.cores.pace import Pace
from tests.fakes.core import STOP, TIMEOUT, FakeCore
from tests.integration.frontend_cores.support import open_cores, request, until


class Fixed(Pace):
    """Lets the tokens of some steps go together, however many there are."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps


@pytest.mark.parametrize("steps", [2, 3])
async def test_tokens_of_some_steps_come_at_once(core: FakeCore, steps: int) -> None:
    async with open_cores(core.address, pace=Fixed(steps)) as cores, asyncio.timeout(TIMEOUT):
        await until(cores, lambda: cores.not_ready_reason() is None)
        generation = cores.submit(request())
        received = await core.next_request()
        received.send(1)
        assert await generation.next() == Tokens([1], None)  # the first one at once
        for token in range(2, 2 + steps):
            received.send(token)
        ids = list((await generation.next()).ids)
        while len(ids) < steps:  # a slow machine's clock may have let some go before
            ids += (await generation.next()).ids
        assert ids == list(range(2, 2 + steps))


async def test_a_token_does_not_wait_for_others_that_do_not_come(core: FakeCore) -> None:
    async with open_cores(core.address, pace=Fixed(1_000)) as cores, asyncio.timeout(TIMEOUT):
        await until(cores, lambda: cores.not_ready_reason() is None)
        generation = cores.submit(request())
        received = await core.next_request()
        received.send(1)
        assert (await generation.next()).ids == [1]
        for token in (2, 3):  # again after the first time
            received.send(token)
            assert (await generation.next()).ids == [token]


async def test_the_end_does_not_wait(core: FakeCore) -> None:
    async with open_cores(core.address, pace=Fixed(1_000)) as cores, asyncio.timeout(TIMEOUT):
        await until(cores, lambda: cores.not_ready_reason() is None)
        generation = cores.submit(request())
        received = await core.next_request()
        core.step([received.row(1), received.row(2)])
        core.step([received.row(3, finish=STOP)])
        ids: list[int] = []
        finished = None
        while finished is None:
            tokens = await generation.next()
            ids += tokens.ids
            finished = tokens.finished
        assert (ids, finished) == ([1, 2, 3], Finished(FinishReason.STOP, None, 0))


async def test_a_choice_may_be_given_up_while_tokens_wait(core: FakeCore) -> None:
    async with open_cores(core.address, pace=Fixed(1_000)) as cores, asyncio.timeout(TIMEOUT):
        await until(cores, lambda: cores.not_ready_reason() is None)
        generation = cores.submit(request())
        received = await core.next_request()
        core.step([received.row(1)])
        core.step([received.row(2)])
        generation.abort("enough")
        with pytest.raises(RuntimeError):
            await generation.next()
