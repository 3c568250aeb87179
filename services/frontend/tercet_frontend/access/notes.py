"""What is logged of requests, and of what happens to the server's own secrets. Never a prompt, an output or a key."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tercet_shared.errors import bounded, status_of

if TYPE_CHECKING:
    from tercet_frontend.access.exchange import Exchange
    from tercet_frontend.access.journal import Journal
    from tercet_shared.errors import TercetError

MAX_PATH = 200

_REFUSED = frozenset({401, 403, 404, 429})


class Notes:
    """The access log, which has every request, and the audit log, which has those that need a key, and events.

    Args:
        access: None for no access log.
        audit: None for no audit log.
    """

    def __init__(self, access: Journal | None = None, audit: Journal | None = None) -> None:
        self._access = access
        self._audit = audit

    @property
    def wanted(self) -> bool:
        """Whether anything is logged."""
        return self._access is not None or self._audit is not None

    def request(
        self,
        exchange: Exchange,
        *,
        method: str,
        path: str,
        status: int,
        seconds: float,
        sent_bytes: int,
        public: bool,
    ) -> None:
        """Notes a request that is over.

        Args:
            exchange: what is known of it.
            method: of HTTP.
            path: without the query.
            status: of HTTP; 499 where the client had gone before any.
            seconds: from its head to the end of its answer.
            sent_bytes: of the answer's body.
            public: whether it needed no key.
        """
        entry: dict[str, Any] = {
            "time": _now(),
            "request_id": exchange.request_id,
            "trace_id": exchange.trace_id or None,
            "method": bounded(method, 20),
            "path": bounded(path, MAX_PATH),
            "status": status,
            "duration": round(seconds, 6),
            "bytes": sent_bytes,
            "tenant": exchange.key.owner or None,
            "key": exchange.key.name or None,
            "client": exchange.client or None,
            "model": exchange.model or None,
            "served_model": exchange.target or None,
            "prompt_tokens": exchange.prompt_tokens,
            "output_tokens": exchange.output_tokens,
            "finish_reasons": exchange.finish_reasons,
            "error": exchange.error or None,
        }
        if self._access is not None:
            self._access.write(entry)
        if self._audit is not None and not public:
            outcome = "refused" if status in _REFUSED else "failed" if status >= 500 else "allowed"
            self._audit.write({"event": "request", "outcome": outcome, **entry})

    def refused(self, client: str, status: int, error: TercetError) -> None:
        """Notes what was refused before it was a request."""
        if self._access is not None:
            found = status_of(error)
            code = found.code or found.type
            self._access.write({"time": _now(), "status": status, "client": client or None, "error": code})

    def event(self, name: str, detail: str) -> None:
        """Notes in the audit log that something happened; ``detail`` is one sentence."""
        if self._audit is not None:
            self._audit.write({"event": name, "time": _now(), "detail": bounded(detail)})

    def reopen(self) -> None:
        """Opens the logs' files anew."""
        for journal in (self._access, self._audit):
            if journal is not None:
                journal.reopen()

    def close(self) -> None:
        """Writes what is left."""
        for journal in (self._access, self._audit):
            if journal is not None:
                journal.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
