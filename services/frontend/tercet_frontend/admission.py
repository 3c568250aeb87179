"""Who is let in: whether the front end can serve now, and the end of requests when it stops."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tercet_frontend.access.occupancy import Occupancy
from tercet_frontend.running import RunningRequests
from tercet_shared.errors import CancelledByClientError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence

    from tercet_frontend.cores.interface import Cores
    from tercet_frontend.tokenizing import ModelText

    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete. Nobody is left to be told."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What an admitted request works with.

    Attributes:
        text: the model's tokenizer, template and defaults.
        cores: what runs its choices.
    """

    text: ModelText
    cores: Cores


class Admission:
    """The state of the front end as requests see it.

    It goes one way: loading → loaded (`loaded`) → draining (`drain`) → expired (`expire`). While loaded, it is ready
    whenever the cores are. Needs a running event loop.

    Attributes:
        running: the requests that are in `run`.
        occupancy: how many there are, and may be.
    """

    def __init__(self, occupancy: Occupancy | None = None) -> None:
        self.running = RunningRequests()
        self.occupancy = Occupancy() if occupancy is None else occupancy
        self._serving: Serving | None = None
        self._draining = False
        self._expired: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def loaded(self, serving: Serving) -> None:
        """Takes what requests work with; from now on they are served when the cores are ready."""
        self._serving = serving

    def drain(self) -> None:
        """Lets nobody in any more; requests that run go on."""
        self._draining = True

    def expire(self) -> None:
        """Ends all requests that still run with an `UnavailableError`; implies `drain`."""
        self._draining = True
        if not self._expired.done():
            self._expired.set_result(None)

    def not_ready_reason(self) -> str | None:
        """Returns why no request can be served now, in one sentence, or None when one can."""
        if self._draining:
            return "The server is shutting down."
        if self._serving is None:
            return "The tokenizer is being loaded."
        return self._serving.cores.not_ready_reason()

    def admit(self) -> Serving:
        """Lets a request in if it can be served now. Costs nothing, so it comes before any work.

        Raises:
            UnavailableError: it cannot; the sentence is the reason.
        """
        reason = self.not_ready_reason()
        if reason is not None or self._serving is None:
            raise UnavailableError(reason or "The server is not ready.")
        return self._serving

    async def run(
        self, receive: Receive, work: Coroutine[Any, Any, T], *, tenant: str = "", ids: Sequence[str] = ()
    ) -> T:
        """Returns what ``work`` returns, unless the client or the server goes first; then ``work`` is cancelled.

        Args:
            receive: the request's ASGI channel, from which the body has been read.
            work: runs as a task of its own, which has ended when this returns.
            tenant: whose request it is.
            ids: by any of which its tenant may end it, through `running`.

        Raises:
            ClientGoneError: the client closed the connection.
            CancelledByClientError: it was ended by one of its ids.
            UnavailableError: the server is shutting down, and the grace is over.
        """
        worker = asyncio.ensure_future(work)
        listener = asyncio.ensure_future(_disconnected(receive))
        with self.running.track(tenant, ids) as cancelled:
            try:
                await asyncio.wait((worker, listener, cancelled, self._expired), return_when=asyncio.FIRST_COMPLETED)
                if worker.done():
                    return worker.result()
                if listener.done():
                    listener.result()
                    raise ClientGoneError
                if cancelled.done():
                    raise CancelledByClientError("The request was cancelled by its id.")
                raise UnavailableError("The server is shutting down.")
            finally:
                worker.cancel()
                listener.cancel()
                await asyncio.wait((worker, listener))
                _consume(worker)
                _consume(listener)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _consume(task: asyncio.Future[Any]) -> None:
    """Marks the outcome as seen: it was returned, or it does not matter any more."""
    if not task.cancelled():
        task.exception()
