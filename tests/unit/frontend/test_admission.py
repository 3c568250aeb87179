"""Who is let in, and what ends a request."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tercet_frontend.admission import Admission, ClientGoneError
from tercet_shared.errors import InvalidRequestError, UnavailableError


class _Models:
    reason: str | None = None

    def not_ready_reason(self) -> str | None:
        return self.reason


class _Client:
    """An ASGI receive channel."""

    def __init__(self) -> None:
        self._gone = asyncio.Event()

    def leave(self) -> None:
        self._gone.set()

    async def receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}


async def _for_ever(cancelled: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        cancelled.set()
        raise


async def test_states() -> None:
    models = _Models()
    admission = Admission()
    assert admission.not_ready_reason() == "The tokenizer is being loaded."
    with pytest.raises(UnavailableError, match="being loaded"):
        admission.admit()
    admission.loaded(cast("Any", models))
    assert admission.not_ready_reason() is None
    assert admission.admit() is models
    models.reason = "The core is gone."
    with pytest.raises(UnavailableError, match="The core is gone"):
        admission.admit()
    models.reason = None
    admission.leave()  # nobody is to be sent here any more; who comes is still served
    assert admission.not_ready_reason() == "The server is shutting down."
    assert admission.admit() is models
    admission.drain()
    with pytest.raises(UnavailableError, match="shutting down"):
        admission.admit()


async def test_work_that_ends_by_itself() -> None:
    async def work() -> int:
        return 5

    async def failing() -> int:
        raise InvalidRequestError("no")

    admission, client = Admission(), _Client()
    assert await admission.run(client.receive, work()) == 5
    with pytest.raises(InvalidRequestError):
        await admission.run(client.receive, failing())


async def test_client_that_leaves() -> None:
    admission, client, cancelled = Admission(), _Client(), asyncio.Event()
    call = asyncio.create_task(admission.run(client.receive, _for_ever(cancelled)))
    asyncio.get_running_loop().call_soon(client.leave)
    with pytest.raises(ClientGoneError):
        await call
    assert cancelled.is_set()


async def test_server_that_stops() -> None:
    admission, client, cancelled = Admission(), _Client(), asyncio.Event()
    call = asyncio.create_task(admission.run(client.receive, _for_ever(cancelled)))
    asyncio.get_running_loop().call_soon(admission.expire)
    with pytest.raises(UnavailableError):
        await call
    assert cancelled.is_set()
    admission.expire()  # again: nothing happens
    with pytest.raises(UnavailableError):
        await admission.run(client.receive, _for_ever(cancelled))


async def test_cancelled_from_outside() -> None:
    admission, client, cancelled = Admission(), _Client(), asyncio.Event()
    call = asyncio.create_task(admission.run(client.receive, _for_ever(cancelled)))
    asyncio.get_running_loop().call_later(0, call.cancel)
    with pytest.raises(asyncio.CancelledError):
        await call
    assert cancelled.is_set()


async def test_a_client_that_sends_more_is_still_there() -> None:
    messages = [{"type": "http.request"}, {"type": "http.request"}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    with pytest.raises(ClientGoneError):
        await Admission().run(receive, _for_ever(asyncio.Event()))
    assert messages == []
