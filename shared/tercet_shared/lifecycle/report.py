"""The line from a service to its supervisor: JSON lines on a pipe that the child inherits.

A line is one of::

    {"event": "progress", "stage": "loading weights", "fraction": 0.4}    fraction is null where it is not known
    {"event": "ready", "detail": {"port": 8000}}
    {"event": "fatal", "message": "one sentence"}

Without a supervisor (a container), the same calls become log lines.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tercet_shared.errors import ProtocolError, bounded

_MAX_LINE = 16 * 1024

logger = logging.getLogger("tercet")


@dataclass(frozen=True, slots=True)
class Event:
    """One line."""

    event: Literal["progress", "ready", "fatal"]
    stage: str = ""
    fraction: float | None = None
    message: str = ""
    detail: dict[str, Any] = field(default_factory=dict)


class Reporter(Protocol):
    """Where a service reports its start."""

    def progress(self, stage: str, fraction: float | None = None) -> None:
        """Says what is being done, and how far it is (0 to 1)."""

    def ready(self, **detail: Any) -> None:
        """Says that the service does its work now."""

    def fatal(self, message: str) -> None:
        """Says in one sentence why the process is about to end."""


class PipeReporter:
    """Writes events as lines to a pipe. A supervisor that is gone is not an error: nobody is left to tell."""

    def __init__(self, fd: int) -> None:
        """Takes over ``fd`` and keeps it from being inherited further."""
        os.set_inheritable(fd, False)
        self._fd = fd

    def progress(self, stage: str, fraction: float | None = None) -> None:  # noqa: D102  # see Reporter
        self._write({"event": "progress", "stage": stage, "fraction": fraction})

    def ready(self, **detail: Any) -> None:  # noqa: D102  # see Reporter
        self._write({"event": "ready", "detail": detail})

    def fatal(self, message: str) -> None:  # noqa: D102  # see Reporter
        self._write({"event": "fatal", "message": bounded(message)})

    def _write(self, event: dict[str, Any]) -> None:
        try:
            os.write(self._fd, json.dumps(event).encode() + b"\n")  # under PIPE_BUF or nearly: one write, one line
        except BrokenPipeError:
            logger.debug("the supervisor no longer reads reports")


class LogReporter:
    """Writes events to the log."""

    def progress(self, stage: str, fraction: float | None = None) -> None:  # noqa: D102  # see Reporter
        logger.debug("%s%s", stage, "" if fraction is None else f" {fraction:.0%}")

    def ready(self, **detail: Any) -> None:  # noqa: D102  # see Reporter
        logger.info("ready%s", "".join(f" {key}={value}" for key, value in detail.items()))

    def fatal(self, message: str) -> None:  # noqa: D102  # see Reporter
        logger.error("%s", message)


def parse_event(line: bytes) -> Event:
    """Returns the event in ``line``. Raises `ProtocolError` when it is none."""
    try:
        raw = json.loads(line[:_MAX_LINE])
        kind = raw["event"]
        if kind not in ("progress", "ready", "fatal"):
            raise ProtocolError("A child reported an unknown event.")
        fraction = raw.get("fraction")
        return Event(
            event=kind,
            stage=str(raw.get("stage", "")),
            fraction=None if fraction is None else float(fraction),
            message=str(raw.get("message", "")),
            detail=dict(raw.get("detail", {})),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"A child reported something that is not an event: {error}") from error
