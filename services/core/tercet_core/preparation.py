"""Requests that wait for their grammar: compiled beside the engine, queued when it is there."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from tercet_shared.errors import InternalError, InvalidRequestError, TercetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tercet_core.scheduling.guides import Guide, GuideWork
    from tercet_core.scheduling.request import Request
    from tercet_shared.structured import Grammar

_log = logging.getLogger(__name__)


class Guides(Protocol):
    """Where guides come from, and where they work; see `tercet_core.scheduling.guides`."""

    async def guide(self, request: Request, grammar: Grammar) -> Guide:
        """Returns the guide of a request. Raises `TercetError` when it cannot be had; may be cancelled."""

    async def compute(self, work: GuideWork) -> None:
        """Runs the work, while the caller neither plans nor applies."""


class NoGuides:
    """Refuses grammars, and so has no work."""

    async def guide(self, request: Request, grammar: Grammar) -> Guide:  # noqa: ARG002
        """Raises `InvalidRequestError`."""
        raise InvalidRequestError(f"{grammar.param}: this core enforces no grammars.", param=grammar.param)

    async def compute(self, work: GuideWork) -> None:
        """Is never called: a request with a guide is needed for work."""


class Preparation:
    """The requests whose grammar is not there yet. Used on one event loop.

    Args:
        guides: where guides come from.
        admit: takes a request that has its guide now.
        refuse: takes one that will not have it, and why.
    """

    def __init__(
        self, guides: Guides, admit: Callable[[Request], None], refuse: Callable[[Request, TercetError], None]
    ) -> None:
        self._guides = guides
        self._admit = admit
        self._refuse = refuse
        self._tasks: dict[Request, asyncio.Task[Guide]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, request: Request, grammar: Grammar) -> None:
        """Begins to get a request its guide; it is admitted or refused, unless it is cancelled first."""
        task = asyncio.create_task(self._guides.guide(request, grammar), name="prepare a grammar")
        self._tasks[request] = task
        task.add_done_callback(lambda task: self._done(request, task))

    def cancel(self, requests: Iterable[Request]) -> None:
        """Forgets requests; those that are not here are left alone."""
        for request in requests:
            if (task := self._tasks.pop(request, None)) is not None:
                task.cancel()

    def cancel_all(self) -> list[Request]:
        """Forgets all requests and returns them."""
        requests = [*self._tasks]
        self.cancel(requests)
        return requests

    def _done(self, request: Request, task: asyncio.Task[Guide]) -> None:
        if self._tasks.pop(request, None) is None or task.cancelled():
            return
        error = task.exception()
        if error is None:
            request.guide = task.result()
            self._admit(request)
        elif isinstance(error, TercetError):
            self._refuse(request, error)
        else:
            _log.error(
                "the grammar of request %s could not be prepared",
                request.request_id,
                exc_info=error,
                extra={"traceparent": request.traceparent},
            )
            self._refuse(request, InternalError("The grammar could not be prepared."))
