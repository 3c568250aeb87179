"""Every error that crosses a boundary in Tercet, and what each becomes on HTTP and gRPC.

    TercetError
    ├── RequestError               the sender's fault; ends one request, nothing else
    │   ├── InvalidRequestError      400  invalid_request_error   malformed, out of range, not supported
    │   │   └── TemplateError        400                          the chat template refused the messages
    │   ├── ContextLengthError       400  context_length_exceeded
    │   ├── NotFoundError            404  not_found               no response or running request of that id
    │   │   └── ModelNotFoundError     404  model_not_found
    │   ├── AuthenticationError      401  invalid_api_key
    │   ├── PayloadTooLargeError     413  request_too_large
    │   ├── HeadTooLargeError        431  request_head_too_large
    │   ├── RequestTimeoutError      408  request_timeout         it was not sent in time
    │   └── CancelledByClientError   499  request_cancelled       ended by its id; clients do not retry this status
    ├── UnavailableError             503  service_unavailable     no core, core lost, draining
    │   └── OverloadedError          429  rate_limit_exceeded     full; try again
    ├── InternalError                500  internal_error          a fault of ours that ended one request
    ├── CheckpointError            a model that cannot be loaded   (ends the process)
    ├── ConfigurationError         settings that cannot work       (ends the process)
    └── LinkError                  a peer process that is gone or does not keep to the protocol
        └── ProtocolError            what it sent is not valid

The table at the end is the only place where an error is given a status.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

MAX_MESSAGE = 2_000
"""Characters of an error message that leave the process; more is cut, so that bodies stay small."""


def bounded(text: str, limit: int = MAX_MESSAGE) -> str:
    """Returns ``text`` cut to ``limit`` characters, with an ellipsis where something was cut."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


class TercetError(Exception):
    """Base of all errors that Tercet raises on purpose. ``str(error)`` is one sentence for its reader."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """Keeps the sentence (bounded) and the name of the request parameter that it is about, if any."""
        super().__init__(bounded(message))
        self.param = param

    @property
    def message(self) -> str:
        """The sentence."""
        return str(self.args[0])


class RequestError(TercetError):
    """The request cannot be served as it was sent."""


class InvalidRequestError(RequestError):
    """A value is malformed, out of range or not supported."""


class TemplateError(InvalidRequestError):
    """The model's chat template refused the messages, or failed on them."""


class ContextLengthError(RequestError):
    """The prompt, or prompt and output together, exceed the model's context."""


class NotFoundError(RequestError):
    """What the request names does not exist, or belongs to somebody else."""


class ModelNotFoundError(NotFoundError):
    """No core serves a model of that name."""


class AuthenticationError(RequestError):
    """No API key, or an unknown one."""


class PayloadTooLargeError(RequestError):
    """The body is over the configured limit."""


class HeadTooLargeError(RequestError):
    """The request's address or headers are too long, or too many."""


class RequestTimeoutError(RequestError):
    """The client took too long to send its request."""


class CancelledByClientError(RequestError):
    """Another request of the same client asked for this one's end."""


class UnavailableError(TercetError):
    """Nothing behind the front end can take the request now, or what ran it is gone."""

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        """Keeps the sentence, and the seconds after which trying again is worth it, where that is known."""
        super().__init__(message, param=param)
        self.retry_after = retry_after


class OverloadedError(UnavailableError):
    """A queue or quota is full."""


class InternalError(TercetError):
    """A fault of ours that ended one request."""


class CheckpointError(TercetError):
    """The model is missing, damaged, of an unknown kind, or too big."""


class ConfigurationError(TercetError):
    """The settings cannot work together or on this machine."""


class LinkError(TercetError):
    """The process at the other end is gone or cannot be reached."""


class ProtocolError(LinkError):
    """The process at the other end sent something that the protocol does not allow."""


@dataclass(frozen=True, slots=True)
class Status:
    """What an error becomes at the edge: HTTP status, OpenAI ``type`` and ``code``, gRPC status."""

    http: int
    type: str
    code: str | None
    grpc: grpc.StatusCode


_TABLE: tuple[tuple[type[TercetError], Status], ...] = (
    # Subclasses before their bases: the first match counts.
    (ContextLengthError, Status(400, "invalid_request_error", "context_length_exceeded", grpc.StatusCode.OUT_OF_RANGE)),
    (ModelNotFoundError, Status(404, "invalid_request_error", "model_not_found", grpc.StatusCode.NOT_FOUND)),
    (NotFoundError, Status(404, "invalid_request_error", "not_found", grpc.StatusCode.NOT_FOUND)),
    (CancelledByClientError, Status(499, "invalid_request_error", "request_cancelled", grpc.StatusCode.CANCELLED)),
    (AuthenticationError, Status(401, "invalid_request_error", "invalid_api_key", grpc.StatusCode.UNAUTHENTICATED)),
    (
        PayloadTooLargeError,
        Status(413, "invalid_request_error", "request_too_large", grpc.StatusCode.RESOURCE_EXHAUSTED),
    ),
    (
        HeadTooLargeError,
        Status(431, "invalid_request_error", "request_head_too_large", grpc.StatusCode.RESOURCE_EXHAUSTED),
    ),
    (
        RequestTimeoutError,
        Status(408, "invalid_request_error", "request_timeout", grpc.StatusCode.DEADLINE_EXCEEDED),
    ),
    (RequestError, Status(400, "invalid_request_error", None, grpc.StatusCode.INVALID_ARGUMENT)),
    (OverloadedError, Status(429, "rate_limit_error", "rate_limit_exceeded", grpc.StatusCode.RESOURCE_EXHAUSTED)),
    (UnavailableError, Status(503, "server_error", "service_unavailable", grpc.StatusCode.UNAVAILABLE)),
    (LinkError, Status(503, "server_error", "service_unavailable", grpc.StatusCode.UNAVAILABLE)),
    (TercetError, Status(500, "server_error", "internal_error", grpc.StatusCode.INTERNAL)),
)


def status_of(error: TercetError) -> Status:
    """Returns what ``error`` becomes at the edge."""
    for kind, status in _TABLE:
        if isinstance(error, kind):
            return status
    raise AssertionError("the last row of the table matches every TercetError")


def error_body(error: TercetError) -> dict[str, Any]:
    """Returns OpenAI's error body, ``{"error": {"message", "type", "param", "code"}}``."""
    status = status_of(error)
    return {
        "error": {"message": error.message, "type": status.type, "param": error.param, "code": status.code},
    }
