"""What accompanies one HTTP request through the front end: who sent it, what it holds, what it cost, how it ended."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tercet_frontend.access.keys import ANONYMOUS
from tercet_frontend.telemetry.watch import UNWATCHED
from tercet_shared.errors import InvalidRequestError, status_of

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping
    from typing import Any

    from tercet_frontend.access.keys import ApiKey
    from tercet_frontend.access.occupancy import Place
    from tercet_frontend.access.quotas import Grant, Quotas
    from tercet_frontend.telemetry.watch import Watch
    from tercet_shared.errors import TercetError

_SCOPE_KEY = "tercet.exchange"
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

MAX_REASONS = 128
"""Finish reasons that are noted of one request."""


class Exchange:
    """One HTTP request, from its head to the end of its answer.

    Attributes:
        request_id: the one in ``X-Request-Id``.
        client: address of who sent it; empty where that is not known.
        traceparent: W3C trace context that came with it, or empty.
        heartbeat: seconds of silence after which a stream says that it is alive; 0 for never.
        key: the API key that it came with.
        model: that it named, once it is known to be served.
        target: the model itself, which has another name behind an alias or a split.
        session: what it belongs to; empty for nothing.
        prompt_tokens: that it used.
        output_tokens: that it used.
        finish_reasons: of its choices.
        error: code of the error that it ended with; empty for none.
        watch: hears what becomes of it.
    """

    __slots__ = (
        "_grant",
        "_place",
        "_quotas",
        "client",
        "error",
        "finish_reasons",
        "heartbeat",
        "key",
        "model",
        "output_tokens",
        "prompt_tokens",
        "request_id",
        "session",
        "target",
        "traceparent",
        "watch",
    )

    def __init__(
        self, *, request_id: str = "", client: str = "", traceparent: str = "", heartbeat: float = 0.0
    ) -> None:
        self.request_id = request_id
        self.client = client
        self.traceparent = traceparent if _TRACEPARENT.fullmatch(traceparent) else ""
        self.heartbeat = heartbeat
        self.key: ApiKey = ANONYMOUS
        self.model = ""
        self.target = ""
        self.session = ""
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.finish_reasons: list[str] = []
        self.error = ""
        self.watch: Watch = UNWATCHED
        self._place: Place | None = None
        self._quotas: Quotas | None = None
        self._grant: Grant | None = None

    @property
    def trace_id(self) -> str:
        """The trace id in `traceparent`; empty for none."""
        return self.traceparent[3:35]

    def occupies(self, place: Place) -> None:
        """Takes a place, which is left at the end."""
        self._place = place

    def charges(self, quotas: Quotas, grant: Grant) -> None:
        """Takes a grant, which is settled at the end."""
        self._quotas = quotas
        self._grant = grant

    def rate_headers(self) -> list[tuple[bytes, bytes]]:
        """Returns what the answer says of the key's limits."""
        return [] if self._grant is None else self._grant.headers()

    def retry_after(self) -> float | None:
        """Returns the seconds in which those that wait now will have been served; None where that is not known."""
        return None if self._place is None else self._place.retry_after()

    def priority(self, asked: int | None) -> int:
        """Returns the priority of a request that asked for ``asked``.

        Raises:
            InvalidRequestError: it is better than its key may have.
        """
        if asked is None:
            return self.key.priority
        best = self.key.best_priority
        if best is not None and asked < best:
            raise InvalidRequestError(
                f"priority: the best that this API key may ask for is {best} (smaller is served first).",
                param="priority",
            )
        return asked

    def began(self) -> None:
        """The first tokens have come; calling it again does nothing."""
        if self._place is not None:
            self._place.began()

    def used(self, prompt_tokens: int, output_tokens: int, finish_reasons: Iterable[str] = ()) -> None:
        """Notes what it cost, and how its choices ended."""
        self.watch.generated()
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        self.finish_reasons += list(finish_reasons)[:MAX_REASONS]

    def failed(self, error: TercetError) -> None:
        """Notes the error that its sender is told."""
        status = status_of(error)
        self.error = status.code or status.type

    def close(self) -> None:
        """Gives back what it holds. Called once, at its end."""
        if self._place is not None:
            self._place.leave()
        if self._quotas is not None and self._grant is not None:
            self._quotas.leave(self._grant, self.prompt_tokens + self.output_tokens)


def attach(scope: MutableMapping[str, Any], exchange: Exchange) -> None:
    """Lets `exchange_of` find it."""
    scope[_SCOPE_KEY] = exchange


def exchange_of(scope: MutableMapping[str, Any]) -> Exchange:
    """Returns the exchange of a request; one that notes nothing where none was attached."""
    found = scope.get(_SCOPE_KEY)
    return found if isinstance(found, Exchange) else Exchange()
