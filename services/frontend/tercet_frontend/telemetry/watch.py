"""Who hears what becomes of one request. This is the one that does nothing; see `requests`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from tercet_frontend.cores.interface import Generation, GenerationRequest


CLIENT_CLOSED: Final = "client_closed"
"""What an exchange has for an error when its client left before the answer was complete."""


class Watch:
    """Hears of one request, from its head to the end of its answer. Every method returns at once."""

    __slots__ = ()

    def streaming(self) -> None:
        """Its answer is a stream."""

    def submit(self, submit: Callable[[GenerationRequest], Generation], request: GenerationRequest) -> Generation:
        """Returns what ``submit`` returns for one of its choices, which may be watched on the way."""
        return submit(request)

    def first_token(self) -> None:
        """Its first output token has come; calling it again does nothing."""

    def generated(self) -> None:
        """All its choices are over."""

    def ended(self, status: int) -> None:
        """It is over, with this HTTP status; its exchange says how."""


UNWATCHED = Watch()


class Watcher:
    """Makes the `Watch` of each request; this one makes none."""

    def begin(self, scope: MutableMapping[str, Any], exchange: Any) -> Watch:  # noqa: ARG002
        """Returns who hears of a request whose head has come; may give ``exchange`` another trace context."""
        return UNWATCHED


NO_WATCHER = Watcher()
