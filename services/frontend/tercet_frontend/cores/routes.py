"""Where each request runs, told to the registry and to the router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tercet_shared.registry.interface import RouteRecord

if TYPE_CHECKING:
    from tercet_frontend.cores.interface import GenerationRequest
    from tercet_frontend.routing import Placement
    from tercet_shared.registry.interface import Fleet


class RouteBook:
    """Writes down where requests run and how they ended.

    The choices of one request share its entry: it names the core of the latest, and says that the request has ended
    when all of them have.

    Args:
        fleet: where to write it.
        frontend_id: name of this front end.
    """

    def __init__(self, fleet: Fleet, frontend_id: str) -> None:
        self._fleet = fleet
        self._frontend_id = frontend_id
        self._running: dict[str, int] = {}  # choices that have not ended, by request id

    def visit(self, request: GenerationRequest, placement: Placement[Any], attempt: int) -> Visit:
        """Notes that a choice runs where ``placement`` says. Attempt 0 is that of a new choice."""
        if not attempt:
            self._running[request.request_id] = self._running.get(request.request_id, 0) + 1
        visit = Visit(self, request, placement, attempt)
        self.note(visit, "running")
        return visit

    def ended(self, visit: Visit, state: str) -> None:
        """Notes that a choice is over."""
        request_id = visit.request.request_id
        left = self._running.pop(request_id, 1) - 1
        if left:
            self._running[request_id] = left
        else:
            self.note(visit, state)

    def note(self, visit: Visit, state: str) -> None:
        """Writes the entry of the request that makes ``visit``."""
        request = visit.request
        self._fleet.note_route(
            request.request_id,
            RouteRecord(
                core_id=visit.placement.core_id,
                front_end=self._frontend_id,
                attempt=visit.attempt,
                traceparent=request.traceparent,
                state=state,
            ),
        )


class Visit:
    """One attempt of a choice on a core: the `Placement` of its generation.

    Attributes:
        request: the choice's.
        placement: where it is, as the router counts it.
        attempt: 0 first.
    """

    __slots__ = ("_book", "attempt", "placement", "request")

    def __init__(self, book: RouteBook, request: GenerationRequest, placement: Placement[Any], attempt: int) -> None:
        self._book = book
        self.request = request
        self.placement = placement
        self.attempt = attempt

    def started(self) -> None:
        """See `Placement`."""
        self.placement.started()

    def lost(self, *, failed: bool) -> None:
        """See `Placement`."""
        self.placement.ended(failed=failed)

    def ended(self, state: str) -> None:
        """See `Placement`."""
        self.placement.ended()
        self._book.ended(self, state)
