"""The short way for the middle of a stream: past everything between a response and `Edge` that only looks at its start.

A token's way to the client would otherwise lead through half a dozen wrappers, which cost as much as all else that is
done for it. The first and the last part of a response go the common way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope, Send

_SCOPE_KEY = "tercet.shortcut"


def offer(scope: Scope, send: Send) -> None:
    """Lets `shortcut` find ``send``. Whoever offers it must `withdraw` it at the end of the request."""
    scope[_SCOPE_KEY] = send


def withdraw(scope: Scope) -> None:
    """Takes it back: ``send`` knows the scope, and together they would stay until the garbage collector looks."""
    scope.pop(_SCOPE_KEY, None)


def shortcut(scope: Scope) -> Send | None:
    """Returns what was offered, or None."""
    send: Send | None = scope.get(_SCOPE_KEY)
    return send
