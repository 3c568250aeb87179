"""Errors as HTTP responses, all in OpenAI's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tercet_frontend.admission import ClientGoneError
from tercet_shared.errors import (
    AuthenticationError,
    InternalError,
    TercetError,
    bounded,
    error_body,
    status_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI
    from starlette.requests import Request

RETRY_AFTER = "1"
"""Seconds after which a client should try again; cores come back within a few."""

_TRY_AGAIN = frozenset({429, 503})

_CLIENT_CLOSED = 499
"""nginx's status for a client that went away; only logs see it."""


class JsonResponse(Response):
    """A response whose content is rendered by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Returns the JSON text of ``content``."""
        return orjson.dumps(content)


def error_response(error: TercetError) -> JsonResponse:
    """Returns the response for ``error``: status, bounded body, and the headers that go with it."""
    headers: dict[str, str] = {}
    status = status_of(error)
    if status.http in _TRY_AGAIN:
        headers["Retry-After"] = RETRY_AFTER
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    return JsonResponse(error_body(error), status.http, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Makes every error that leaves an endpoint a response of this module."""

    async def known(_request: Request, error: Exception) -> Response:
        if not isinstance(error, TercetError):
            raise error
        return error_response(error)

    async def http(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        path = bounded(request.url.path, 200)
        message = {
            404: f"There is no {path} here.",
            405: f"{path} does not answer {bounded(request.method, 20)}.",
        }.get(error.status_code, str(error.detail))
        return _plain(error.status_code, message, error.headers)

    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED)

    async def unexpected(_request: Request, _error: Exception) -> Response:
        # The server logs the traceback; the client is not shown what went wrong inside.
        return error_response(InternalError("The server had an error while it processed the request."))

    app.add_exception_handler(TercetError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(Exception, unexpected)


def _plain(status: int, message: str, headers: Mapping[str, str] | None) -> JsonResponse:
    body = {"error": {"message": bounded(message), "type": "invalid_request_error", "param": None, "code": None}}
    return JsonResponse(body, status, dict(headers or {}))
