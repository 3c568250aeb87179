"""Errors as HTTP responses: in OpenAI's shape, and in Anthropic's on its endpoints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tercet_frontend.access.exchange import exchange_of
from tercet_frontend.admission import ClientGoneError
from tercet_shared.errors import (
    AuthenticationError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
    TercetError,
    UnavailableError,
    bounded,
    error_body,
    status_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI
    from starlette.requests import Request

MESSAGES_PATH = "/v1/messages"
"""Where Anthropic's endpoints are; what is below it answers in Anthropic's shape."""

RETRY_AFTER = "1"
"""Seconds after which a client should try again, where nothing better is known; cores come back within a few."""

_TRY_AGAIN = frozenset({429, 503})

_CLIENT_CLOSED = 499
"""nginx's status for a client that went away; only logs see it."""


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's names for what a status means; other statuses below 500 are the sender's fault, the rest ours."""


class JsonResponse(Response):
    """A response whose content is rendered by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Returns the JSON text of ``content``."""
        return orjson.dumps(content)


def messages_error_body(status: int, message: str) -> dict[str, Any]:
    """Returns Anthropic's error body, ``{"type": "error", "error": {"type", "message"}}``."""
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_response(error: TercetError, path: str = "") -> JsonResponse:
    """Returns the response for ``error`` on ``path``: status, bounded body, and the headers that go with it."""
    headers: dict[str, str] = {}
    status = status_of(error)
    if status.http in _TRY_AGAIN:
        headers["Retry-After"] = _retry_after(error)
    if isinstance(error, RequestTimeoutError):
        headers["Connection"] = "close"  # the rest of the request may still come
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    body = messages_error_body(status.http, error.message) if _is_messages(path) else error_body(error)
    return JsonResponse(body, status.http, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Makes every error that leaves an endpoint a response of this module."""

    async def known(request: Request, error: Exception) -> Response:
        if not isinstance(error, TercetError):
            raise error
        exchange = exchange_of(request.scope)
        exchange.failed(error)
        if isinstance(error, OverloadedError) and error.retry_after is None:
            error.retry_after = exchange.retry_after()  # a core is full; how fast requests leave is known here
        return error_response(error, request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        path = bounded(request.url.path, 200)
        message = {
            404: f"There is no {path} here.",
            405: f"{path} does not answer {bounded(request.method, 20)}.",
        }.get(error.status_code, str(error.detail))
        return _plain(request, error.status_code, message, error.headers)

    async def query(request: Request, error: Exception) -> Response:
        # Bodies are checked elsewhere: this is a parameter in the address.
        if not isinstance(error, RequestValidationError):
            raise error
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return error_response(InvalidRequestError(f"{name}: {first['msg']}.", param=name), request.url.path)

    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED)

    app.add_exception_handler(TercetError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, query)
    app.add_exception_handler(ClientGoneError, gone)


def _retry_after(error: TercetError) -> str:
    known = error.retry_after if isinstance(error, UnavailableError) else None
    return RETRY_AFTER if known is None else str(max(math.ceil(known), 1))


def _is_messages(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def _plain(request: Request, status: int, message: str, headers: Mapping[str, str] | None) -> JsonResponse:
    if _is_messages(request.url.path):
        return JsonResponse(messages_error_body(status, bounded(message)), status, dict(headers or {}))
    body = {"error": {"message": bounded(message), "type": "invalid_request_error", "param": None, "code": None}}
    return JsonResponse(body, status, dict(headers or {}))
