"""Reading a request's body: bounded, JSON, an object."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson

from tercet_frontend.admission import ClientGoneError
from tercet_frontend.api.structure import check_structure
from tercet_shared.errors import InvalidRequestError, PayloadTooLargeError, RequestTimeoutError

if TYPE_CHECKING:
    from starlette.requests import Request


async def read_body(request: Request, limit: int, timeout: float | None = None) -> bytes | bytearray:  # noqa: ASYNC109  # an error of its own
    """Returns the body, which is said to be JSON.

    Args:
        request: its body has not been read.
        limit: bytes; a body over it is refused as soon as that is known, and what else comes of it is not kept.
        timeout: seconds in which all of it has to come; None sets no limit.

    Raises:
        PayloadTooLargeError: the body is over ``limit``.
        InvalidRequestError: the request says that it is something else.
        RequestTimeoutError: it did not come in time.
        ClientGoneError: the client went away before it was complete.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequestError("The header Content-Type must be application/json.")
    try:
        async with asyncio.timeout(timeout):
            return await _read(request, limit)
    except TimeoutError:
        raise RequestTimeoutError("The body of the request did not come in time.") from None


def parsed(body: bytes | bytearray) -> dict[str, Any]:
    """Returns the JSON object in a body.

    Raises:
        InvalidRequestError: it is not JSON, no object, or has more in it than a request may have.
    """
    check_structure(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    return value


async def _read(request: Request, limit: int) -> bytes | bytearray:
    too_large = PayloadTooLargeError(f"The body is larger than {limit} bytes.")
    if int(request.headers.get("content-length", "0")) > limit:  # the HTTP parser has checked that it is a number
        raise too_large
    body: bytes | bytearray = b""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece: bytes = message.get("body", b"")
        if len(body) + len(piece) > limit:
            raise too_large
        if not message.get("more_body", False):
            return body + piece if body else piece
        if not isinstance(body, bytearray):
            body = bytearray()
        body += piece
