"""One HTTP connection within limits: uvicorn's protocol, and what it leaves to a proxy in front of it.

A head is bounded in size and number of fields; head and body must come in time; what is left of a body that nobody
reads is not taken for ever; a client that takes nothing of its answer is cut. Timers run only while something is
overdue: a request that comes in one piece, and whose answer goes out at once, sets none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tercet_frontend.api.errors import error_response
from tercet_shared.errors import (
    HeadTooLargeError,
    InvalidRequestError,
    RequestTimeoutError,
    TercetError,
    UnavailableError,
)

if TYPE_CHECKING:
    import asyncio
    import ssl
    from collections.abc import Callable

MAX_HEAD_BYTES = 64 * 1024
"""Of the address and all header fields together."""

MAX_FIELDS = 128
"""Header fields of a request."""

LINGER = 2.0
"""Seconds in which what a client still sends is taken and thrown away, so that it gets to read its answer."""

NO_CERTIFICATE = "tercet.no_certificate"
"""Set in the scope of requests that came over TLS from a client which showed no certificate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of connections.

    Attributes:
        max_connections: at once; 0 for no limit.
        receive_timeout: seconds in which a head, and then a body, has to come.
        client_timeout: seconds after which a client is cut that takes nothing of its answer.
        linger: seconds, see `LINGER`.
        max_head_bytes: see `MAX_HEAD_BYTES`.
        max_fields: see `MAX_FIELDS`.
    """

    max_connections: int = 0
    receive_timeout: float = 60.0
    client_timeout: float = 60.0
    linger: float = LINGER
    max_head_bytes: int = MAX_HEAD_BYTES
    max_fields: int = MAX_FIELDS


class _HeadTooLarge(Exception):  # noqa: N818  # passes through the parser, and is no one's to handle
    pass


class LimitedProtocol(HttpToolsProtocol):
    """One connection. See `limited_protocol`."""

    limits = ConnectionLimits()
    refused: Callable[[str, int, TercetError], None] = staticmethod(lambda _client, _status, _error: None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._in_message = False
        self._discarding = False
        self._head_bytes = 0
        self._head_pieces = 0
        self._fields = 0
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._no_certificate = False

    # ------------------------------------------------------------------------------------------------ the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes the connection, or refuses it when there are too many."""
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        self._no_certificate = tls is not None and _shows_no_certificate(tls)
        if self.limits.max_connections and len(self.connections) > self.limits.max_connections:
            self._refuse(UnavailableError("The server has too many connections; try again.", retry_after=1.0))
        else:
            self._receiving = self.loop.call_later(self.limits.receive_timeout, self._not_received)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timers with the connection."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for timer in (self._receiving, self._sending):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Parses what came."""
        self._unset_keepalive_if_required()
        if self._discarding:
            return
        if self._in_head:
            self._head_pieces += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # to nothing that is spoken here; it is answered as any other request
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _HeadTooLarge):
                self._refuse(self._too_large())
            else:
                self._refuse(InvalidRequestError("This is no valid HTTP request."))
            return
        if self._in_head and self._head_pieces > self.limits.max_head_bytes:
            self._refuse(self._too_large())
        elif (self._in_message or not self._busy()) and self._receiving is None:
            self._receiving = self.loop.call_later(self.limits.receive_timeout, self._not_received)

    def pause_writing(self) -> None:
        """The client takes less than is sent."""
        super().pause_writing()
        if self._sending is not None:  # it has taken enough for more to be sent since
            self._sending.cancel()
            self._sending = None
        self._watch_sending()

    # --------------------------------------------------------------------------------------------------- the parser

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._head_bytes = self._head_pieces = self._fields = 0
        if self._no_certificate:
            self.scope[NO_CERTIFICATE] = True  # type: ignore[literal-required]

    def on_url(self, url: bytes) -> None:
        """A piece of the address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field, or one behind a body in chunks."""
        self._fields += 1
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete; the body has its own time."""
        self._in_head = False
        self._received()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._in_message = False
        self._received()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer is written, if not yet sent."""
        super().on_response_complete()
        if self._in_message and not self._in_head and not self._busy() and not self.transport.is_closing():
            self._linger()  # nobody reads the rest of this body any more
        if self.transport.get_write_buffer_size():
            self._watch_sending()

    # ----------------------------------------------------------------------------------------------------- the limits

    def _busy(self) -> bool:
        """Returns whether a request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.limits.max_head_bytes or self._fields > self.limits.max_fields:
            raise _HeadTooLarge

    def _too_large(self) -> HeadTooLargeError:
        return HeadTooLargeError(
            f"The address and headers of a request may have {self.limits.max_head_bytes} bytes and "
            f"{self.limits.max_fields} fields."
        )

    def _received(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _not_received(self) -> None:
        """Too much time has passed since a head or body began."""
        self._receiving = None
        if self._busy():
            # The endpoint waits for the body, with a limit of its own; or a pipelined request waits for its turn.
            if self._in_message:
                self._receiving = self.loop.call_later(self.limits.receive_timeout, self._not_received)
        elif self._in_head:
            self._refuse(RequestTimeoutError("The head of the request did not come in time."))
        else:
            self._close()

    def _linger(self) -> None:
        self._received()
        self._receiving = self.loop.call_later(self.limits.linger, self._close)

    def _close(self) -> None:
        self._receiving = None
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._watch_sending()

    def _refuse(self, error: TercetError) -> None:
        """Answers what is no request, and ends the connection."""
        self._discarding = True
        if self._busy():
            self.cycle.keep_alive = False  # what was asked before is answered; then the connection ends
            return
        response = error_response(error, self.url.decode("latin-1").partition("?")[0] if self._in_message else "")
        head = [STATUS_LINE[response.status_code]]
        head += [b"%s: %s\r\n" % field for field in response.raw_headers]
        head.append(b"connection: close\r\n\r\n")
        self.transport.write(b"".join(head) + bytes(response.body))
        self.refused(self.client[0] if self.client else "", response.status_code, error)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger()

    def _watch_sending(self) -> None:
        if self._sending is None:
            self._unsent = self.transport.get_write_buffer_size()
            self._sending = self.loop.call_later(self.limits.client_timeout, self._not_taken)

    def _not_taken(self) -> None:
        self._sending = None
        unsent = self.transport.get_write_buffer_size()
        if not unsent or (not self.flow.write_paused and self._busy()):
            return  # all was taken, or enough for more to be sent
        if unsent < self._unsent:
            self._watch_sending()
        else:
            # Closing would wait for the client to take the rest.
            self.transport.abort()


def limited_protocol(
    limits: ConnectionLimits, refused: Callable[[str, int, TercetError], None] = lambda _client, _status, _error: None
) -> type[asyncio.Protocol]:
    """Returns the class of connections with these limits, for uvicorn.

    Args:
        limits: of each connection.
        refused: is told of what was refused before it was a request: client, status, error.
    """
    return type("Connection", (LimitedProtocol,), {"limits": limits, "refused": staticmethod(refused)})


def _shows_no_certificate(connection: ssl.SSLObject) -> bool:
    return not connection.getpeercert()
