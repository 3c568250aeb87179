"""Reading a request's body: bounded, JSON, an object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from tercet_frontend.admission import ClientGoneError
from tercet_shared.errors import InvalidRequestError, PayloadTooLargeError

if TYPE_CHECKING:
    from starlette.requests import Request


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """Returns the JSON object in the body.

    Args:
        request: its body has not been read.
        limit: bytes; a body over it is refused as soon as that is known, and what else comes of it is not kept.

    Raises:
        PayloadTooLargeError: the body is over ``limit``.
        InvalidRequestError: it is not JSON, or not an object.
        ClientGoneError: the client went away before it was complete.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequestError("The header Content-Type must be application/json.")
    try:
        value = orjson.loads(await _read(request, limit))
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
