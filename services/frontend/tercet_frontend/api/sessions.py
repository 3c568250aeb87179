"""What requests belong together: those of one session go, where that is possible, to one core and one model."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.requests import Request

    from tercet_frontend.schemas.asked import Asked

HEADER: Final = "x-session-id"

MAX_LENGTH: Final = 64
"""Characters of a session's name as it goes on; longer ones are replaced by their hash."""


def session_of(request: Request, fields: Asked) -> str:
    """Returns the session of a request: what its header says, else its body; empty for none."""
    session = request.headers.get(HEADER) or fields.session
    if len(session) <= MAX_LENGTH:
        return session
    return sha256(session.encode(errors="replace")).hexdigest()
