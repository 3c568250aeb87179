"""Who is let in: whether the front end can serve now, and the end of requests when it stops."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tercet_frontend.access.occupancy import Occupancy
from tercet_frontend.running import RunningRequests
from tercet_shared.errors import CancelledByClientError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence

    from tercet_frontend.cores.interface import Cores, ServedModel
    from tercet_frontend.models.served import ListedModel
    from tercet_frontend.tokenizing import ModelText

    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

T = TypeVar("T")

_SHUTTING_DOWN = "The server is shutting down."


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete. Nobody is left to be told."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What an admitted request works with, once it is known which model it wants.

    Attributes:
        text: the model's tokenizer, template and defaults.
        cores: what runs its choices.
        model: as it was asked for, and is served now.
        target: its own name, by which ``cores`` know it; another one where an alias was asked for.
    """

    text: ModelText
    cores: Cores
    model: ServedModel
    target: str


class Models(Protocol):
    """The models behind a front end."""

    def not_ready_reason(self) -> str | None:
        """Returns why no request can be served now, in one sentence, or None when one can."""

    def listed(self) -> list[ListedModel]:
        """Returns the names that can be asked for now, aliases and splits among them."""

    def serving(self, name: str, session: str = "") -> Serving:
        """Returns what a request for ``name`` works with; of a split, one of its models.

        Args:
            name: as the client asked.
            session: whose request it is: those of one session get the same model; empty for none.

        Raises:
            ModelNotFoundError: there is none.
            UnavailableError: there is one, and it cannot be served now.
        """


class Admission:
    """The state of the front end as requests see it.

    It goes one way: loading → loaded (`loaded`) → leaving (`leave`) → draining (`drain`) → expired (`expire`). While
    loaded, it is ready whenever the models are; while leaving, it says that it is not, and serves all the same. Needs a
    running event loop.

    Attributes:
        running: the requests that are in `run`.
        occupancy: how many there are, and may be.
    """

    def __init__(self, occupancy: Occupancy | None = None) -> None:
        self.running = RunningRequests()
        self.occupancy = Occupancy() if occupancy is None else occupancy
        self._models: Models | None = None
        self._leaving = False
        self._draining = False
        self._expired: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def loaded(self, models: Models) -> None:
        """Takes what requests work with; from now on they are served when the models are ready."""
        self._models = models

    def leave(self) -> None:
        """Says that it is not ready, so that nobody is sent here any more, and still serves who comes."""
        self._leaving = True

    def drain(self) -> None:
        """Lets nobody in any more; requests that run go on."""
        self._leaving = self._draining = True

    def expire(self) -> None:
        """Ends all requests that still run with an `UnavailableError`; implies `drain`."""
        self.drain()
        if not self._expired.done():
            self._expired.set_result(None)

    def not_ready_reason(self) -> str | None:
        """Returns why requests are to be sent elsewhere, in one sentence, or None when they are welcome."""
        return _SHUTTING_DOWN if self._leaving else self._refusal()

    def admit(self) -> Models:
        """Lets a request in if it can be served now. Costs nothing, so it comes before any work.

        Raises:
            UnavailableError: it cannot; the sentence is the reason.
        """
        reason = self._refusal()
        if reason is not None or self._models is None:
            raise UnavailableError(reason or "The server is not ready.")
        return self._models

    def _refusal(self) -> str | None:
        if self._draining:
            return _SHUTTING_DOWN
        if self._models is None:
            return "The tokenizer is being loaded."
        return self._models.not_ready_reason()

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
                raise UnavailableError(_SHUTTING_DOWN)
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
