"""What every HTTP request passes first: its id and its API key. Pure ASGI, so that it costs streams nothing."""

from __future__ import annotations

import re
from secrets import token_hex
from typing import TYPE_CHECKING

from tercet_frontend.api.errors import error_response
from tercet_frontend.api.health import HEALTH_PATHS
from tercet_shared.errors import AuthenticationError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from tercet_frontend.auth import ApiKeys

_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_TENANT = "tercet.tenant"


def tenant_of(scope: Scope) -> str:
    """Returns whose request this is; empty without API keys."""
    return str(scope.get(_TENANT, ""))


class Edge:
    """ASGI middleware: echoes or makes ``X-Request-Id``, and refuses whoever has no valid key."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request, or passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = authorization = None
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                given = value
            elif name == b"authorization":
                authorization = value
        request_id: bytes = given if given is not None and _SANE_ID.fullmatch(given) else token_hex(16).encode()

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            return send(message)

        if scope["path"] not in HEALTH_PATHS:
            try:
                scope[_TENANT] = self._keys.tenant(authorization)
            except AuthenticationError as error:
                await error_response(error)(scope, receive, send_with_id)
                return
        await self._app(scope, receive, send_with_id)
