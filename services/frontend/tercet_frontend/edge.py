"""What every HTTP request passes first and last: its id, its key, its log line. Pure ASGI: it costs streams nothing.

From outside to inside: `Edge` (id, client's address, logs), cross-origin rules, `Gate` (keys, and errors that nobody
expected), the application. So whatever answers, the answer has an id, and a page of another origin may read it.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from secrets import token_hex
from typing import TYPE_CHECKING, Final

from starlette.middleware.cors import CORSMiddleware

from tercet_frontend.access.connection import NO_CERTIFICATE
from tercet_frontend.access.exchange import Exchange, attach, exchange_of
from tercet_frontend.access.notes import Notes
from tercet_frontend.access.proxies import TrustedProxies
from tercet_frontend.api.errors import error_response
from tercet_frontend.api.health import HEALTH_PATHS
from tercet_frontend.shortcut import offer, withdraw
from tercet_frontend.telemetry.watch import CLIENT_CLOSED, NO_WATCHER
from tercet_shared.errors import AuthenticationError, InternalError, TercetError
from tercet_shared.telemetry.tracing import log_under

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from tercet_frontend.auth import ApiKeys
    from tercet_frontend.telemetry.watch import Watcher

_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_CLIENT_CLOSED: Final = 499
_EXPOSED: Final = (
    "x-request-id",
    "retry-after",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
_PREFLIGHT_SECONDS: Final = 600


def tenant_of(scope: Scope) -> str:
    """Returns whose request this is; empty without API keys."""
    return exchange_of(scope).key.owner


def request_id_of(scope: Scope) -> str:
    """Returns the id that this request has in ``X-Request-Id``."""
    return exchange_of(scope).request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeOptions:
    """How requests are taken in.

    Attributes:
        proxies: who is believed about a client's address.
        notes: where requests are logged.
        heartbeat: seconds of silence after which a stream says that it is alive; 0 for never.
        origins: whose pages may call from a browser; ``*`` for all.
        client_certificates: whether clients that come over TLS must have shown a certificate.
        watcher: hears of every request.
    """

    proxies: TrustedProxies = field(default_factory=TrustedProxies)
    notes: Notes = field(default_factory=Notes)
    heartbeat: float = 0.0
    origins: Sequence[str] = ()
    client_certificates: bool = False
    watcher: Watcher = NO_WATCHER


class Edge:
    """ASGI middleware, outermost: makes the `Exchange` of each request, and closes it."""

    def __init__(self, app: ASGIApp, options: EdgeOptions, public: frozenset[str] = frozenset()) -> None:
        """Takes the application behind it, the options, and the paths besides health that need no key."""
        self._app = app
        self._options = options
        self._public = HEALTH_PATHS | public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, and notes what came of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        exchange = self._exchange(scope)
        attach(scope, exchange)
        exchange.watch = self._options.watcher.begin(scope, exchange)
        if exchange.traceparent:
            log_under(exchange.traceparent)  # to the end of the request's task, so that the server's own lines count
        request_id = exchange.request_id.encode()
        status = sent = 0
        complete = False

        def send_noted(message: Message) -> Awaitable[None]:
            nonlocal status, sent, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id), *exchange.rate_headers()]
            else:
                sent += len(message.get("body", b""))
                complete = not message.get("more_body", False)
            return send(message)

        offer(scope, send_noted)
        try:
            await self._app(scope, receive, send_noted)
        finally:
            withdraw(scope)
            exchange.close()
            if not complete or status == _CLIENT_CLOSED:
                exchange.error = exchange.error or CLIENT_CLOSED
            exchange.watch.ended(status or _CLIENT_CLOSED)
            if self._options.notes.wanted:
                public = scope["path"] in self._public
                # Probes come every few seconds; they are of interest when they fail.
                if not public or status != 200 or scope["path"] not in HEALTH_PATHS:
                    self._options.notes.request(
                        exchange,
                        method=scope["method"],
                        path=scope["path"],
                        status=status or _CLIENT_CLOSED,
                        seconds=time.perf_counter() - begin,
                        sent_bytes=sent,
                        public=public,
                    )

    def _exchange(self, scope: Scope) -> Exchange:
        given = b""
        traceparent = ""
        forwarded_for: list[bytes] = []
        forwarded_proto = b""
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                given = value
            elif name == b"traceparent":
                traceparent = value.decode("latin-1")
            elif name == b"x-forwarded-for":
                forwarded_for.append(value)
            elif name == b"x-forwarded-proto":
                forwarded_proto = value
        client = scope["client"][0] if scope.get("client") else ""
        proxies = self._options.proxies
        if (forwarded_for or forwarded_proto) and proxies.believes(client):
            client = proxies.client(client, b",".join(forwarded_for))
            scope["client"] = (client, 0)
            if forwarded_proto in (b"http", b"https"):
                scope["scheme"] = forwarded_proto.decode()
        return Exchange(
            request_id=given.decode() if _SANE_ID.fullmatch(given) else token_hex(16),
            client=client,
            traceparent=traceparent,
            heartbeat=self._options.heartbeat,
        )


class Gate:
    """ASGI middleware, innermost: refuses whoever has no valid key, and answers when the application cannot."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, public: frozenset[str] = frozenset(), *, client_certificates: bool = False
    ) -> None:
        """Takes the application behind it, the keys, and what needs none besides health; and whether to ask for more.

        Args:
            app: the application.
            keys: who may call.
            public: paths that need no key.
            client_certificates: whether who comes over TLS must have shown a certificate, also on public paths.
        """
        self._app = app
        self._keys = keys
        self._public = HEALTH_PATHS | public
        self._client_certificates = client_certificates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request, or passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = exchange_of(scope)
        started = False

        def send_counted(message: Message) -> Awaitable[None]:
            nonlocal started
            started = True
            return send(message)

        try:
            if scope["path"] not in HEALTH_PATHS:
                if self._client_certificates and scope.get(NO_CERTIFICATE):
                    raise AuthenticationError("No client certificate was shown.")
                if scope["path"] not in self._public:
                    exchange.key = await self._keys.find(*_credentials(scope))
        except TercetError as error:
            exchange.failed(error)
            await error_response(error, scope["path"])(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send_counted)
        except Exception:
            fault = InternalError("The server had an error while it processed the request.")
            exchange.failed(fault)
            if not started:
                await error_response(fault, scope["path"])(scope, receive, send)
            raise  # the server logs the traceback; the client is not shown what went wrong inside


def cross_origin(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Returns ``app`` as pages of ``origins`` may call it. Browsers ask for leave without a key."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=_EXPOSED,
        max_age=_PREFLIGHT_SECONDS,
    )


def _credentials(scope: Scope) -> tuple[bytes | None, bytes | None]:
    authorization = api_key = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            authorization = value
        elif name == b"x-api-key":
            api_key = value
    return authorization, api_key
