"""Requests that run in another front end: how they are ended from here.

Who is asked to end a request that it does not have asks all front ends at once, over Redis: each that runs it ends it,
and all answer. Redis says how many have heard the question, so the answer is known as soon as the last of them has
spoken. Whose request it is travels along, and whoever runs it looks at that.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Protocol

import orjson
from redis.exceptions import ConnectionError as RedisConnectionError

from tercet_shared.errors import UnavailableError
from tercet_shared.registry.client import REDIS_FAILURES, is_cluster, raise_if_cancelled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tercet_frontend.running import RunningRequests
    from tercet_shared.registry.client import RedisClient

logger = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds for all answers to a question; who has not answered by then has nothing to say."""

_IDLE = 5.0
"""Seconds without a message after which the connection is tried."""

_PAUSE = 1.0
"""Seconds after a failure."""


class Others(Protocol):
    """The other front ends."""

    async def cancel(self, tenant: str, name: str) -> int:
        """Ends all requests of ``tenant`` that run under this id in any of them; returns their number.

        Raises:
            UnavailableError: they cannot be asked.
        """


class NoOthers:
    """A front end by itself."""

    async def cancel(self, tenant: str, name: str) -> int:  # noqa: ARG002  # see Others
        """See `Others`."""
        return 0


@dataclass(slots=True)
class _Question:
    """One that waits for its answers; how many there will be is known a moment after it was asked."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    expected: int | None = None
    answers: int = 0
    cancelled: int = 0

    def check(self) -> None:
        if self.expected is not None and self.answers >= self.expected:
            self.done.set()


class OtherFrontEnds:
    """`Others` over Redis. Building it connects to nothing; `run` does.

    Args:
        client: of Redis; the caller closes it.
        prefix: of the channels.
        frontend_id: name of this front end.
        running: the requests that run here.
    """

    def __init__(self, client: RedisClient, prefix: str, frontend_id: str, running: RunningRequests) -> None:
        self._client = client
        self._questions_channel = f"{prefix}:1:cancel"
        self._answers_channel = f"{prefix}:1:cancelled:{frontend_id}"
        self._running = running
        self._waiting: dict[str, _Question] = {}
        self._listening = asyncio.Event()

    async def wait_until_listening(self) -> None:
        """Returns when questions of others are heard."""
        await self._listening.wait()

    async def run(self) -> None:
        """Answers the others until it is cancelled. Failures of Redis never end it."""
        said = False
        while True:
            try:
                await self._listen()
            except REDIS_FAILURES as error:
                self._listening.clear()
                if not said:
                    logger.warning("requests of other front ends cannot be ended (%s)", type(error).__name__)
                said = True
            raise_if_cancelled()
            await asyncio.sleep(_PAUSE)

    async def cancel(self, tenant: str, name: str) -> int:
        """See `Others`."""
        if not self._listening.is_set():
            raise UnavailableError("The request does not run here, and the other front ends cannot be asked.")
        token, question = token_hex(8), _Question()
        self._waiting[token] = question
        message = orjson.dumps({"tenant": tenant, "name": name, "token": token, "answer": self._answers_channel})
        try:
            async with asyncio.timeout(PATIENCE):
                heard = await self._client.publish(self._questions_channel, message)
                raise_if_cancelled()  # also when the time is over: nothing would end the wait below
                # A node of a cluster knows only who is connected to itself; then the time decides.
                question.expected = None if is_cluster(self._client) else int(heard)
                question.check()
                await question.done.wait()
        except TimeoutError:
            pass
        except REDIS_FAILURES:
            raise UnavailableError("The request does not run here, and the other front ends cannot be asked.") from None
        finally:
            del self._waiting[token]
        return question.cancelled

    async def _listen(self) -> None:
        """Listens on one connection until it fails, which it always does with an exception."""
        async with self._client.pubsub() as channel:
            await channel.subscribe(self._questions_channel, self._answers_channel)
            subscribed, tried = 0, False
            while True:
                raise_if_cancelled()
                message = await channel.get_message(timeout=_IDLE)
                if message is None:
                    if tried:
                        raise RedisConnectionError("silent")
                    await channel.ping()
                    tried = True
                    continue
                tried = False
                if message["type"] == "subscribe":
                    subscribed += 1
                    if subscribed == 2:
                        self._listening.set()
                elif message["type"] == "message":
                    await self._hear(message)

    async def _hear(self, message: Mapping[str, Any]) -> None:
        try:
            said = orjson.loads(message["data"])
            token = str(said["token"])
            if message["channel"] == self._answers_channel.encode():
                self._answered(token, int(said["cancelled"]))
                return
            answer, tenant, name = str(said["answer"]), str(said["tenant"]), str(said["name"])
        except (KeyError, TypeError, ValueError):
            logger.warning("a message of another front end makes no sense")
            return
        cancelled = self._running.cancel(tenant, name)
        await self._client.publish(answer, orjson.dumps({"token": token, "cancelled": cancelled}))

    def _answered(self, token: str, cancelled: int) -> None:
        question = self._waiting.get(token)
        if question is None:
            return
        question.answers += 1
        question.cancelled += cancelled
        question.check()
        if cancelled and question.expected is None:
            question.done.set()  # of a cluster: that is all that its asker has to know
