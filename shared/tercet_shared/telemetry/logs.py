"""How log records are written: lines of text for people, or lines of JSON with the trace that they belong to."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from opentelemetry.trace import get_current_span

from tercet_shared.telemetry.tracing import parse

LogFormat = Literal["text", "json"]

_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class JsonLines(logging.Formatter):
    """One JSON object per record: time, level, logger, message, service; trace_id, span_id and error where they exist.

    The trace is that of the running task (`tercet_shared.telemetry.tracing.log_under`), or the one that the record
    names: ``log.warning("…", extra={"traceparent": …})``.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, without its end."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        entry: dict[str, Any] = {
            "time": time,
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        named = getattr(record, "traceparent", "")
        context = parse(named) if named else get_current_span().get_span_context()
        if context is not None and context.is_valid:
            entry["trace_id"] = f"{context.trace_id:032x}"
            entry["span_id"] = f"{context.span_id:016x}"
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging(level: str, form: LogFormat = "text", service: str = "tercet") -> None:
    """Logs to standard error, one line per record (a traceback in text takes more).

    Args:
        level: least severity, as ``info``.
        form: of the lines.
        service: who logs; stands in JSON.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service) if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Its exporters log every attempt to reach a collector that is away; `delivery` says it once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
